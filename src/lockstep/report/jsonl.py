"""events.jsonl: everything that happened in a run, one JSON object a line, written whole or not at all.

Lines are only appended. A run that goes on from an earlier step repeats steps, and readers leave out what a later
`resume` has voided: `valid` says what that is.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.contracts import StepRecord
from lockstep.report.logs import AppendFile
from lockstep.rundir import open_plain
from lockstep.runtime.scrub import scrubber

log = logging.getLogger(__name__)

MEASURED = ("eval", "walk", "epoch")  # after the last step, and once more by who starts a run that was over


class EventSink:
    """Appends steps and events. `step` counts from 0 in a step, and is the number of finished steps in an event."""

    def __init__(
        self, path: Path, *, secrets: Sequence[str] = (), facts: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        self._file = AppendFile(path)
        self._facts = facts  # more about the moment of a step: how the GPU is doing
        self._scrub = scrubber(secrets)

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
        self._append({"kind": kind, "time": time.time(), **self._plain(fields)})

    def close(self) -> None:
        self._file.close()

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
    """What counts of a run's events."""
    with open_plain(path) as file:
        return valid(file.read().split(b"\n"))


def valid(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The events of lines, without what a later `resume` voids; a line that is none, say torn by a crash, is left out.

    What is measured again where the run was resumed replaces what was measured there before.
    """
    events: list[dict[str, Any]] = []
    resumed: int | None = None
    for line in lines:
        event = _parsed(line)
        if event is None:
            continue
        kind, step = event["kind"], event.get("step")
        if kind == "resume" and isinstance(done := event.get("step", 0), int):
            events, resumed = [old for old in events if not _voided(old, done)], done
        elif kind in MEASURED and step == resumed and step is not None:
            same = {"kind": kind, "step": step, "epoch": event.get("epoch")}
            events = [old for old in events if any(old.get(key) != value for key, value in same.items())]
        events.append(event)
    return events


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
