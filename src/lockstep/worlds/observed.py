"""What an agent is shown of a step: where it is, what it did before and what that paid, and whether an episode begins.

One row of features per step, in the order of FEATURES. Shapes: any ... of histories, L steps, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.contracts import Array

FEATURES = ("x", "y", "action before", "reward before", "first")
NO_REWARD = 2  # there was no step before: the rewards are 0 and 1, the actions 0 to A - 1, and A is none


@dataclass(frozen=True)
class Histories:
    """All histories that are distilled, of every split: where the learners were, what they did, what that paid."""

    steps: Array  # uint8 (3, histories, steps): cells, actions, rewards
    size: int  # of a side of the grid
    horizon: int
    actions: int
    region: int  # steps between two updates of the source learner
    stride: int = 1  # of the episodes, each so-manyth was kept


def observe(cells: Tensor, actions: Tensor, rewards: Tensor, *, size: int, horizon: int, no_action: int) -> Tensor:
    """(..., L, F) int64 of (..., L) each, whose first step begins an episode."""
    before = torch.nn.functional.pad(actions[..., :-1].long(), (1, 0), value=no_action)
    paid = torch.nn.functional.pad(rewards[..., :-1].long(), (1, 0), value=NO_REWARD)
    place = cells.long()
    first = (torch.arange(cells.shape[-1], device=cells.device) % horizon == 0).long().expand_as(place)
    return torch.stack((place // size, place % size, before, paid, first), -1)
