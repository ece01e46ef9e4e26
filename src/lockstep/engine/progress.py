"""How far a run has come: the few numbers of the host that a resume needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    epoch_loss: float = 0.0  # sum over the targets since the last epoch ended, or since the beginning
    epoch_targets: int = 0
    train_losses: list[float | None] = field(default_factory=list[float | None])  # of each epoch that has ended
    val_losses: list[float | None] = field(default_factory=list[float | None])
    best_val_loss: float | None = None  # of all validations, also within epochs

    def note(self, loss: float, tokens: int, *, overflow: bool, min_delta: float, targets: int = 1) -> None:
        """Take one finished step into account. Where nothing was to be predicted, its loss of 0 says nothing."""
        self.step += 1
        self.tokens += tokens
        self.skipped += overflow
        self.overflow_run = self.overflow_run + 1 if overflow else 0
        if overflow or not targets:
            return
        self.epoch_loss += loss * targets
        self.epoch_targets += targets
        previous = loss if self.smoothed_loss is None else self.smoothed_loss
        self.smoothed_loss = SMOOTHING * previous + (1 - SMOOTHING) * loss
        if self.best_loss is None or self.smoothed_loss < self.best_loss - min_delta:
            self.best_loss, self.stale_steps = self.smoothed_loss, 0
        else:
            self.stale_steps += 1

    def is_stale(self, patience: int, *, min_delta: float) -> bool:
        """Whether the loss has not improved for `patience` steps; 0: never. A min_delta that was lowered counts."""
        if self.smoothed_loss is None or self.best_loss is None:
            return False
        return 0 < patience <= self.stale_steps and self.smoothed_loss >= self.best_loss - min_delta

    def close_epochs(self, number: int, val_loss: float | None) -> None:
        """Write the history up to epoch `number`. Several end at once where a batch is longer than the table.

        None is known of an epoch in which nothing was predicted, or which another program has trained.
        """
        loss = self.mean_loss
        for _ in range(number - len(self.train_losses)):
            self.train_losses.append(loss)
            self.val_losses.append(val_loss)

    @property
    def mean_loss(self) -> float | None:
        """Over the targets since the last epoch ended."""
        return self.epoch_loss / self.epoch_targets if self.epoch_targets else None

    def note_validation(self, loss: float | None) -> None:
        """None: it was no number."""
        known = [each for each in (loss, self.best_val_loss) if each is not None]
        self.best_val_loss = min(known, default=None)

    def begin_epoch(self) -> None:
        self.epoch_loss, self.epoch_targets = 0.0, 0

    def forget_after(self, epochs: int) -> None:
        """Leave out what was written of an epoch that goes on after all: a longer run than it was to be."""
        del self.train_losses[epochs:], self.val_losses[epochs:]

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        """Of older states too: what they do not have is as at the beginning."""
        own: dict[str, Any] = {name: list(state.get(name, ())) for name in ("train_losses", "val_losses")}
        return cls(**(state | own))
