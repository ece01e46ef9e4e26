"""Where workers stand: each is asked to write down its Python stacks before a run that hangs is ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.launch import link, watchdog
from lockstep.launch.beats import Beat

DUMP_SECONDS = 1.0
POLL_SECONDS = 0.01
Send = Callable[[int, int], object]  # (slot, signal)


def dump(
    work: Path, beats: Sequence[Beat], *, send: Send, wait: Callable[[float], object], seconds: float = DUMP_SECONDS
) -> None:
    """Let every worker that can write where it is.

    A stopped one first: it runs for that alone, and is killed before it can make another step, or save.
    """
    running: list[Beat] = []
    for beat in beats:
        if not (beat.pid and beat.dumps):
            continue
        if watchdog.process_state(beat.pid) == "T":
            before = _sizes(work, [beat])
            _ask(beat)
            send(beat.slot, signal.SIGCONT)
            _await(work, before, time.sleep, seconds)
            send(beat.slot, signal.SIGKILL)
        else:
            running.append(beat)
    before = _sizes(work, running)
    for beat in running:
        _ask(beat)
    _await(work, before, wait, seconds)


def _ask(beat: Beat) -> None:
    with contextlib.suppress(OSError):
        link.ask_for_stacks(beat.pid)


def _sizes(work: Path, beats: Sequence[Beat]) -> dict[int, int]:
    found: dict[int, int] = {}
    for beat in beats:
        with contextlib.suppress(OSError):
            found[beat.slot] = link.stacks_path(work, beat.slot).stat().st_size
    return found


def _await(work: Path, before: dict[int, int], wait: Callable[[float], object], seconds: float) -> None:
    """Until each file has grown and grows no more, or the time is over."""
    deadline = time.monotonic() + seconds
    last = before
    while before and time.monotonic() < deadline:
        wait(POLL_SECONDS)
        sizes = {slot: link.stacks_path(work, slot).stat().st_size for slot in before}
        if sizes == last and all(sizes[slot] > before[slot] for slot in before):
            return
        last = sizes
