"""Start a run again after a crash or a hang: at most N times, after a pause, unless it would be in vain."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import ExitCode
from lockstep.launch import between_rounds, failure
from lockstep.launch.supervise import Outcome
from lockstep.rundir import RunDir
from lockstep.runtime import env, owner

PAUSE_SECONDS = 5.0
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


def keep_running(
    attempt: Callable[[Mapping[str, str]], Outcome], *, most: int, node: int, say: Callable[[str], None]
) -> int:
    """Attempts, each with the variables of its round, until one is done, in vain or the last; its exit code."""
    if not most:
        return attempt({}).exit_code
    folder = between_rounds.open_folder()
    try:
        for made in itertools.count():
            outcome = attempt(between_rounds.variables(folder, made, most))
            if outcome.failure is None:
                return outcome.exit_code
            run = between_rounds.run_in(folder) or outcome.run
            reason = "it was asked to stop" if outcome.stop else _why_not(outcome.failure)
            if not reason and made < most:
                cause = env.redact(outcome.failure["cause"])
                say(f"[RESTART] {made + 1} of {most} in {PAUSE_SECONDS:g} s, after: {cause}")
                if run and run.is_dir() and not node:
                    with contextlib.suppress(OSError):  # a full disk: only `status` and `stop` know less
                        owner.write(run, sys.argv)  # `lockstep stop` ends this process meanwhile
                time.sleep(PAUSE_SECONDS)
                reason = _why_not(failure.read_record(RunDir(run).failure)) if run and node else ""  # said by another
            if reason or made >= most:
                why = f"not restarted, {reason}" if reason else f"exit code {outcome.exit_code} is the last"
                say(f"  restarts: {made} of {most} made; {why}")
                return outcome.exit_code
        raise AssertionError("counting never ends")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _why_not(record: Mapping[str, Any]) -> str:
    return why_not(int(record.get("exit_code", 0)), str(record.get("kind", ANY)))
