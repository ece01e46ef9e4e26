"""Agents whose walks are known beforehand: one that knows the way, one that never looks at what it is paid."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.learners.posterior import toward
from lockstep.models.agent import Agent
from lockstep.models.agent_shapes import KNOWN, AgentShape
from lockstep.worlds.table import World

SURE = 50.0  # a logit beside which the others are nothing


def small_agent(seed: int = 0, name: str = "lockstep/ad-tiny", **changes: int) -> Agent:
    """A real agent with random weights, wild enough to take every action."""
    import dataclasses

    shape: AgentShape = dataclasses.replace(KNOWN[name], **changes)
    agent = Agent(shape, attention="native_flash")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in agent.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return agent.eval()


class Guide:
    """Knows the tasks of the rows, in their order, and walks straight to what pays next."""

    def __init__(self, world: World, tasks: Tensor, *, blind: bool = False) -> None:
        self.world, self.tasks, self.blind, self.asked = world, tasks, blind, 0

    def reader(self, rows: int, *, context_length: int, horizon: int) -> Guide.Reading:
        del context_length, horizon
        mine = self.tasks[self.asked : self.asked + rows]
        self.asked += rows
        return self.Reading(self, mine)

    class Reading:
        def __init__(self, guide: Guide, tasks: Tensor) -> None:
            self.guide, self.tasks = guide, tasks
            self.phases, self.seen = torch.zeros_like(tasks), list[Tensor]()

        def see(self, seen_BF: Tensor) -> Tensor:
            world = self.guide.world
            self.seen.append(seen_BF.clone())
            x_B, y_B, _, paid_B, first_B = seen_BF.unbind(-1)
            self.phases = torch.where(paid_B == 1, world.after_P[self.phases], self.phases)
            self.phases = torch.where(first_B == 1, torch.zeros_like(self.phases), self.phases)
            targets = world.targets_KP[self.tasks, self.phases]
            targets = torch.where(targets < 0, x_B * world.size + y_B, targets)
            if self.guide.blind:
                targets = torch.zeros_like(targets)
            moves = toward(world, x_B * world.size + y_B, targets, torch.zeros_like(targets, dtype=torch.bool))
            actions = (world.meaning_KA[self.tasks] == moves[:, None]).long().argmax(-1)
            return torch.nn.functional.one_hot(actions, world.actions) * SURE
