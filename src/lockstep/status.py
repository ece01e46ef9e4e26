"""What can be done with a run from outside: status, logs, stop. Only files are read; nobody calls into a worker."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lockstep import home
from lockstep.errors import REFUSALS, ExitCode, LockstepError, NotFoundError
from lockstep.report.standing import State, Worker, read, worker_folders
from lockstep.report.tail import Growing
from lockstep.rundir import MANIFEST, SPOILT, read_json
from lockstep.runtime.scrub import scrubber

SHOWN_RUNS = 20
CAUGHT = "output.txt"  # everything a worker printed, as the launcher caught it: the label was the launcher's
LOG_NAMES = (CAUGHT, "log.txt")  # else its own log, whose lines say whose they are
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
POLL_SECONDS = 0.2


def status(root: Path | None = None) -> str:
    """How a run stands, worker by worker; without one, the runs of runs/, those that run first.

    Those that were refused before their first step (a name mistyped) are only counted.
    """
    if root is not None:
        return _in_full(read(root))
    states: list[State] = []
    refused = 0
    for each in home.last_runs(home.RUNS):
        state = read(each)
        refused += (is_refused := state.exit_code in REFUSALS and not state.finished_steps)
        states += [] if is_refused else [state]
        if len(states) == SHOWN_RUNS:
            break
    states.sort(key=lambda state: not state.is_running)  # else as they are: newest first
    rows = [[state.root.name, _life(state), _steps(state), _speed(state)] for state in states]
    lines = _columns([["run", "state", "step", ""], *rows]) if rows else [f"no run in {home.RUNS}/ yet"]
    lines += [f"({refused} refused before the first step)"] if refused else []
    return "\n".join([*lines, *([] if rows else ["  try: lockstep train llama demo"])])


def stop(root: Path, *, timeout: float = 600.0) -> tuple[str, int]:
    """Ask a run to save and end, wait until it has, and say where it was saved; also the exit code.

    A run that has ended is left alone, and that is no failure: it is what was asked for.
    """
    before = read(root)
    if before.life == "elsewhere":
        assert before.owner
        raise LockstepError(
            f"it runs on {before.owner.host} as process {before.owner.pid}, and this is another machine",
            where=str(root),
            hint=f"ssh {before.owner.host} kill -TERM {before.owner.pid}",
        )
    if not before.is_running or before.owner is None:
        return f"{root.name} is not running: {_life(before)}\n{_saved(before)}", ExitCode.DONE
    try:
        gone = before.owner.terminate(timeout)
    except PermissionError:
        raise LockstepError(
            f"process {before.owner.pid} belongs to another user", where=str(root), hint=f"sudo kill {before.owner.pid}"
        ) from None
    if not gone:
        raise LockstepError(
            f"process {before.owner.pid} was asked to stop and has not ended after {timeout:g} s",
            where=str(root),
            hint=f"lockstep status {root.name}, or once more with --timeout {max(60, int(10 * timeout))}",
        )
    after = read(root)
    return f"{root.name}: {_life(after)}, step {_steps(after)}\n{_saved(after)}", ExitCode.DONE


def logs(
    root: Path, *, gpu: int | None = None, follow: bool = False, lines: int = 50, say: Callable[[str], None]
) -> int:
    """Show the last lines of each worker (0: all), or of one; then, if asked, what is added until the run ends."""
    watched = _Watched(root, gpu)
    live = follow and read(root).is_running
    known = [folder for folder in worker_folders(root) if (folder / "heartbeat").is_file()]  # all at once, if any
    if not watched.look() and (known or not live):
        raise NotFoundError(
            f"no log of GPU {gpu}" if gpu is not None else "no log yet",
            where=str(root / "workers"),
            hint=_choices(root) or "lockstep status",
        )
    try:
        for line in watched.last(lines):
            say(line)
        while live:
            live = read(root).is_running  # asked first: what was written before the end is still read
            for line in watched.added():
                say(line)
            if live:
                time.sleep(POLL_SECONDS)
        for line in watched.rest():
            say(line)
    except KeyboardInterrupt:  # how one leaves `--follow`
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _choices(root: Path) -> str:
    found = [folder.name.removeprefix("n0-") for folder in worker_folders(root)]
    return f"this run has {', '.join(found)}" if found else ""


class _Watched:
    """The log files of a run's workers; those of workers that begin later are noticed."""

    def __init__(self, root: Path, gpu: int | None) -> None:
        self._root, self._gpu = root, gpu
        self._files: dict[str, Growing] = {}
        self._labelled_ones = set[str]()  # workers before whose lines a label stands, as on the screen
        self._scrub = scrubber()  # a log may hold what a terminal would obey

    def look(self) -> bool:
        """Whether there is anything to read."""
        folders = worker_folders(self._root)
        for folder in folders:
            if self._gpu is not None and folder.name.rpartition("-")[2] != f"GPU{self._gpu}":
                continue
            path = next((folder / name for name in LOG_NAMES if (folder / name).is_file()), None)
            if path and folder.name not in self._files:
                self._files[folder.name] = Growing(path)
            if self._gpu is None and path and (len(folders) > 1 or path.name == CAUGHT):
                self._labelled_ones.add(folder.name)
        return bool(self._files)

    def last(self, count: int) -> Iterator[str]:
        """The last lines of each file; several files are merged by the time their lines carry."""
        found: list[tuple[str, int, str]] = []
        for name, file in self._files.items():
            stamp = ""
            for number, line in enumerate(file.last(count)):
                match = STAMP.match(line)
                stamp = match[0] if match else stamp  # a line without a time belongs to the one before it
                found.append((stamp, number, self._labelled(name, line)))
        if all(stamp for stamp, _, _ in found):
            found.sort(key=lambda entry: entry[0])
        yield from (line for _, _, line in found)

    def added(self) -> Iterator[str]:
        self.look()
        for name, file in self._files.items():
            yield from (self._labelled(name, line) for line in file.added())

    def rest(self) -> Iterator[str]:
        """What stands at the end of a file without the end of a line."""
        for name, file in self._files.items():
            yield from (self._labelled(name, line) for line in file.rest())

    def _labelled(self, name: str, line: str) -> str:
        text = self._scrub(line)
        return f"[{name.removeprefix('n0-')}] {text}" if name in self._labelled_ones else text


