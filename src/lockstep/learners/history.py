"""What a learner is, and what it leaves behind: where each stream was, what it did and what that paid, step by step."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.worlds.table import World


class History(NamedTuple):
    """uint8 of shape (streams, steps). What comes after is in the world's tables; episodes are `horizon` steps."""

    cells: Tensor
    actions: Tensor
    rewards: Tensor

    @staticmethod
    def empty(streams: int, steps: int, device: torch.device) -> History:
        return History(*(torch.empty((steps, streams), dtype=torch.uint8, device=device).T for _ in range(3)))

    def returns(self, horizon: int) -> Tensor:
        """(streams, episodes) int64: what each whole episode paid."""
        whole = self.rewards.shape[1] // horizon
        return self.rewards[:, : whole * horizon].reshape(len(self.rewards), whole, horizon).sum(-1, dtype=torch.int64)


class Learner(Protocol):
    """A source algorithm. A stream is one history; streams that share a learner lie side by side."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # what it was made with is written down

    @property
    def label(self) -> str: ...  # in file names
    @property
    def region(self) -> int: ...  # steps between two updates of the learner
    @property
    def streams_per_learner(self) -> int: ...

    def steps(self, wanted: int) -> int:
        """How many steps a history has at least `wanted` of: whole rollouts."""
        ...

    def chunk(self, device: torch.device) -> int:
        """How many learners to run side by side."""
        ...

    def run(self, world: World, tasks: Tensor, keys: Tensor, *, steps: int) -> History:
        """Learn from nothing on each (task, key), in `steps` steps of the world; all tensors on the world's device."""
        ...
