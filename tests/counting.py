"""What something costs, in figures that are the same on a loaded machine: functions called, graphs compiled."""

from __future__ import annotations

import cProfile
import gc
from collections.abc import Callable


def calls(action: Callable[[], object]) -> int:
    """Calls of Python and C functions that an action makes, its own included."""
    profile = cProfile.Profile()
    gc.disable()  # what others have left behind is not the action's
    try:
        profile.runcall(action)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


def graphs() -> int:
    """Graphs that the compiler has made in this process; what it calls frames leaves out functions it takes whole."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
