"""Agents under --deterministic on a GPU: no operation is asked for that has no kernel there that repeats its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.engine.walks import Journey, walk
from lockstep.learners import draws
from lockstep.learners.history import Learner
from lockstep.learners.posterior import Posterior
from lockstep.learners.ppo import PPO
from lockstep.runtime.precision import Precision
from lockstep.worlds import darkroom, darkroompermuted, key_door
from tests.engine.walkers import small_agent

# What torch 2.11 refuses on a GPU then, of what is asked of numbers in one dimension (use_deterministic_algorithms).
ALWAYS = {"kthvalue", "median", "histc", "put_", "resize_", "_histogramdd_bin_edges", "multinomial_alias"}
OF_FLOATS = {"cumsum", "cumsum_", "cumprod", "bincount"}


class LikeOnAGpu(TorchDispatchMode):
    """Refuses what is refused there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        floats = any(isinstance(each, Tensor) and each.is_floating_point() for each in args)
        if name in ALWAYS or (name in OF_FLOATS and floats):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


def test_the_control_refuses() -> None:
    with LikeOnAGpu():
        assert torch.arange(3).cumsum(0).tolist() == [0, 1, 3]
        with pytest.raises(RuntimeError, match="cumsum"):
            torch.rand(3).cumsum(0)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_walks(temperature: float) -> None:
    journey = Journey(darkroom.build(size=5, horizon=4), (3, 8), 2, context_length=6, temperature=temperature)
    agent, precision = small_agent(), Precision("fp32", torch.device("cpu"))
    with LikeOnAGpu():
        found = walk(agent, journey, precision)
    assert (found == walk(agent, journey, precision)).all()


@pytest.mark.parametrize(
    "learner", [PPO(n_steps=20, batch_size=20, n_epochs=1), Posterior()], ids=lambda each: each.label
)
def test_learners(learner: Learner) -> None:
    for world in (darkroom.build(size=3), darkroompermuted.build(size=3), key_door.build(size=2, horizon=20)):
        tasks = torch.arange(4)
        keys = draws.keys(tasks, tasks, seed=1)
        with LikeOnAGpu():
            made = learner.run(world, tasks, keys, steps=20)
        assert all(map(torch.equal, made, learner.run(world, tasks, keys, steps=20)))


def test_running_sums_are_those_of_torch() -> None:
    """Bit for bit, on a CPU: what was collected before is collected again."""
    shares = torch.rand(50, 7, 5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draws.heights(shares).float(), shares.cumsum(-1))
    assert torch.equal(draws.heights(shares.double()), shares.double().cumsum(-1))
