"""Posterior sampling (Thompson 1933; Strens 2000): believe one of the tasks that fit all one has seen, and act on it.

What is not known of these worlds is where each phase pays, and what the actions do. Both are kept as the set of what is
still possible. At the start of an episode, and whenever the belief is refuted, a new one is drawn from the set; the
agent walks to where it believes the reward to be. So it searches cell by cell, never twice in vain, and once it has
found the reward goes straight there: a complete learning curve in a dozen episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.learners.draws import EXPLORE, ORDER, TARGET, below, bits, pick, uniform
from lockstep.learners.history import History
from lockstep.worlds.table import STAY, World


@dataclass(frozen=True)
class Posterior:
    """Keyed by stream and time like every learner; `noise` is the share of actions that are random."""

    label: ClassVar[str] = "PSRL"
    streams_per_learner: ClassVar[int] = 1
    region: int = 80
    noise: float = 0.05

    def steps(self, wanted: int) -> int:
        return wanted

    def chunk(self, device: torch.device) -> int:
        return 4096 if device.type == "cpu" else 1 << 16

    def run(self, world: World, tasks: Tensor, keys: Tensor, *, steps: int) -> History:
        history, belief = History.empty(len(tasks), steps, tasks.device), Belief(world, len(tasks))
        states = torch.full_like(tasks, world.start)
        for time in range(steps):
            if time % world.horizon == 0:
                states.fill_(world.start)
                belief.forget()
            cells, phases = states % world.cells, states // world.cells
            belief.draw(phases, keys, time)
            drawn = bits(keys, EXPLORE, time)
            actions = belief.action(cells, phases, (bits(keys, ORDER, time) & 1).bool())
            actions = torch.where(uniform(drawn) < self.noise, below(drawn, world.actions), actions)
            after, pays = world.step(tasks, states, actions)
            history.cells[:, time], history.actions[:, time], history.rewards[:, time] = cells, actions, pays
            belief.see(cells, phases, actions, after % world.cells, pays)
            states = after
        return history


class Belief:
    """For each stream: the targets and the meanings of actions that are possible, and those it acts on. M streams."""

    def __init__(self, world: World, streams: int) -> None:
        self.world, device = world, world.moves_CA.device
        self.rows = torch.arange(streams, device=device)
        anywhere = torch.zeros((world.phases, world.cells + 1), dtype=torch.bool, device=device)
        anywhere[torch.arange(world.phases, device=device)[None], world.targets_KP] = True  # NOWHERE is the last column
        self.targets_MPC = anywhere[None, :, : world.cells].repeat(streams, 1, 1)
        self.nothing_P = ~anywhere[:, : world.cells].any(1)  # phases in which no task pays
        self.meanings_QA = torch.unique(world.meaning_KA, dim=0)
        self.actions_QA = self.meanings_QA.argsort(1)  # move -> action
        self.meanings_MQ = torch.ones((streams, len(self.meanings_QA)), dtype=torch.bool, device=device)
        self.target, self.meaning = (torch.full((streams,), -1, device=device) for _ in range(2))

    def forget(self) -> None:
        """The belief, not what was seen."""
        self.target.fill_(-1)
        self.meaning.fill_(-1)

    def draw(self, phases: Tensor, keys: Tensor, time: int) -> None:
        """Believe something possible, where one does not already."""
        lost = (self.target < 0).nonzero().squeeze(1)
        possible = self.targets_MPC[lost, phases[lost]]
        self.target[lost] = pick(possible, bits(keys[lost], TARGET, time))
        if len(self.meanings_QA) == 1:
            self.meaning.zero_()
            return
        lost = (self.meaning < 0).nonzero().squeeze(1)
        self.meaning[lost] = pick(self.meanings_MQ[lost], bits(keys[lost], TARGET, time) >> 32)

    def action(self, cells: Tensor, phases: Tensor, sideways: Tensor) -> Tensor:
        move = toward(self.world, cells, self.target, sideways)
        return self.actions_QA[self.meaning, torch.where(self.nothing_P[phases], STAY, move)]

    def see(self, cells: Tensor, phases: Tensor, actions: Tensor, after: Tensor, pays: Tensor) -> None:
        """Strike out what would have gone otherwise; a belief that was struck out is given up."""
        found = pays.nonzero().squeeze(1)
        self.targets_MPC[self.rows, phases, after] = False
        self.targets_MPC[found, phases[found]] = False
        self.targets_MPC[found, phases[found], after[found]] = True
        still = self.targets_MPC[self.rows, phases, self.target]
        moved_on = pays & (self.world.after_P[phases] != phases)
        self.target.masked_fill_(~still | moved_on, -1)
        if len(self.meanings_QA) > 1:
            self.meanings_MQ &= self.world.moves_CA[cells[:, None], self.meanings_QA.T[actions]] == after[:, None]
            self.meaning.masked_fill_(~self.meanings_MQ[self.rows, self.meaning], -1)


def toward(world: World, cells: Tensor, targets: Tensor, sideways: Tensor) -> Tensor:
    """The move that brings each cell nearer to its target; `sideways` (bool) says which axis goes first."""
    size = world.size
    dx, dy = targets // size - cells // size, targets % size - cells % size
    along_x, along_y = torch.where(dx > 0, 0, 1), torch.where(dy > 0, 2, 3)
    first_x = (dx != 0) & ((dy == 0) | ~sideways)
    return torch.where(first_x, along_x, torch.where(dy != 0, along_y, 4))


def build(**settings: Any) -> Posterior:
    return Posterior(**settings)
