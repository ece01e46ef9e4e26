"""Noise curriculum (ad-eps): the best policy, of whose actions a falling share is replaced by random ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.learners.draws import EXPLORE, ORDER, below, bits, uniform
from lockstep.learners.history import History, toward
from lockstep.worlds.table import STAY, World


@dataclass(frozen=True)
class Noise:
    """Not a learner: it knows the task, and shows what improving looks like."""

    label: ClassVar[str] = "Noise"
    streams_per_learner: ClassVar[int] = 1
    region: int = 80
    fall: float = 1.0  # the part of the history over which the noise falls from 1 to 0

    def steps(self, wanted: int) -> int:
        return wanted

    def chunk(self, device: torch.device) -> int:
        return 4096 if device.type == "cpu" else 1 << 16

    def run(self, world: World, tasks: Tensor, keys: Tensor, *, steps: int) -> History:
        history = History.empty(len(tasks), steps, tasks.device)
        action_of_move = world.meaning_KA.argsort(1)
        states = torch.full_like(tasks, world.start)
        for time in range(steps):
            if time % world.horizon == 0:
                states.fill_(world.start)
            cells = states % world.cells
            targets = world.targets_KP[tasks, states // world.cells]
            drawn = bits(keys, EXPLORE, time)
            sideways = (bits(keys, ORDER, time) & 1).bool()
            best = torch.where(targets < 0, STAY, toward(world, cells, targets, sideways))
            share = max(0.0, 1.0 - time / (self.fall * steps)) if self.fall else 0.0
            random = uniform(drawn) < share
            actions = torch.where(random, below(drawn, world.actions), action_of_move[tasks, best])
            after, pays = world.step(tasks, states, actions)
            history.cells[:, time], history.actions[:, time], history.rewards[:, time] = cells, actions, pays
            states = after
        return history


def build(**settings: Any) -> Noise:
    return Noise(**settings)
