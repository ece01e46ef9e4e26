"""PPO: a stack of learners computes what one alone would, and each knows nothing of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.learners import draws
from lockstep.learners.history import History
from lockstep.learners.network import Stack
from lockstep.learners.ppo import PPO, Streams, features
from lockstep.worlds import darkroom, key_door
from tests.learners import plain_ppo

SHORT = PPO(n_epochs=4)


def streams(tasks: list[int], numbers: list[int] | None = None, seed: int = 42) -> tuple[Tensor, Tensor]:
    chosen = torch.tensor(tasks)
    return chosen, draws.keys(chosen, torch.tensor(numbers or [0] * len(tasks)), seed=seed)


def learnt(ppo: PPO, tasks: Tensor, keys: Tensor, steps: int) -> tuple[History, Stack]:
    """A run that also shows its networks."""
    world = darkroom.build()
    history = History.empty(len(tasks), steps, tasks.device)
    stack = Stack(keys, 2, hidden=ppo.hidden, actions=5)
    running = Streams(tasks, keys, torch.full_like(tasks, world.start))
    for start in range(0, steps, ppo.n_steps):
        rollout, running = ppo.rollout(stack, world, running, history, start)
        ppo.learn(stack, rollout, features(world), keys, start // ppo.n_steps)
    return history, stack


def furthest(model: plain_ppo.Plain, stack: Stack, number: int) -> float:
    """The largest difference of a weight."""
    mine = dict(plain_ppo.Plain(stack, number).named_parameters())
    return max(float((mine[name] - weight).detach().abs().max()) for name, weight in model.named_parameters())


@pytest.mark.parametrize("task", [40, 31])
def test_a_stack_learns_as_one_written_down_plainly(task: int) -> None:
    tasks, keys = streams([5, task, 77], [0, 3, 1])
    model = plain_ppo.Plain(Stack(keys, 2, hidden=64, actions=5), 1)
    untouched = plain_ppo.Plain(Stack(keys, 2, hidden=64, actions=5), 1)
    plain = plain_ppo.run(SHORT, model, darkroom.build(), task, keys[1], 160)
    history, stack = learnt(SHORT, tasks, keys, 160)
    assert sum(plain["rewards"]) > 0
    for name, column in plain.items():
        assert getattr(history, name)[1].tolist() == column
    assert furthest(model, stack, 1) < 2e-5
    assert furthest(untouched, stack, 1) > 2e-3


WRONG = [
    replace(SHORT, gae_lambda=0.5), replace(SHORT, vf_coef=1.0), replace(SHORT, max_grad_norm=100.0),
    replace(SHORT, clip_range=0.01), replace(SHORT, gamma=0.9), replace(SHORT, source_lr=2e-4),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_every_setting_is_seen_in_the_weights(wrong: PPO) -> None:
    """The control: the comparison above fails where a setting is another one."""
    tasks, keys = streams([31])
    model = plain_ppo.Plain(Stack(keys, 2, hidden=64, actions=5), 0)
    plain_ppo.run(SHORT, model, darkroom.build(), 31, keys[0], 80)
    assert furthest(model, learnt(SHORT, tasks, keys, 80)[1], 0) < 2e-5
    assert furthest(model, learnt(wrong, tasks, keys, 80)[1], 0) > 2e-4


def test_the_horizon_bootstraps() -> None:
    """Without the value of the last state, advantages at the end of an episode would be lower by gamma * V."""
    world, (tasks, keys) = darkroom.build(), streams([31])
    stack = Stack(keys, 2, hidden=64, actions=5)
    stack.weights.b3[1:, :, 0] = 5.0
    running = Streams(tasks, keys, torch.full_like(tasks, world.start))
    rollout, _ = SHORT.rollout(stack, world, running, History.empty(1, 80, tasks.device), 0)
    assert rollout.advantages[0, 19::20].abs().max() < 2.0  # 5 * gamma - 5, a reward, and how values differ
    assert (rollout.returns[0, 19::20] > 3.0).all()


@pytest.mark.parametrize("others", [[], [3], list(range(31)), list(range(66))])
def test_a_stream_does_not_feel_its_neighbours(others: list[int]) -> None:
    world = darkroom.build()
    alone = SHORT.run(world, *streams([40], [7]), steps=160)
    place = len(others) // 2
    tasks, keys = streams([*others[:place], 40, *others[place:]], [*others[:place], 7, *others[place:]])
    beside = SHORT.run(world, tasks, keys, steps=160)
    for one, many in zip(alone, beside, strict=True):
        assert torch.equal(one[0], many[place])
    if others:
        assert not torch.equal(beside.actions[place], beside.actions[place - 1])


def test_the_weights_of_a_stream_do_not_either() -> None:
    """Bit for bit, and not only the actions, which forgive small differences."""
    _, few = learnt(SHORT, *streams([3, 40], [0, 7]), 160)
    _, many = learnt(SHORT, *streams([*range(20), 40, *range(50)], [*range(20), 7, *range(50)]), 160)
    for one, other in zip(plain_ppo.Plain(few, 1).parameters(), plain_ppo.Plain(many, 20).parameters(), strict=True):
        assert torch.equal(one, other)


def test_first_weights_are_orthogonal() -> None:
    _, keys = streams([0, 1])
    stack = Stack(keys, 2, hidden=64, actions=5)
    eye = torch.eye(64).expand(4, 64, 64)
    torch.testing.assert_close(stack.weights.w2.mT @ stack.weights.w2, 2 * eye, rtol=0, atol=1e-5)
    policy, value = stack.weights.w3[:2, :, :5], stack.weights.w3[2:, :, :1]
    torch.testing.assert_close(policy.mT @ policy, 1e-4 * torch.eye(5).expand(2, 5, 5))
    torch.testing.assert_close(value.mT @ value, torch.ones(2, 1, 1))
    assert not stack.weights.w3[:2, :, 5:].any()
    assert not torch.equal(stack.weights.w2[0], stack.weights.w2[1])
    assert not torch.equal(stack.weights.w2[0], stack.weights.w2[2])
    assert not any(getattr(stack.weights, name).any() for name in ("b1", "b2", "b3"))


def test_streams_may_share_a_learner() -> None:
    world = darkroom.build()
    shared = replace(SHORT, streams_per_learner=4)
    tasks, keys = streams([40] * 8, list(range(8)))
    both = shared.run(world, tasks, keys, steps=160)
    half = shared.run(world, tasks[:4], keys[:4], steps=160)
    assert torch.equal(both.actions[:4], half.actions)
    assert len({tuple(row.tolist()) for row in both.actions}) == 8
    apart = SHORT.run(world, tasks[:4], keys[:4], steps=160)
    assert not torch.equal(apart.actions, half.actions)


def test_key_and_door_too() -> None:
    history = SHORT.run(key_door.build(size=3), *streams([10, 44]), steps=160)
    assert history.cells.max() < 9
    assert history.rewards.sum() > 0


def test_a_minibatch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole number of minibatches"):
        PPO(batch_size=32)


@pytest.mark.slow
def test_the_seeds_settings_find_every_goal() -> None:
    """100 streams share a learner, 1040 steps of each, as upstream has it: a near goal, a far one, and a corner."""
    world, ppo = darkroom.build(), PPO(streams_per_learner=100)
    goals = torch.tensor([31, 60, 0])
    tasks = goals.repeat_interleave(100)
    history = ppo.run(world, tasks, draws.keys(tasks, torch.arange(300) % 100, seed=42), steps=1040)
    returns = history.returns(20).float().view(len(goals), 100, -1).mean(1)
    assert returns[:, :3].mean() < 2
    assert (returns[:, -5:].mean(1) / world.optimum(goals)).min() > 0.8
    still = replace(ppo, source_lr=0.0, n_epochs=1)  # the control: who does not learn, does not rise
    history = still.run(world, tasks, draws.keys(tasks, torch.arange(300), seed=42), steps=1040)
    assert history.returns(20)[:, -5:].float().mean() < 2
