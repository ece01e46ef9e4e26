"""Walks: the returns are those of the world, the draw is the distribution, and no cut of the rows changes a number."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engine.strolls import last_episode
from lockstep.engine.unseen import Outcome, best, describe
from lockstep.engine.walks import Journey, choose, follow, steps, walk, whole_agent
from lockstep.learners import draws
from lockstep.learners.history import History
from lockstep.runtime.precision import Precision
from lockstep.worlds import darkroom, darkroompermuted, key_door
from lockstep.worlds.observed import NO_REWARD, observe
from lockstep.worlds.table import World
from tests.engine.walkers import Guide, small_agent

CPU = Precision("fp32", torch.device("cpu"))
ROOM = darkroom.build(size=5, horizon=8)
WORLDS = {
    "darkroom": darkroom.build(size=5),
    "darkroompermuted": darkroompermuted.build(size=4),
    "key_door": key_door.build(size=3, horizon=12),
}


def journey(**changes: Any) -> Journey:
    usual = Journey(ROOM, tuple(range(0, 25, 3)), episodes=5, repeats=2, context_length=32, seed=7)
    return dataclasses.replace(usual, **changes)


@pytest.mark.parametrize("name", WORLDS)
def test_who_knows_the_way_gets_exactly_the_optimum(name: str) -> None:
    world = WORLDS[name]
    asked = Journey(world, tuple(range(0, world.tasks, 7)), episodes=2, repeats=2)
    guide = Guide(world, asked.rows()[0])
    found = walk(guide, asked, CPU, chunk_rows=5)
    assert guide.asked == 2 * len(asked.tasks)
    assert found.shape == (len(asked.tasks), 2, 2)
    assert (found == best(world, asked.tasks)[:, None, None]).all()


def test_who_does_not_look_for_the_goal_stays_low() -> None:
    asked = Journey(ROOM, tuple(range(25)), episodes=2)
    found = walk(Guide(ROOM, asked.rows()[0], blind=True), asked, CPU)
    assert found[0].min() == best(ROOM, (0,))[0]  # the corner it always walks to
    assert np.delete(found, 0, 0).mean() < 1


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_returns_are_those_of_replaying_the_steps(name: str, temperature: float) -> None:
    """Also beyond the context, which holds three episodes only."""
    world = WORLDS[name]
    asked = Journey(world, (1, 2, 6), 5, repeats=2, context_length=3 * world.horizon, temperature=temperature)
    agent = small_agent()
    history = follow(agent, asked, CPU, *asked.rows())
    found = walk(agent, asked, CPU)
    for row, task in enumerate(asked.rows()[0].tolist()):
        paid, state = [0] * 5, torch.tensor(world.start)
        for time, action in enumerate(history.actions[row].tolist()):
            state = torch.tensor(world.start) if time % world.horizon == 0 else state
            assert int(state) % world.cells == history.cells[row, time]
            state, pays = world.step(torch.tensor(task), state, torch.tensor(action))
            paid[time // world.horizon] += int(pays)
        assert paid == found.reshape(6, 5)[row].tolist()
    assert history.rewards.sum() == found.sum()


def drawn(world: World, task: int, *actions: int) -> list[str]:
    """The last episode of these actions."""
    history, state = History.empty(1, len(actions), CPU.device), torch.tensor(world.start)
    for time, action in enumerate(actions):
        state = torch.tensor(world.start) if time % world.horizon == 0 else state
        history.cells[0, time], history.actions[0, time] = state % world.cells, action
        state, history.rewards[0, time] = world.step(torch.tensor(task), state, torch.tensor(action))
    return last_episode(world, task, history)


def test_the_last_episode_is_drawn_as_it_ended() -> None:
    right, left, up, down = range(4)
    legend, *picture = drawn(darkroom.build(size=3, horizon=3), 1 * 3 + 0, up, up, up, left, right, right)
    assert legend.startswith("@ agent  G goal")
    assert picture == ["· · ·", "• • @", "· G ·"]
    assert drawn(darkroom.build(size=3, horizon=3), 1 * 3 + 0, left, right, down)[1:] == ["· · ·", "• • ·", "· ★ ·"]
    doors, (key, door) = key_door.build(size=2, horizon=2), (0, 3)
    legend, *picture = drawn(doors, 4 * key + door, left, up)
    assert legend.startswith("@ agent  K key  D door")
    assert picture == ["@ D", "K ·"]
    assert drawn(doors, 4 * key + door, left, down)[1:] == ["• D", "★ ·"], "a key that was found is gone"
    assert drawn(doors, 4 * key + key, left, up)[1:] == ["@ •", "K ·"], "of two in one cell the next one is seen"


def test_an_agent_is_shown_what_it_would_have_been_shown_in_training() -> None:
    """And what the last step of an episode paid, in the first of the next."""
    asked = Journey(ROOM, (6, 18), episodes=3)
    guide = Guide(ROOM, asked.rows()[0])
    shown: list[list[torch.Tensor]] = []
    reader = guide.reader

    def reading(rows: int, **how: int) -> Any:
        made = reader(rows, **how)
        shown.append(made.seen)
        return made

    guide.reader = reading
    history = follow(guide, asked, CPU, *asked.rows())
    wanted = observe(*history, size=ROOM.size, horizon=ROOM.horizon, no_action=ROOM.actions)
    seen = torch.stack(shown[0], 1)
    assert torch.equal(seen, wanted)
    assert seen[0, 0].tolist() == [2, 2, ROOM.actions, NO_REWARD, 1]
    assert seen[0, ROOM.horizon, 3] == 1  # it had been paid to the end
    assert seen[0, ROOM.horizon].tolist()[:2] == [2, 2]


def test_no_cut_of_the_rows_changes_a_walk() -> None:
    agent, whole = small_agent(), journey()
    found = walk(agent, whole, CPU)
    assert (walk(agent, whole, CPU, chunk_rows=1) == found).all()
    assert (walk(agent, whole, CPU, chunk_rows=7) == found).all()
    alone = dataclasses.replace(whole, tasks=whole.tasks[3:4])
    assert (walk(agent, alone, CPU)[0] == found[3]).all()
    fewer = dataclasses.replace(whole, repeats=1, episodes=3)
    assert (walk(agent, fewer, CPU) == found[:, :1, :3]).all()


def test_the_same_seed_walks_the_same_way_and_another_does_not() -> None:
    agent = small_agent()
    actions = [follow(agent, journey(seed=seed), CPU, *journey(seed=seed).rows()).actions for seed in (7, 7, 8)]
    assert torch.equal(actions[0], actions[1])
    assert (actions[0] != actions[2]).float().mean() > 0.1
    first, second = actions[0][0::2], actions[0][1::2]  # two walks in each task
    assert (first != second).float().mean() > 0.1


def test_greedy_takes_the_likeliest_and_needs_no_seed() -> None:
    agent = small_agent()
    walks = [
        follow(agent, asked, CPU, *asked.rows()) for seed in (1, 2) if (asked := journey(seed=seed, temperature=0.0))
    ]
    assert torch.equal(walks[0].actions, walks[1].actions)
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert choose(logits, torch.zeros(2, dtype=torch.int64), 0.0).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_actions_are_drawn_from_the_distribution(temperature: float) -> None:
    count, logits = 20_000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    keys = draws.keys(torch.arange(count), torch.zeros(count, dtype=torch.int64), seed=3)
    drawn = choose(logits.expand(count, -1), draws.bits(keys, draws.WALK, 11), temperature)
    shares = torch.bincount(drawn, minlength=5) / count
    wanted = (logits / temperature).softmax(-1)
    assert (shares - wanted).abs().max() < 4 * (wanted * (1 - wanted) / count).sqrt().max()


def test_a_draw_never_falls_beside_the_actions() -> None:
    logits = torch.tensor([[-1e30, 0.0, -1e30], [0.0, 0.0, -1e30]])
    highest = torch.full((2,), -1, dtype=torch.int64)
    assert choose(logits, highest, 1.0).tolist() == [1, 1]
    assert choose(logits, torch.zeros(2, dtype=torch.int64), 1.0).tolist() == [1, 0]


def test_walking_changes_neither_the_model_nor_the_random_numbers_of_others() -> None:
    agent = small_agent()
    agent.train()
    before = {name: parameter.clone() for name, parameter in agent.named_parameters()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    copy = whole_agent(agent)
    walk(copy, journey(), CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert agent.training
    assert not copy.training
    for name, parameter in agent.named_parameters():
        assert torch.equal(parameter, before[name])
    for (name, one), (_, other) in zip(copy.named_parameters(), agent.named_parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.data_ptr() != other.data_ptr()


def test_a_compressed_agent_walks_on_through_many_regions() -> None:
    agent = small_agent(name="lockstep/ad-compressed", num_layers=1, hidden_size=32, intermediate_size=32, region=12)
    asked = journey(episodes=6, tasks=(3, 9))
    found = walk(agent, asked, CPU)
    assert (walk(agent, asked, CPU, chunk_rows=1) == found).all()


def test_what_walks_are_worth() -> None:
    returns = np.array([[[0, 2, 4, 6], [2, 4, 6, 8]], [[0, 0, 0, 0], [0, 0, 0, 4]]])
    outcome = Outcome((3, 5), returns, np.array([10, 6]))
    assert outcome.curve == [0.5, 1.5, 2.5, 4.5]
    assert outcome.last_episodes == 2
    assert outcome.ends.tolist() == [6.0, 1.0]
    told = outcome.fields()
    assert (told["first_return"], told["last_return"], told["return"], told["optimum"]) == (0.5, 3.5, 2.25, 8.0)
    assert Outcome((3,), returns[:1, :, :1], np.array([10])).last_episodes == 1


def test_tasks_have_names() -> None:
    assert describe(darkroom.build(), 4 * 9 + 7) == "(4, 7)"
    assert describe(key_door.build(size=3), 5 * 9 + 1) == "key (1, 2), door (0, 1)"
    assert describe(darkroompermuted.build(size=3), 0) == "(2, 2), actions 0 1 2 3 4"
    assert describe(darkroompermuted.build(size=3), 119) == "(2, 2), actions 4 3 2 1 0"


def test_steps_come_one_by_one() -> None:
    """So that a terminal can show them."""
    asked = journey(tasks=(4,), repeats=1, episodes=1)
    first = next(iter(steps(small_agent(), asked, CPU, *asked.rows())))
    assert [each.shape for each in first] == [(1,)] * 3
    assert first[0].item() == ROOM.start
