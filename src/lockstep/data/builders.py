"""Who builds a cache: one process at a time, and what those hear who wait for it. Torch-free."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from lockstep.rundir import write_json

logger = logging.getLogger(__name__)

WAIT_MESSAGE_SECONDS = 10.0
POLL_SECONDS = 0.1


@contextlib.contextmanager
def building(root: Path, key: str, *, what: Path | None = None) -> Generator[None]:
    """Hold the lock of a key; who waits for it hears now and then which process builds (`what`), and for how long."""
    lock, builder = FileLock(root / f"{key}.lock"), root / f"{key}.builder"
    began, told = time.monotonic(), -math.inf
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            now = time.monotonic()
            if now - told >= WAIT_MESSAGE_SECONDS:
                told, found = now, read_json(builder)
                who = f"process {found.get('pid')} on {found.get('host')}" if found else "another process"
                waited = f", for {now - began:.0f} s" if now - began >= 1 else ""
                logger.info("[Cache] waiting for %s, who is building %s%s", who, what or root / key, waited)
            time.sleep(POLL_SECONDS)
    try:
        write_json(builder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        builder.unlink(missing_ok=True)
        lock.release()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is none to be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
