"""Posterior sampling: its learning curve, and that a stream is its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep import registry
from lockstep.learners import draws
from lockstep.learners.history import History
from lockstep.learners.posterior import Posterior
from lockstep.worlds import darkroom, darkroompermuted, key_door
from lockstep.worlds.table import World

WORLDS = (darkroom.build(), darkroompermuted.build(), key_door.build(size=5, horizon=30))


def run(learner: Posterior, world: World, steps: int, streams: int = 1000, seed: int = 0) -> History:
    tasks = torch.arange(streams) * 7919 % world.tasks
    keys = draws.keys(tasks, torch.arange(streams), seed=seed)
    return learner.run(world, tasks, keys, steps=steps)


def curve(history: History, world: World) -> Tensor:
    return history.returns(world.horizon).float().mean(0)


def test_the_folder_is_the_registry() -> None:
    assert registry.names("learners") == ["posterior", "ppo"]
    for name in registry.names("learners"):
        assert registry.load("learners", name, "build")().label


def test_posterior_sampling_learns_in_a_dozen_episodes() -> None:
    """The figures are those measured with another program (science 4.7); each mean is of 3,000 streams."""
    returns = curve(run(Posterior(), WORLDS[0], 240, streams=3000), WORLDS[0])
    known = torch.tensor([2.2, 5.2, 7.6, 9.2, 10.7, 11.9, 13.1, 13.9, 14.7, 15.2, 15.4, 15.6])
    assert (returns - known).abs().max() < 0.5


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_posterior_sampling_solves_every_world(world: World) -> None:
    returns = curve(run(Posterior(noise=0.0), world, 25 * world.horizon), world)
    best = world.optimum(torch.arange(world.tasks)).float().mean()
    assert returns[0] < 0.7 * best
    assert returns[-1] > 0.99 * best


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_a_stream_does_not_feel_its_neighbours(world: World) -> None:
    learner = Posterior()
    many = run(learner, world, 3 * world.horizon, streams=257)
    again = run(learner, world, 3 * world.horizon, streams=257)
    few = run(learner, world, 3 * world.horizon, streams=3)
    other = run(learner, world, 3 * world.horizon, streams=3, seed=1)
    for whole, twin, part, strange in zip(many, again, few, other, strict=True):
        assert torch.equal(whole, twin)
        assert torch.equal(whole[:3], part)
        assert part is few.rewards or not torch.equal(part, strange)


def test_what_is_written_is_what_happened() -> None:
    """Each row of a history follows from the row before by the world's own tables; nothing comes from elsewhere."""
    for world in WORLDS:
        history = run(Posterior(), world, 2 * world.horizon, streams=100)
        tasks = torch.arange(100) * 7919 % world.tasks
        states = torch.full_like(tasks, world.start)
        for time in range(2 * world.horizon):
            if time % world.horizon == 0:
                states = torch.full_like(tasks, world.start)
            assert torch.equal(history.cells[:, time].long(), states % world.cells)
            states, pays = world.step(tasks, states, history.actions[:, time].long())
            assert torch.equal(history.rewards[:, time].bool(), pays)


def test_draws_are_even_and_their_own() -> None:
    keys = draws.keys(torch.arange(1000) % 81, torch.arange(1000), seed=3)
    assert len(set(keys.tolist())) == 1000
    numbers = torch.stack([draws.uniform(draws.bits(keys, draws.ACTION, time)) for time in range(200)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.003
    assert abs(float((numbers[1:] * numbers[:-1]).mean()) - 0.25) < 0.003, "no tie between one time and the next"
    counts = torch.bincount(draws.below(draws.bits(keys, draws.EXPLORE, torch.arange(1000)), 5), minlength=5)
    assert counts.min() > 140
    times = torch.arange(50)
    one_by_one = torch.stack([draws.bits(keys[0], draws.ORDER, int(time)) for time in times])
    assert torch.equal(draws.bits(keys[0], draws.ORDER, times), one_by_one)


def test_pick_takes_only_what_is_set() -> None:
    mask = torch.zeros((3000, 9), dtype=torch.bool)
    mask[:, [2, 5, 8]] = True
    counts = torch.bincount(draws.pick(mask, draws.mix(torch.arange(3000))), minlength=9)
    assert counts.nonzero().squeeze(1).tolist() == [2, 5, 8]
    assert counts[[2, 5, 8]].min() > 900
    assert draws.pick(torch.zeros((1, 4), dtype=torch.bool), torch.tensor([7])).tolist() == [3]
