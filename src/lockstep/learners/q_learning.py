"""Tabular Q-learning (Watkins 1989), epsilon-greedy, with epsilon falling to 0: all streams as one vector.

The table has a row per state of the world, phases included: that it holds the key a learner knows from its own rewards.
An episode that is cut off is not over, so its last step bootstraps like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.learners.draws import EXPLORE, TIES, below, bits, uniform
from lockstep.learners.history import History
from lockstep.worlds.table import World


@dataclass(frozen=True)
class QLearning:
    """Q(s, a) += rate * (r + gamma * max Q(s') - Q(s, a))."""

    label: ClassVar[str] = "Q"
    streams_per_learner: ClassVar[int] = 1
    region: int = 80
    rate: float = 0.5
    gamma: float = 0.9
    explore: float = 0.7  # the part of the history over which epsilon falls from 1 to 0
    first_value: float = 0.0  # above 0: optimism, which explores by itself

    def steps(self, wanted: int) -> int:
        return wanted

    def chunk(self, device: torch.device) -> int:
        return 4096 if device.type == "cpu" else 1 << 16

    def run(self, world: World, tasks: Tensor, keys: Tensor, *, steps: int) -> History:
        count, device = len(tasks), tasks.device
        history = History.empty(count, steps, device)
        values = torch.full((count * world.states, world.actions), self.first_value, device=device)
        flat = values.view(-1)
        rows = torch.arange(count, device=device) * world.states
        shifts = torch.arange(0, 12 * world.actions, 12, device=device)
        states = torch.full_like(tasks, world.start)
        for time in range(steps):
            if time % world.horizon == 0:
                states.fill_(world.start)
            place = rows + states
            known = values[place]
            ties = (bits(keys, TIES, time)[:, None] >> shifts) & 0xFFF
            greedy = ties.masked_fill_(known < known.amax(1, keepdim=True), -1).argmax(1)
            drawn = bits(keys, EXPLORE, time)
            epsilon = max(0.0, 1.0 - time / (self.explore * steps)) if self.explore else 0.0
            actions = torch.where(uniform(drawn) < epsilon, below(drawn, world.actions), greedy)
            after, pays = world.step(tasks, states, actions)
            history.cells[:, time], history.actions[:, time], history.rewards[:, time] = (
                states % world.cells,
                actions,
                pays,
            )
            at = place * world.actions + actions
            goal = values[rows + after].amax(1) * self.gamma + pays
            old = flat[at]
            flat[at] = old + (goal - old) * self.rate
            states = after
        return history


def build(**settings: Any) -> QLearning:
    return QLearning(**settings)
