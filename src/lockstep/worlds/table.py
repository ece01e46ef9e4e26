"""A world: a grid, and for each task what the actions do and which cell pays. All of it tables, on any device.

A state is one number, `cell + cells * phase`; a cell is `x * size + y`. What a step pays is decided by the cell it ends
in: 1 where that is the target of the task in the present phase, and then the phase moves on. A world never ends an
episode by itself: after `horizon` steps it is cut off and begins again at `start`, so the last state still has a value.
Shapes: K tasks, C cells, A actions, P phases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.errors import ConfigError

MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # what the five actions do to (x, y)
STAY = len(MOVES) - 1
NOWHERE = -1  # the target of a phase in which nothing pays
TASKS_AT_ONCE = 512  # whose optimum is computed together: what keeps the working set small


@dataclass(frozen=True)
class World:
    """The tables of a world, and its three questions: where a step leads, what is seen, what can be had."""

    name: str
    size: int  # of a side of the grid
    start: int  # the state in which each episode begins
    horizon: int  # steps of an episode
    moves_CA: Tensor  # cell and move -> cell
    meaning_KA: Tensor  # task and action -> move
    targets_KP: Tensor  # task and phase -> the cell that pays, or NOWHERE
    after_P: Tensor  # phase -> the phase after its target was found

    @property
    def tasks(self) -> int:
        return len(self.targets_KP)

    @property
    def cells(self) -> int:
        return len(self.moves_CA)

    @property
    def actions(self) -> int:
        return self.meaning_KA.shape[1]

    @property
    def phases(self) -> int:
        return len(self.after_P)

    @property
    def states(self) -> int:
        return self.cells * self.phases

    def to(self, device: torch.device | str) -> World:
        """The same world with its tables on a device."""
        tables = ("moves_CA", "meaning_KA", "targets_KP", "after_P")
        return replace(self, **{name: getattr(self, name).to(device) for name in tables})

    def step(self, tasks: Tensor, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The next states and whether each step pays (bool); int64 of one shape, or of shapes that broadcast."""
        cell = self.moves_CA[states % self.cells, self.meaning_KA[tasks, actions]]
        if self.phases == 1:
            return cell, cell == self.targets_KP[tasks, 0]
        phase = states // self.cells
        pays = cell == self.targets_KP[tasks, phase]
        return cell + self.cells * torch.where(pays, self.after_P[phase], phase), pays

    def coordinates(self, states: Tensor) -> Tensor:
        """(..., 2): the x and y of each state. All that the agent is shown."""
        cell = states % self.cells
        return torch.stack((cell // self.size, cell % self.size), -1)

    def optimum(self, tasks: Tensor) -> Tensor:
        """The largest return of an episode, per task: exact, by induction from the last step back."""
        return torch.cat([self._best(part) for part in tasks.split(TASKS_AT_ONCE)]) if len(tasks) else tasks

    def _best(self, tasks: Tensor) -> Tensor:
        device = self.moves_CA.device
        states = torch.arange(self.states, device=device)[None, :, None]
        actions = torch.arange(self.actions, device=device)[None, None]
        after, pays = self.step(tasks.to(device)[:, None, None], states, actions)
        flat = after.flatten(1)
        best = torch.zeros((len(tasks), self.states), dtype=torch.int64, device=device)
        for _ in range(self.horizon):
            best = (best.gather(1, flat).view(after.shape) + pays).amax(-1)
        return best[:, self.start]


def moves(size: int) -> Tensor:
    """(C, A): where each move leads from each cell; walls hold one back."""
    cells = torch.arange(size * size)
    ahead = [
        (cells // size + dx).clamp(0, size - 1) * size + (cells % size + dy).clamp(0, size - 1) for dx, dy in MOVES
    ]
    return torch.stack(ahead, 1)


def check(name: str, size: int, horizon: int) -> None:
    """Refuse a world that is none. The histories keep a cell in one byte."""
    if not 2 <= size <= 16:
        raise ConfigError(f"{name} has 2 to 16 cells a side, not {size}", where="grid_size", hint="grid_size=9")
    if horizon < 1:
        raise ConfigError(f"an episode has at least one step, not {horizon}", where="horizon", hint="horizon=20")
