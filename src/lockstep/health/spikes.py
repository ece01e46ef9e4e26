"""Early warning: a loss or gradient norm far above the median of the steps before, from numbers the host has anyway."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW = 64  # steps that say what is usual
LEAST = 16  # before that nothing is
LOSS_FACTOR, NORM_FACTOR = 2.0, 4.0  # times the median; norms of a sound run vary more than its losses
QUIET_STEPS = 50  # between two lines of one kind


@dataclass
class Series:
    """One curve: what is usual, and how often it was left."""

    name: str
    factor: float
    count: int = 0
    told: int | None = None  # step of the last line
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note(self, step: int, value: float) -> str:
        """Take a value into account; a line if it is worth one."""
        if not math.isfinite(value):
            return ""
        usual = statistics.median(self.seen) if len(self.seen) >= LEAST else 0.0
        self.seen.append(value)
        if usual <= 0 or value <= self.factor * usual:
            return ""
        self.count += 1
        if self.told is not None and step - self.told < QUIET_STEPS:
            return ""
        self.told = step
        times = f", {self.count} so far" if self.count > 1 else ""
        return f"{self.name} spike at step {step}: {value:.4f}, usually {usual:.4f} ({value / usual:.1f} times{times})"


@dataclass
class Spikes:
    """Both curves of a run. A resumed run begins anew: what is usual is known again after a few steps."""

    loss: Series = field(default_factory=lambda: Series("Loss", LOSS_FACTOR))
    norm: Series = field(default_factory=lambda: Series("Gradient norm", NORM_FACTOR))

    def note(self, step: int, loss: float, grad_norm: float) -> Iterator[str]:
        """Lines worth a warning."""
        for series, value in ((self.loss, loss), (self.norm, grad_norm)):
            if line := series.note(step, value):
                yield line

    @property
    def count(self) -> int:
        return self.loss.count + self.norm.count
