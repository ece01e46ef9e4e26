"""Early warning: a loss or gradient norm far above those of the steps before. Only numbers the host has read anyway."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW = 64  # steps that say what is usual
LEAST = 16  # before that nothing is
FAR = 8.0  # robust standard deviations; of 100,000 normal numbers none is as far
NARROWEST = 0.02  # of the usual value: a curve that hardly moves is not judged by its last digits
LEAST_TIMES = {"Loss": 1.2, "Gradient norm": 4.0}  # the usual value: less is not worth a word
QUIET_STEPS = 50  # between two lines of one kind
SIGMA = 1.4826  # standard deviation of normal numbers over their median distance from the median


@dataclass
class Series:
    """One curve: what is usual, and how often it was left."""

    name: str
    logarithmic: bool = False  # norms vary by factors
    count: int = 0
    told: int | None = None  # step of the last line
    seen: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note(self, step: int, value: float) -> str:
        """Take a value into account; a line if it is worth one."""
        if not math.isfinite(value) or (self.logarithmic and value <= 0):
            return ""
        place = math.log(value) if self.logarithmic else value
        score = usual = 0.0
        if len(self.seen) >= LEAST and place >= self._high(min(self.seen)):  # which is below the median's
            usual = statistics.median(self.seen)
            score = self._score(place, usual) if place >= self._high(usual) else 0.0  # most steps need no second look
        self.seen.append(place)
        if score <= FAR:
            return ""
        self.count += 1
        if self.told is not None and step - self.told < QUIET_STEPS:
            return ""
        self.told = step
        shown = math.exp(usual) if self.logarithmic else usual
        times = f", {self.count} so far" if self.count > 1 else ""
        return f"{self.name} spike at step {step}: {value:.4f}, usually {shown:.4f} (z = {score:.1f}{times})"

    def _high(self, usual: float) -> float:
        """From where on a value may be worth a word."""
        times = LEAST_TIMES[self.name]
        return usual + math.log(times) if self.logarithmic else usual * times

    def _score(self, place: float, usual: float) -> float:
        """How far above the usual, in robust standard deviations."""
        spread = SIGMA * statistics.median(abs(each - usual) for each in self.seen)
        least = NARROWEST if self.logarithmic else NARROWEST * abs(usual)
        return (place - usual) / max(spread, least, 1e-12)


@dataclass
class Spikes:
    """Both curves of a run. A resumed run begins anew: what is usual is known again after a few steps."""

    loss: Series = field(default_factory=lambda: Series("Loss"))
    norm: Series = field(default_factory=lambda: Series("Gradient norm", logarithmic=True))

    def note(self, step: int, loss: float, grad_norm: float) -> Iterator[str]:
        """Lines worth a warning."""
        for series, value in ((self.loss, loss), (self.norm, grad_norm)):
            if line := series.note(step, value):
                yield line

    @property
    def count(self) -> int:
        return self.loss.count + self.norm.count