# ------------------------------------------------------------------------------------------------ words


def _in_full(state: State) -> str:
    lines = [f"{state.root.name}  {_life(state)}", f"  step {_steps(state)}{_speed(state, before=', ')}"]
    lines += [f"  {state.determinism}"] if state.determinism else []
    if state.owner and state.is_running:
        lines.append(f"  process {state.owner.pid} on {state.owner.host}")
    if state.workers:
        heads = ["worker", "section", "step", "last sign", "busy", "memory", "temperature"]
        rows = [heads, *(_worker_row(worker) for worker in state.workers)]
        used = [at for at in range(len(heads)) if any(row[at] for row in rows[1:])]
        lines += (
            [] if used == [0] else ["", *("  " + line for line in _columns([[row[at] for at in used] for row in rows]))]
        )
    if state.cause:
        lines += ["", f"  cause: {state.cause}"]
    lines += [] if state.is_running else ["", _saved(state)]
    return "\n".join(lines)


def _worker_row(worker: Worker) -> list[str]:
    facts = worker.facts
    busy, memory, heat = (facts.get(f"gpu_{name}") for name in ("utilisation", "memory_used_bytes", "temperature_c"))
    return [
        worker.name.removeprefix("n0-"),
        worker.section,
        "" if worker.step is None else str(worker.step),
        "" if worker.age_seconds is None else f"{worker.age_seconds:.1f} s ago",
        "" if busy is None else f"{busy} %",
        "" if memory is None else f"{memory / 2**30:.1f} GiB",
        "" if heat is None else f"{heat} °C",
    ]


def _life(state: State) -> str:
    if state.life == "elsewhere":
        assert state.owner
        return f"running on {state.owner.host}, as far as can be seen from here"
    if state.life == "dead":
        return "dead: its process is gone and left no word"
    return f"{state.life} (exit {state.exit_code})" if state.life in ("stopped", "failed") else state.life


def _steps(state: State) -> str:
    done = 0 if state.finished_steps is None else state.finished_steps
    return f"{done}/{state.max_steps}" if state.max_steps else str(done)


def _speed(state: State, *, before: str = "") -> str:
    words = [f"loss {state.loss:.4f}"] if state.loss is not None else []
    if state.is_running and state.tokens_per_second:
        words.append(f"{state.tokens_per_second:,.0f} tokens/s")
    if state.eta_seconds is not None:
        words.append(f"ETA {int(state.eta_seconds) // 60}:{int(state.eta_seconds) % 60:02d}")
    return before + ", ".join(words) if words else ""


def _saved(state: State) -> str:
    """Where the newest whole checkpoint is, and how to go on from it."""
    found = sorted((path.parent for path in (state.root / "checkpoints").glob(f"step_*/{MANIFEST}")), reverse=True)
    newest, run = next((path for path in found if not _is_spoilt(path)), None), shlex.quote(str(state.root))
    lines = [f"  saved: {newest}" if newest else "  nothing was saved"]
    if state.exit_code == ExitCode.NON_FINITE:
        lines.append(f"  why: lockstep replay {run}")
    if newest and state.life != "done":
        lines.append(f"  go on: lockstep resume {run}")
    return "\n".join(lines)


def _is_spoilt(checkpoint: Path) -> bool:
    try:
        return bool(read_json(checkpoint / "run.json").get(SPOILT))
    except (OSError, ValueError, AttributeError):  # a damaged one is told when it is gone on from
        return False


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
