"""Small agents and what they have lived through, for the tests of Algorithm Distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.models.agent import Agent
from lockstep.models.agent_shapes import KNOWN, AgentShape
from lockstep.models.initialise import initialise
from lockstep.worlds.observed import observe

TINY = KNOWN["lockstep/ad-tiny"]
HORIZON, SIZE = 5, 9
REGIONS = replace(TINY, compressed=True, region=2 * HORIZON, summary_tokens=3)
FORGETFUL = replace(REGIONS, summary_tokens=0)
Steps = tuple[Tensor, Tensor, Tensor]  # cells, actions and rewards, (B, L) each


def make(shape: AgentShape = TINY, *, std: float = 0.2, wide: bool = False, **options: Any) -> Agent:
    agent = Agent(shape, **{"attention": "native_flash", **options})
    initialise(agent, seed=1, std=std)
    if wide:
        agent.double().rebuild_buffers()
    return agent


def lived(rows: int, length: int, *, seed: int = 3) -> Steps:
    """Some histories that begin with an episode."""
    noise = torch.Generator().manual_seed(seed)
    sizes = (SIZE * SIZE, TINY.vocab_size, 2)
    cells, actions, rewards = (torch.randint(0, size, (rows, length), generator=noise) for size in sizes)
    return cells, actions, rewards


def shown(steps: Steps) -> Tensor:
    return observe(*steps, size=SIZE, horizon=HORIZON, no_action=TINY.vocab_size)


def histories(rows: int, length: int, *, seed: int = 3) -> Tensor:
    return shown(lived(rows, length, seed=seed))


def step_by_step(agent: Agent, seen: Tensor, *, context: int) -> Iterator[tuple[int, Tensor]]:
    reader = agent.reader(len(seen), context_length=context, horizon=HORIZON)
    for time in range(seen.shape[1]):
        yield time, reader.see(seen[:, time])
