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
from lockstep.errors import REFUSALS
from lockstep.launch import link
from lockstep.launch.watchdog import Hang
from lockstep.runtime import env, memory_limits

TRACE_LINES = 20
LONGEST_CAUSE = 400
FIGURES = ("requested_bytes", "peak_bytes", "limit_bytes", "estimated_bytes")  # of memory; null: nobody knows
FOUND = ("module", "operation", "line", "phase", "finding", "ranks", "rows", "reproduced", "bundle")  # of NaN and Inf
CRASH, OWN_THREAD = "Fatal Python error", "Current thread"  # how faulthandler begins, and the stack that matters
PLAIN_WORDS: dict[int, str] = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
}
CRASHES = {  # how faulthandler calls a signal
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
FRAME = re.compile(r'File ".*/lockstep/([^"]+)", line (\d+) in (\S+)')
GIB, MIB = 1 << 30, 1 << 20


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


@dataclass(frozen=True)
class Verdict:
    """Why a worker ended. `own`: its words, and what it could not say any more."""

    kind: str
    cause: str
    own: Mapping[str, Any]


def explain_end(end: End, *, work: Path, kills_before: int | None, peak_bytes: int = 0) -> Verdict:
    """Of a worker that ended. `work`: where it has left its last traces; `peak_bytes`: the most memory it had."""
    if end.record.get("cause") and not end.by_signal:
        return Verdict(str(end.record.get("kind", "exception")), str(end.record["cause"]), end.record)
    if end.by_signal == signal.SIGKILL:
        return _explain_kill(end, work, kills_before, peak_bytes)
    if end.by_signal:
        trace = crash_of(work, end.slot)
        words = f" ({PLAIN_WORDS[end.by_signal]})" if end.by_signal in PLAIN_WORDS else ""
        cause = f"killed by {_name(end.by_signal)}{words}: signal {end.by_signal}{top_frame(trace)}"
        return Verdict("signal", cause, {**end.record, "trace": trace})
    if end.early:
        return Verdict("exit", "exited before the others were done (code 0)", end.record)
    return Verdict("exit", f"exited with code {end.code}", end.record)


def _explain_kill(end: End, work: Path, before: int | None, peak_bytes: int) -> Verdict:
    """By SIGKILL: for want of memory, if the kernel has counted one more such kill."""
    after, killed = memory_limits.kills(), f"killed by {_name(end.by_signal)} (out of memory"
    if before is None or after is None or after <= before:
        told = "the kernel counted no oom_kill here" if after is not None else "no oom_kill count to be read"
        return Verdict("signal", f"{killed}?): signal {end.by_signal}, {told}", end.record)
    bounds = memory_limits.of_machine(peak_bytes)
    used = f"peak {size_text(bounds.peak)}, " if bounds.peak else ""
    cause = (
        f"{killed}): {used}{bounds.words} {size_text(bounds.limit)}; signal {end.by_signal}, "
        f"the kernel's oom_kill count went from {before} to {after}"
    )
    foreseen = read_record(link.remedy_path(work, end.slot))
    figures = {"requested_bytes": None, "peak_bytes": bounds.peak or None, "limit_bytes": bounds.limit}
    return Verdict("memory", cause, {**end.record, **figures, **foreseen})


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def crash_of(work: Path, slot: int) -> list[str]:
    """What the interpreter wrote of its own crash: the signal and the stack of the thread that met it; [] if none."""
    try:
        data = link.stacks_path(work, slot).read_bytes()
    except OSError:
        return []
    return last_words(data) if CRASH.encode() in data else []


def crash_signal(trace: Sequence[str]) -> int:
    """The signal of a crash; 0: there was none."""
    return next((int(CRASHES[words]) for words in CRASHES if trace and words in trace[0]), 0)


def top_frame(trace: Sequence[str]) -> str:
    """Where in this package a crash was: the innermost of its lines on the stack; '' where there is none."""
    found = next((match for line in trace if (match := FRAME.search(line))), None)
    return f", in {found[1]}:{found[2]} {found[3]}" if found else ""


def size_text(count: int) -> str:
    """Bytes for people."""
    if count < GIB // 100:
        return f"{count / MIB:,.1f} MiB"
    return f"{count / GIB:,.{2 if count < 10 * GIB else 1}f} GiB"


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
        "next": remedy_command(run=run, **own["remedy"]) if own.get("remedy") else next_command(run),
        "time": time.time(),
    }
    told = ("step", "section", "exception", "trace", "next", "secondary", *FOUND)
    said = {key: own[key] for key in told if own.get(key) not in (None, "", [])}
    return record | said | {key: own[key] for key in FIGURES if key in own}


def is_refusal(record: Mapping[str, Any]) -> bool:
    """Whether a run was refused before its first step: a mistake in what was asked for, not a failure on a GPU."""
    return record["exit_code"] in REFUSALS and (record["step"] is None or record["step"] < 0)


def next_command(run: Path | None) -> str:
    """Go on where something was saved; else there is only the log to look at."""
    if run is None:
        return "lockstep doctor"
    if has_saved(run):
        return f"lockstep resume {shlex.quote(str(run))}"
    return f"lockstep logs {shlex.quote(str(run))}"


def remedy_command(flags: str, words: str, *, exact: bool, run: Path | None) -> str:
    """What to type, and what it is good for. `exact`: a saved state can be gone on from without leave."""
    if not flags:
        return words
    if run is None or not has_saved(run):
        return f"the same command with {flags} ({words})"
    leave = "" if exact else " --checkpoint.allow-mismatch true"
    return f"lockstep resume {shlex.quote(str(run))} {flags}{leave} ({words})"


def has_saved(run: Path) -> bool:
    """Whether there is a checkpoint to go on from."""
    return bool(rundir.saved_checkpoints(rundir.RunDir(run).checkpoints))


def last_words(tail: bytes) -> list[str]:
    """What a worker wrote at the end: of a crash of the interpreter the signal and its own thread, else the last lines.

    Other threads come before the one that crashed, and may be many.
    """
    lines = tail.decode("utf-8", "backslashreplace").splitlines()
    crash = next((number for number, line in enumerate(lines) if CRASH in line), None)
    if crash is None:
        return lines[-TRACE_LINES:]
    own = next((number for number in range(crash, len(lines)) if lines[number].startswith(OWN_THREAD)), None)
    if own is None:
        return lines[crash : crash + TRACE_LINES]
    return [lines[crash], *lines[own : own + TRACE_LINES - 1]]


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
