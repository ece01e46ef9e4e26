"""How long work of this thread took on the host, without the time it waited for a processor. Torch-free.

On a machine with more to do than processors, the clock on the wall tells mostly about the others. Sleeping counts:
who sleeps is slow by himself. Where the kernel does not say how long a thread has waited, this is the wall clock.
"""

from __future__ import annotations

import time
from pathlib import Path

SCHEDULING = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds waiting for one, turns
MOST_READINGS = 20  # each takes some microseconds


def own_seconds() -> float:
    """A clock that stands still while this thread waits for a processor; only differences mean something.

    Who loses the processor between the two readings has waited after the wall clock was read: then they do not belong
    together, a step could even seem to take less than no time, and both are read again.
    """
    waited, now = _waited_seconds(), time.perf_counter()
    for _ in range(MOST_READINGS):
        if (again := _waited_seconds()) == waited:
            break
        waited, now = again, time.perf_counter()
    return now - waited


def _waited_seconds() -> float:
    try:
        return int(SCHEDULING.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
