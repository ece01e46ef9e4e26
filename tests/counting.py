"""What something costs, in a figure that is the same on a loaded machine: how many functions it calls."""

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
