"""How fast each card is in a workload, beside its group. Who is slow is said by the rule that watches training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from lockstep.check.outcome import Pace
from lockstep.launch.watchdog import slow_ones

P95 = 0.95


def paces(
    workload: str, times: Mapping[str, Sequence[float]], *, slow_ratio: float, shortest_seconds: float
) -> dict[str, Pace]:
    """Of each card with times: seconds of its steps, warm-up left out. A card alone is never slow.

    The group's pace is the median of the cards' medians, of two the lower. Who takes less than `shortest_seconds` at
    that pace says nothing of the cards: the host's hiccups are as long.
    """
    usable = {label: seconds for label, seconds in times.items() if seconds}
    if not usable:
        return {}
    medians = {label: statistics.median(seconds) for label, seconds in usable.items()}
    group = statistics.median_low(medians.values())
    judged = group * min(map(len, usable.values())) >= shortest_seconds
    slow = slow_ones(dict(enumerate(usable.values())), factor=slow_ratio) if judged else {}
    return {
        label: Pace(workload, medians[label], percentile(seconds, P95), medians[label] / group, slow.get(place, 0.0))
        for place, (label, seconds) in enumerate(usable.items())
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
