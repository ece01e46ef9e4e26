"""Why a run failed: one record for machines (failure.json) and a block of at most five lines for people."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import rundir
from lockstep.errors import ExitCode
from lockstep.launch import processes
from lockstep.launch.watchdog import Hang
from lockstep.runtime import env

TRACE_LINES = 20
LONGEST_CAUSE = 400
FOUND = ("module", "operation", "line", "phase", "finding", "ranks", "rows", "reproduced", "bundle")  # of NaN and Inf
CRASH = "Fatal Python error"  # how faulthandler begins
PLAIN_WORDS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
}


@dataclass(frozen=True)
class End:
    """How one worker ended. `by_signal`: the number of the signal that killed it."""

    slot: int
    code: int
    by_signal: int = 0
    early: bool = False  # exit 0 before its work was done
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])  # its own words

    @property
    def secondary(self) -> bool:
        """Whether it only noticed that somebody else was gone."""
        return bool(self.record.get("secondary"))

    @property
    def weak(self) -> bool:
        """Not the first cause while there is a better candidate."""
        return self.early or self.secondary


@dataclass(frozen=True)
class Place:
    """Where it happened."""

    rank: int
    tag: str
    node: int
    step: int
    section: str


def read_record(path: Path) -> dict[str, Any]:
    """A worker's own failure record; empty when there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def read_word(path: Path) -> tuple[dict[str, Any], int | None]:
    """The same, and the exit code of a worker that has left as it was told to: it has not failed."""
    record = read_record(path)
    stopped = record.get("stopped")
    return ({}, stopped) if isinstance(stopped, int) else (record, None)


def explain_end(end: End, *, kills_before: int | None, kills_after: int | None) -> tuple[str, str]:
    """(kind, cause) of a worker that ended."""
    if end.record.get("cause") and not end.by_signal:
        return str(end.record.get("kind", "exception")), str(end.record["cause"])
    if end.by_signal:
        return _explain_signal(end.by_signal, kills_before, kills_after)
    if end.early:
        return "exit", "exited before the others were done (code 0)"
    return "exit", f"exited with code {end.code}"


def _explain_signal(number: int, before: int | None, after: int | None) -> tuple[str, str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        if before is not None and after is not None and after > before:
            return "memory", (
                f"killed by {name} (out of memory): signal {number}, "
                f"the kernel's oom_kill count went from {before} to {after}{processes.memory_bounds()}"
            )
        told = "the kernel counted no oom_kill here" if after is not None else "no oom_kill count to be read"
        return "signal", f"killed by {name} (out of memory?): signal {number}, {told}"
    words = f" ({PLAIN_WORDS[number]})" if number in PLAIN_WORDS else ""
    return "signal", f"killed by {name}{words}: signal {number}"


def explain_hang(hang: Hang, silent: Sequence[object]) -> tuple[str, str]:
    """(kind, cause) of a run that stood still."""
    if hang.slot is None:
        who = "; ".join(str(node) for node in silent) or "every worker here waits for the others"
        return ("lost_peer" if silent else "hang"), f"no exchange for {hang.seconds:.0f} s: {who}"
    how = "is stopped (SIGSTOP)" if hang.stopped else "hangs"
    return "hang", f"{how}: no sign of life for {hang.seconds:.0f} s in {hang.section}"


def build(
    place: Place, *, exit_code: int, kind: str, cause: str, own: Mapping[str, Any], run: Path | None
) -> dict[str, Any]:
    """The record. What the worker said itself about step, trace and remedy is better than what we know."""
    record: dict[str, Any] = {
        "exit_code": exit_code,
        "rank": place.rank,
        "gpu": place.tag,
        "node": place.node,
        "host": socket.gethostname(),
        "step": place.step,
        "section": place.section,
        "kind": kind,
        "cause": first_line(cause),
        "trace": [],
        "log": "",
        "next": _next_command(run),
        "time": time.time(),
    }
    told = ("step", "section", "exception", "trace", "next", "secondary", *FOUND)
    return record | {key: own[key] for key in told if own.get(key) not in (None, "", [])}


def is_refusal(record: Mapping[str, Any]) -> bool:
    """Whether a run was refused before its first step: a mistake in what was asked for, not a failure on a GPU."""
    refused = (ExitCode.USAGE, ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.CANNOT_CREATE)
    return record["exit_code"] in refused and (record["step"] is None or record["step"] < 0)


def _next_command(run: Path | None) -> str:
    """Go on where something was saved; else there is only the log to look at."""
    if run is None:
        return "lockstep doctor"
    if any(rundir.RunDir(run).checkpoints.glob("step_*")):
        return f"lockstep resume {shlex.quote(str(run))}"
    return f"lockstep logs {shlex.quote(str(run))}"


def last_words(tail: bytes) -> list[str]:
    """What a worker printed at the end: a crash of the interpreter from its first line on, else the last lines."""
    lines = tail.decode("utf-8", "backslashreplace").splitlines()
    crash = next((number for number, line in enumerate(lines) if CRASH in line), None)
    return lines[-TRACE_LINES:] if crash is None else lines[crash : crash + TRACE_LINES]


def first_line(text: str) -> str:
    line = re.sub(r"\s+", " ", text.strip())
    return line if len(line) <= LONGEST_CAUSE else line[: LONGEST_CAUSE - 3] + "..."


def block(record: Mapping[str, Any], *, nodes: int) -> list[str]:
    """What a person reads: which GPU, when, why, where to look, what to do. At most five lines."""
    label = re.sub(r"(?<=\D)(?=\d)", " ", str(record["gpu"])) or f"worker {record['rank']}"
    place = f" of node {record['node']} ({record['host']})" if nodes > 1 else ""
    step = f", step {record['step']}" if record["step"] >= 0 else ""
    lines = [
        f"[FAILURE] Training failed on {label}{place}",
        f"  rank {record['rank']}{step}, {record['section']}: {record['cause']}",
    ]
    if record["log"]:
        lines.append(f"  log: {record['log']}")
    lines.append(f"  try: {first_line(str(record['next']))}")
    return [env.redact(line) for line in lines]


def store(run: Path, record: Mapping[str, Any], *, started: float) -> str:
    """Write failure.json into the run folder, but not over a first cause told by another node. Complaint or ''."""
    path = rundir.RunDir(run).failure
    there = read_record(path)
    if record.get("secondary") and not there.get("secondary") and there.get("time", 0.0) >= started:
        return ""
    try:
        rundir.write_json(path, redacted(record))
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}"
    return ""


def redacted(value: Any) -> Any:
    """The same tree without secrets."""
    if isinstance(value, str):
        return env.redact(value)
    if isinstance(value, Mapping):
        return {str(key): redacted(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - any JSON tree
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]  # pyright: ignore[reportUnknownVariableType] - any JSON tree
    return value


def replace_quietly(path: Path, value: Any) -> None:
    """A file that others read now and then: whole, but not worth a sync; a full disk is no reason to stop."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(path)
