"""What was measured on a kind of GPU, kept for the next start: one JSON file in the user's cache folder.

An entry is found by all that decides it: the card, the software, the shape of the work. It only ever saves time: a file
that is not there, cannot be written, or is damaged is as good as an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lockstep import rundir
from lockstep.runtime import env

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER, FILE = "lockstep", "measured.json"
MOST_ENTRIES = 500  # the oldest go first
LOCK_SECONDS = 10.0
KEY_DIGITS = 16

Entry = Mapping[str, Any]


def place() -> Path | None:
    """The file; None where this user has no home."""
    with contextlib.suppress(RuntimeError):
        return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / FOLDER / FILE
    return None


def key(deciding: Mapping[str, Any]) -> str:
    """The name of an entry."""
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:KEY_DIGITS]


def today() -> str:
    """The day of a measurement."""
    return time.strftime("%Y-%m-%d")


def known(deciding: Mapping[str, Any]) -> Entry | None:
    """What was found before under the same circumstances."""
    path = place()
    return _read(path).get(key(deciding)) if path else None


def keep(deciding: Mapping[str, Any], found: Entry) -> None:
    """Write down what was found, with what decided it, for a person who looks."""
    if (path := place()) is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{FILE}.lock"), timeout=LOCK_SECONDS):
            entries = _read(path)
            entries.pop(key(deciding), None)
            entries[key(deciding)] = {**found, "day": today(), "of": dict(deciding)}
            kept = dict(list(entries.items())[-MOST_ENTRIES:])
            rundir.write_json(path, {"format": FORMAT, "entries": kept})
    except (OSError, Timeout) as error:
        logger.debug("Not kept for the next start: %s: %s", path, error)


def _read(path: Path) -> dict[str, Entry]:
    """All entries; what cannot be read as one is measured again."""
    try:
        document = rundir.read_json(path)
        entries = document["entries"].items() if document["format"] == FORMAT else ()
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()  # what could not be written was not by us
        return {name: entry for name, entry in entries if isinstance(entry, dict) and isinstance(entry.get("day"), str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
