"""Starting a run again after a crash or a hang: after which failures, how often, after how long a pause."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import rundir
from lockstep.errors import ExitCode, LockstepError, Stopped
from lockstep.launch import between_rounds, failure
from lockstep.launch.supervise import Outcome
from lockstep.rundir import RunDir
from lockstep.runtime import env, owner

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 60.0
ANY = ""
IN_VAIN: dict[tuple[int, str], str] = {  # (exit code, kind of the failure) -> why there is no restart
    (ExitCode.FAILED, "memory"): "the same step would need as much memory again",
    (ExitCode.USAGE, ANY): "it would be refused again",
    (ExitCode.BAD_DEVICE, ANY): "bits differ: lockstep check finds the device",
    (ExitCode.DATA, ANY): "the data would be as bad again",
    (ExitCode.NOT_FOUND, ANY): "it would not be found again",
    (ExitCode.NON_FINITE, ANY): "the same step would be NaN or Inf again",
    (ExitCode.CANNOT_CREATE, ANY): "the place could not be written again",
    (ExitCode.IO, "disk_full"): "the disk would be full again",
    (ExitCode.PREEMPTED, ANY): "it was asked to stop",
    (ExitCode.INTERRUPTED, ANY): "it was asked to stop",
    (ExitCode.TERMINATED, ANY): "it was asked to stop",
}


def why_not(exit_code: int, kind: str) -> str:
    """Why a failure is not answered by a restart; '': it is. Every crash, hang and loss that is not named here is."""
    return IN_VAIN.get((exit_code, kind)) or IN_VAIN.get((exit_code, ANY), "")


def is_in_vain(record: Mapping[str, Any]) -> bool:
    """The same of a worker's own account of its end; one that was told to stop by its launcher knows nothing of it."""
    if "stopped" in record:
        return record["stopped"] == ExitCode.PREEMPTED
    return not record.get("secondary") and bool(why_not(int(record["exit_code"]), str(record.get("kind", ANY))))


@dataclass
class Pause:
    """How long to wait before the next restart: twice as long each time, until one has saved something new."""

    seconds: float = 0.0

    def next(self, *, progress: bool) -> float:
        self.seconds = FIRST_SECONDS if progress else min(LONGEST_SECONDS, 2 * self.seconds or FIRST_SECONDS)
        return self.seconds


class Story:
    """What the first machine's launcher writes down of restarts, as soon as there is a run folder to write to."""

    def __init__(self, tell: Callable[[Path, Mapping[str, Any]], None]) -> None:
        self._tell = tell  # an event of the run
        self._waiting: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []

    def add(self, record: Mapping[str, Any], number: int, most: int) -> None:
        told = {"failure": record["kind"], "exit_code": record["exit_code"], "cause": env.redact(record["cause"])}
        self._waiting.append((record, {"number": number, "most": most, **told}))

    def write(self, run: Path | None) -> None:
        """Each failure to failures/, each restart to the events. A full disk does not stop a restart."""
        while run is not None and run.is_dir() and self._waiting:
            record, event = self._waiting.pop(0)
            with contextlib.suppress(OSError, LockstepError):
                rundir.write_json(RunDir(run).failure, failure.redacted(record))
                rundir.set_aside(RunDir(run))
                self._tell(run, event)


def keep_running(
    attempt: Callable[[Mapping[str, str]], Outcome], *, most: int, node: int, say: Callable[[str], None], story: Story
) -> int:
    """Attempts, each with the variables of its round, until one is done or in vain; the exit code of the last."""
    if not most:
        return attempt({}).exit_code
    folder, pause, saved = between_rounds.open_folder(), Pause(), ""
    try:
        for made in itertools.count():
            outcome = attempt(between_rounds.variables(folder, made, most))
            run = between_rounds.run_in(folder) or outcome.run
            if outcome.failure is None:
                story.write(run)
                return outcome.exit_code
            newest = newest_checkpoint(run) if run else ""
            reason = "it was asked to stop" if outcome.stop else _why_not(outcome.failure)
            if not reason and made < most:
                seconds = pause.next(progress=bool(made) and newest > saved)
                saved = newest
                start = f"from {newest or 'its beginning'}"
                say(env.redact(f"[RESTART] {made + 1} of {most} in {seconds:g} s, {start}: {outcome.failure['cause']}"))
                with _waiting(run, node):
                    time.sleep(seconds)
                reason = _why_not(failure.read_record(RunDir(run).failure)) if run and node else ""  # said by another
                if not reason and node == 0:
                    story.add(outcome.failure, made + 1, most)
                    story.write(run)
            if reason or made >= most:
                _give_up(outcome.failure, run if not node else None, made, most=most, reason=reason, say=say)
                return outcome.exit_code
        raise AssertionError("counting never ends")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _why_not(record: Mapping[str, Any]) -> str:
    return why_not(int(record.get("exit_code", 0)), str(record.get("kind", ANY)))


def newest_checkpoint(run: Path) -> str:
    """The name of the newest checkpoint that has its manifest; '': there is none."""
    found = RunDir(run).checkpoints.glob(f"step_*/{rundir.MANIFEST}")
    return max((path.parent.name for path in found if ".tmp-" not in path.parent.name), default="")


@contextlib.contextmanager
def _waiting(run: Path | None, node: int) -> Generator[None]:
    """Between two rounds the launcher is who `lockstep stop` has to ask; a signal says how to go on later."""
    mine = run if run is not None and run.is_dir() and node == 0 else None
    if mine:
        with contextlib.suppress(OSError):  # a full disk: only `status` and `stop` know less
            owner.write(mine, sys.argv)
    try:
        yield
    except Stopped as stopped:
        if run is not None and newest_checkpoint(run):
            stopped.where, stopped.hint = str(run), f"lockstep resume {shlex.quote(str(run))}"
        if mine:
            owner.leave(mine)
        raise


def _give_up(
    record: dict[str, Any], run: Path | None, made: int, *, most: int, reason: str, say: Callable[[str], None]
) -> None:
    """The last line below the failure's own, and the count in its record."""
    why = f"not restarted, {reason}" if reason else f"exit code {record['exit_code']} is the last"
    say(f"  restarts: {made} of {most} made; {why}")
    if run is not None and run.is_dir() and (RunDir(run).failure.is_file() or not reason):  # a refusal leaves none
        with contextlib.suppress(OSError):  # a full disk has been complained of
            rundir.write_json(RunDir(run).failure, failure.redacted({**record, "restarts": made}))
