"""events.jsonl: everything that happened in a run, one JSON object a line, written whole or not at all.

A run that goes on writes its steps once: the figures after the step it goes on from are cut off. What is left of its
story (that it began, failed, ended) stays, and whoever reads it leaves out what lies after a later `resume`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.contracts import StepRecord
from lockstep.report.logs import AppendFile
from lockstep.rundir import open_plain
from lockstep.runtime.scrub import scrubber

log = logging.getLogger(__name__)

STORY = ("start", "restart", "resume", "fault", "end")  # events that are no figures of a step
MEASURED = ("eval", "walk", "epoch")  # after the last step, and once more by who starts a run that was over
WINDOW_BYTES = 1 << 16  # of the end of a file that is looked at first


class EventSink:
    """Appends steps and events. `step` counts from 0 in a step, and is the number of finished steps in an event."""

    def __init__(
        self, path: Path, *, secrets: Sequence[str] = (), facts: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._file = AppendFile(path)
        self._facts = facts  # more about the moment of a step: how the GPU is doing
        self._scrub = scrubber(secrets)
        self._resumed = -1  # after so many steps

    def write(self, record: StepRecord) -> None:
        loss, grad_norm = record.loss, record.grad_norm
        fields: dict[str, Any] = {
            "kind": "step",
            "step": record.step,
            "loss": loss,
            "loss_hex": loss.hex(),
            "grad_norm": grad_norm,
            "grad_norm_hex": grad_norm.hex(),
            "lr": record.lr,
            "seconds": record.seconds,
            "tokens": record.tokens,
            "memory_bytes": record.memory_bytes,
            "digest": record.digest,
            "skipped": record.skipped,
            "loss_scale": record.loss_scale,
            "mfu": record.mfu,
            "time": time.time(),
        }
        if record.measures:
            fields |= self._plain(record.measures)
        if self._facts:
            fields |= self._plain(self._facts())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            fields = self._plain(fields)
        self._append(fields)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "resume":
            self._resumed = done = int(fields.get("step") or 0)
            self._cut(done, lambda old: old["kind"] not in STORY and _voided(old, done))
        elif kind in MEASURED and fields.get("step") == self._resumed:
            same = {"kind": kind, "step": self._resumed, "epoch": fields.get("epoch")}
            self._cut(self._resumed, lambda old: all(old.get(key) == value for key, value in same.items()))
        self._append({"kind": kind, "time": time.time(), **self._plain(fields)})

    def close(self) -> None:
        self._file.close()

    def _cut(self, done: int, is_old: Callable[[Mapping[str, Any]], bool]) -> None:
        """Take out what is about to be written again: after the first `done` steps, or measured at that point."""
        try:
            if self._file.path.is_file():
                cut(self._file.path, done, is_old)
        except OSError as error:  # readers leave them out all the same
            log.warning("cannot shorten %s: %s. Training goes on.", self._file.path, error.strerror or error)

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._file.write((line + "\n").encode("utf-8", "backslashreplace"))
        if self._file.complaint:
            complaint, self._file.complaint = self._file.complaint, ""
            log.warning(complaint)

    def _plain(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Valid JSON without secrets: NaN becomes null, and `<key>_text` says what it was."""
        plain: dict[str, Any] = {}
        for key, value in fields.items():
            plain[str(key)] = self._value(value)
            if isinstance(value, float) and not math.isfinite(value):
                plain[f"{key}_text"] = str(value)
        return plain

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, Mapping):
            return self._plain(value)
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return self._scrub(str(value))


def read_events(path: Path) -> list[dict[str, Any]]:
    """What counts of a run's events: what a later `resume` voided is left out, and so is a line a crash has torn."""
    events: list[dict[str, Any]] = []
    with open_plain(path) as file:
        lines = file.read().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _parsed(line)
        if event is None:
            log.debug("%s:%d: unreadable line left out", path, number)
            continue
        if event["kind"] == "resume" and isinstance(done := event.get("step", 0), int):
            events = [old for old in events if not _voided(old, done)]
        events.append(event)
    return events


def cut(path: Path, done: int, is_old: Callable[[Mapping[str, Any]], bool]) -> None:
    """Take events after the first `done` steps out of a file; of a long one only the end is read."""
    with path.open("r+b") as file:
        position = _begin_of_end(file, done)
        file.seek(position)
        begin, kept = -1, list[bytes]()
        for line in file.read().splitlines(keepends=True):
            event = _parsed(line)
            if event and is_old(event):
                begin = position if begin < 0 else begin
            elif event and begin >= 0:
                kept.append(line)
            position += len(line)
        if begin >= 0:
            file.seek(begin)
            file.write(b"".join(kept))
            file.truncate()  # afterwards: a kill in between must not cost the story


def _begin_of_end(file: IO[bytes], done: int) -> int:
    """Where lines begin that hold everything after the first `done` steps: steps are written in order."""
    size, window = file.seek(0, os.SEEK_END), WINDOW_BYTES
    while window < size:
        file.seek(size - window)
        file.readline()  # which may be cut
        begin = file.tell()
        found = (_parsed(line) for line in file)
        if any(event and event["kind"] == "step" and not _voided(event, done) for event in found):
            return begin
        window *= 4
    return 0


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An event; None for a line that is none."""
    try:
        event = json.loads(line)
        return event if isinstance(event["kind"], str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _voided(event: Mapping[str, Any], done: int) -> bool:
    """Whether an event lies after the first `done` steps."""
    step = event.get("step")
    if not isinstance(step, int):
        return False
    return step >= done if event["kind"] == "step" else step > done
