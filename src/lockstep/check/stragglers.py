"""Who is slower than the others: medians of step times, window by window, beside what the group calls normal.

Torch-free. A card is slow if in three windows one after the other its median step is longer than the group's by more
than the allowed ratio, and by more than chance explains: the spread among the cards, among its own steps, and from
window to window.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOWS = 3  # one after the other, each of them slow
WINDOW_STEPS = 10
FEWEST_WINDOW_STEPS = 3  # shorter ones say nothing: no judgement of so short a workload
CHANCE = 3.0  # spreads (MAD) that are still chance
MEDIAN_NOISE = 1.2533 * 1.4826  # standard error of a median of n values: so many MADs over the root of n
P95 = 0.95
Times = Mapping[str, Sequence[float]]  # of each card: seconds of its steps, warm-up left out


@dataclass(frozen=True)
class Speed:
    """Of one card. `ratio`: its median over the group's; `worst`: the same in its slowest three windows."""

    median_seconds: float
    p95_seconds: float
    ratio: float
    worst: float
    slow: bool = False


def speeds(times: Times, *, slow_ratio: float) -> dict[str, Speed]:
    """How fast each card is. A card alone is never slow.

    The group's pace is the median of the cards' medians, of two the lower: with two cards the faster is the measure,
    and of four of which two are slow both are named.
    """
    usable = {name: list(seconds) for name, seconds in times.items() if seconds}
    if not usable:
        return {}
    medians = {name: statistics.median(seconds) for name, seconds in usable.items()}
    group = statistics.median_low(medians.values())
    windows = _windows(min(len(seconds) for seconds in usable.values()))
    unrest = _unrest(usable, windows)
    found: dict[str, Speed] = {}
    for name, seconds in usable.items():
        excesses = [_excess(usable, name, run, unrest=unrest) for run in _runs(windows)] if len(usable) > 1 else []
        worst = max((ratio for ratio, _ in excesses), default=medians[name] / group)
        slow = any(ratio > slow_ratio and beyond_chance for ratio, beyond_chance in excesses)
        found[name] = Speed(medians[name], percentile(seconds, P95), medians[name] / group, worst, slow)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def deviation(values: Sequence[float], centre: float) -> float:
    """The median distance from the centre (MAD)."""
    return statistics.median(abs(value - centre) for value in values)


def _windows(steps: int) -> list[slice]:
    """Equal windows over all steps that every card has; none if there are too few steps for three."""
    size = min(WINDOW_STEPS, steps // WINDOWS)
    if size < FEWEST_WINDOW_STEPS:
        return []
    return [slice(start, start + size) for start in range(0, steps - size + 1, size)]


def _runs(windows: Sequence[slice]) -> list[Sequence[slice]]:
    return [windows[start : start + WINDOWS] for start in range(len(windows) - WINDOWS + 1)]


def _excess(times: Times, name: str, windows: Sequence[slice], *, unrest: float) -> tuple[float, bool]:
    """In windows one after the other: the least ratio of a card's median to the group's; is it more than chance?"""
    whole = slice(windows[0].start, windows[-1].stop)
    medians = {other: statistics.median(seconds[whole]) for other, seconds in times.items()}
    group = statistics.median_low(medians.values())
    own = times[name][whole]
    among_cards = statistics.median_low(abs(median - group) for median in medians.values())
    among_steps = deviation(own, medians[name]) * MEDIAN_NOISE / math.sqrt(len(own))
    chance = CHANCE * max(among_cards, among_steps, unrest * group / math.sqrt(len(windows)))
    return min(_ratio(times, name, window) for window in windows), medians[name] - group > chance


def _unrest(times: Times, windows: Sequence[slice]) -> float:
    """How far a card's ratio to the group moves from window to window, as a share: what a busy machine does to all."""
    moves: list[float] = []
    for name in times:
        ratios = [_ratio(times, name, window) for window in windows]
        moves += [abs(later - earlier) for earlier, later in itertools.pairwise(ratios)]
    return statistics.median(moves) if moves else 0.0


def _ratio(times: Times, name: str, window: slice) -> float:
    medians = {other: statistics.median(seconds[window]) for other, seconds in times.items()}
    return medians[name] / statistics.median_low(medians.values())
