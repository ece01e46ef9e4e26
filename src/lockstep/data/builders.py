"""Who builds a cache: one process at a time, and what those hear who wait for it. Torch-free."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from lockstep.rundir import write_json

logger = logging.getLogger(__name__)

WAIT_MESSAGE_SECONDS = 10.0
STALLED_SECONDS = 60.0  # without a sign of life
TOUCH_SECONDS = 1.0
POLL_SECONDS = 0.1


@contextlib.contextmanager
def building(root: Path, key: str, *, what: Path | None = None) -> Generator[Callable[[], None]]:
    """Hold the lock of a key, saying meanwhile who else builds it (`what`). Yields what to call as the work goes on."""
    lock, builder = FileLock(root / f"{key}.lock"), root / f"{key}.builder"
    waiting = _Waiting(builder, what or root / key)
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            waiting.tell()
            time.sleep(POLL_SECONDS)
    touched = time.monotonic()

    def alive() -> None:
        nonlocal touched
        if time.monotonic() - touched >= TOUCH_SECONDS:
            touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(builder)

    try:
        write_json(builder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield alive
    finally:
        builder.unlink(missing_ok=True)
        lock.release()


class _Waiting:
    """Says now and then whom we wait for, and when that one has not moved for long."""

    def __init__(self, builder: Path, folder: Path) -> None:
        self._builder, self._folder = builder, folder
        self._told = self._warned = -math.inf
        self._seen, self._since = self._look(), time.monotonic()

    def tell(self) -> None:
        now = time.monotonic()
        if (seen := self._look()) != self._seen:
            self._seen, self._since = seen, now
        found = read_json(self._builder)
        pid, host = found.get("pid"), found.get("host")
        who = f"process {pid} on {host}" if found else "another process"
        if now - self._told >= WAIT_MESSAGE_SECONDS:
            self._told = now
            progress = found.get("progress", "")
            how_far = f" ({progress})" if progress else ""
            logger.info("[Cache] waiting for %s, who is building %s%s", who, self._folder, how_far)
        if now - max(self._since, self._warned) >= STALLED_SECONDS:
            self._warned = now
            silent, pid = now - self._since, pid or "PID"
            what = f"{who} gave no sign of life for {silent:.0f} s; still waiting for it"
            logger.warning(
                "[Cache] %s. Stopped? There: kill -CONT %s, or kill -9 %s and another builds", what, pid, pid
            )

    def _look(self) -> tuple[int, int]:
        """When the note was last written, and which file it is."""
        try:
            status = self._builder.stat()
        except OSError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino


def note_progress(folder: Path, progress: str) -> None:
    """Tell those who wait for a folder that is being filled how far it is. Nobody's build fails for want of a note."""
    key, _, staged = folder.name.partition(".tmp-")
    if staged:
        note_beside(folder.with_name(f"{key}.builder"), progress)


def note_beside(builder: Path, progress: str) -> None:
    """The same, for the note of a key."""
    temporary = builder.with_name(f"{builder.name}.tmp-note")
    note = {"pid": os.getpid(), "host": socket.gethostname(), "progress": progress}
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(note) + "\n", encoding="utf-8")
        temporary.replace(builder)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is none to be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
