"""Real processes for tests of endings: start a command, hurt it, and look who is left.

    job = harness.start([sys.executable, "-m", "lockstep", ...], cwd=tmp_path, LOCKSTEP_FAULT="kill@rank=1,step=7")
    job.wait_for("Step [3")          # until its output holds this text
    job.send(signal.SIGTERM)         # to the command itself; job.members("RANK=1") are the pids of one rank
    ended = job.finish(seconds=60)   # exit code, output, seconds; never leaves a process behind
    ended.check_clean()              # no process of this job 2 s after its end; raises with their command lines
    ended.block                      # the lines of the failure message: [FAILURE] and those indented below it
    harness.failure(run_folder)      # failure.json, as a dict
    harness.check_failure(ended, run_folder, code=137, rank=1, cause="SIGKILL")   # all of faults.md section 3 at once

    harness.many(100, one)           # one(0) .. one(99), three at a time; names every one that failed
    harness.in_time(100, one, 3.0)   # the same for trials that return seconds: each within so many

The command runs in its own session. It and all it starts carry LOCKSTEP_TEST_ID=<random> in their environment:
survivors are found by that, in /proc/*/environ, not by their names. Output goes to a file: it never blocks the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
STAMP = "LOCKSTEP_TEST_ID"
ORPHAN_SECONDS = 2.0


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int  # as a shell shows it: 128 + n for signal n
    out: str
    seconds: float  # from finish() or the last send() to its end
    stamp: str
    ended_at: float

    @property
    def block(self) -> list[str]:
        """The failure message, from the line that begins with [FAILURE] to the last indented one below it."""
        lines = self.out.splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith("[FAILURE]")), len(lines))
        rest = lines[first + 1 :]
        length = next((number for number, line in enumerate(rest) if not line.startswith("  ")), len(rest))
        return lines[first : first + 1 + length]

    def check_clean(self, seconds: float = ORPHAN_SECONDS) -> float:
        """Nobody is left so many seconds after the end; how long it took."""
        while left := survivors(self.stamp):
            passed = time.monotonic() - self.ended_at
            if passed > seconds:
                names = {pid: command_line(pid) for pid in left}
                kill(self.stamp)
                raise AssertionError(f"alive {passed:.1f} s after the end: {names}\n{self.out[-2000:]}")
            time.sleep(0.005)
        return time.monotonic() - self.ended_at


class Job:
    """A command that runs."""

    def __init__(self, command: Sequence[str], cwd: Path | None, environ: dict[str, str]) -> None:
        self.stamp = uuid.uuid4().hex
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the job
        self.process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=os.environ | environ | {STAMP: self.stamp, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._since = time.monotonic()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        size = os.fstat(self._out.fileno()).st_size
        return os.pread(self._out.fileno(), size, 0).decode("utf-8", "backslashreplace")

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Until the output holds this text; the output."""
        deadline = time.monotonic() + seconds
        while True:
            code, is_late = self.process.poll(), time.monotonic() > deadline  # before the look: its last words count
            if text in (out := self.out):
                return out
            if code is not None or is_late:
                self.end()
                raise AssertionError(f"{text!r} did not appear (exit code {code}):\n{out[-3000:]}")
            time.sleep(0.01)

    def members(self, variable: str = "") -> list[int]:
        """Pids of this job whose environment holds `variable` (as in "RANK=1"); all of them without it."""
        return survivors(self.stamp, variable)

    def send(self, number: int, pid: int | None = None) -> None:
        self._since = time.monotonic()
        os.kill(self.pid if pid is None else pid, number)

    def finish(self, seconds: float = 60.0) -> Ended:
        """Wait for the end. A command that takes longer is killed, with all it has started, and the test fails."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            out = self.out
            self.end()
            raise AssertionError(f"still running after {seconds} s:\n{out[-3000:]}") from None
        now = time.monotonic()
        out = self.out
        self._out.close()
        return Ended(128 - code if code < 0 else code, out, now - self._since, self.stamp, now)

    def end(self) -> None:
        """Kill it, with all it has started."""
        kill(self.stamp)
        self.process.wait()
        self._out.close()


def start(command: Sequence[str], *, cwd: Path | None = None, **environ: str) -> Job:
    """Start a command with these variables added to the environment."""
    return Job(command, cwd, environ)


def run(command: Sequence[str], *, cwd: Path | None = None, seconds: float = 60.0, **environ: str) -> Ended:
    """Start a command and wait for its end."""
    return start(command, cwd=cwd, **environ).finish(seconds)


def survivors(stamp: str, variable: str = "") -> list[int]:
    """Living processes that were started with this stamp (and this variable) in their environment."""
    wanted = {f"{STAMP}={stamp}".encode()} | ({variable.encode()} if variable else set())
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return sorted(found)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "backslashreplace")
    except OSError:
        return "(gone)"


def kill(stamp: str) -> None:
    """End every process of a job."""
    while left := survivors(stamp):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def many(times: int, one: Callable[[int], T], *, at_once: int = 3) -> list[T]:
    """Repeat a trial; all of them are made, then the failed ones are told."""
    results: list[T] = []
    failed: list[str] = []
    with ThreadPoolExecutor(at_once) as pool:
        for number, trial in enumerate([pool.submit(one, number) for number in range(times)]):
            try:
                results.append(trial.result())
            except AssertionError as error:
                failed.append(f"trial {number}: {str(error)[:3000]}")
    assert not failed, f"{len(failed)} of {times} failed\n" + "\n".join(failed[:3])
    return results


def in_time(times: int, one: Callable[[int], float], seconds: float, *, at_once: int = 3) -> None:
    """Trials that return how long something took: none may take longer."""
    late = {number: took for number, took in enumerate(many(times, one, at_once=at_once)) if took > seconds}
    assert not late, f"{late}, {seconds} s are allowed"


def failure(run_folder: Path) -> dict[str, Any]:
    """The failure record of a run."""
    return json.loads((run_folder / "failure.json").read_text(encoding="utf-8"))


def check_failure(ended: Ended, run_folder: Path, *, code: int, rank: int, cause: str = "") -> dict[str, Any]:
    """What every row of the fault matrix asks: exit code, nobody left, the record, and a message of five lines."""
    assert ended.code == code, f"exit code {ended.code}, expected {code}\n{ended.out[-3000:]}"
    ended.check_clean()
    assert (run_folder / "failure.json").exists(), ended.out[-3000:]
    record = failure(run_folder)
    assert (record["exit_code"], record["rank"]) == (code, rank), record
    assert cause in record["cause"], record
    assert len(record["trace"]) <= 20
    block = ended.block
    assert 2 <= len(block) <= 5, ended.out[-3000:]
    text = "\n".join(block)
    assert f"rank {rank}" in text
    assert record["cause"] in text
    assert f"try: {record['next']}" in text
    leftovers = list(run_folder.rglob("*.tmp*"))
    assert not leftovers, leftovers
    return record
