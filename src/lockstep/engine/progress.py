"""How far a run has come: the few numbers of the host that a resume needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SMOOTHING = 0.98  # of the training loss, for early stopping


@dataclass
class Progress:
    """Counts and early-stopping state after `step` finished steps."""

    step: int = 0  # finished steps = the next step's number; also the position in the order of rows
    tokens: int = 0
    skipped: int = 0  # fp16 overflows so far
    overflow_run: int = 0  # of them in a row
    smoothed_loss: float | None = None
    best_loss: float | None = None
    stale_steps: int = 0  # steps since best_loss improved

    def note(self, loss: float, tokens: int, *, overflow: bool, min_delta: float) -> None:
        """Take one finished step into account."""
        self.step += 1
        self.tokens += tokens
        self.skipped += overflow
        self.overflow_run = self.overflow_run + 1 if overflow else 0
        if overflow:
            return
        previous = loss if self.smoothed_loss is None else self.smoothed_loss
        self.smoothed_loss = SMOOTHING * previous + (1 - SMOOTHING) * loss
        if self.best_loss is None or self.smoothed_loss < self.best_loss - min_delta:
            self.best_loss, self.stale_steps = self.smoothed_loss, 0
        else:
            self.stale_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        return cls(**state)
