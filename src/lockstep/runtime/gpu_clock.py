"""How long work takes by the GPU's own clock: the median of a few, after some that warm it up."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UP, TIMED = 3, 7


def milliseconds(work: Callable[[], object], *, in_a_row: int = 1) -> float:
    """Of one piece of work. Several in a row let the host run ahead, as it does in a step of many layers."""
    taken: list[float] = []
    for index in range(WARM_UP + TIMED):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(in_a_row):
            work()
        ended.record()
        ended.synchronize()
        if index >= WARM_UP:
            taken.append(began.elapsed_time(ended) / in_a_row)
    return statistics.median(taken)
