"""SLURM: a job that was asked to make room goes back to the queue."""

from __future__ import annotations

import subprocess

from lockstep.errors import ExitCode
from lockstep.runtime import env as environment
from lockstep.runtime.env import Env

_requeued: set[str] = set()


def requeue_once(env: Env, exit_code: int = ExitCode.PREEMPTED) -> str | None:
    """After exit 75 the job goes back to the queue, by one process of the job, once. What there is to say, if anything.

    That process is node 0's launcher, or rank 0 where a foreign launcher started the workers.
    """
    job = environment.get("SLURM_JOB_ID")
    if exit_code != ExitCode.PREEMPTED or not job or env.launcher == "lockstep" or env.rank or job in _requeued:
        return None
    _requeued.add(job)
    try:
        answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot requeue SLURM job {job}: {error}"
    reason = (answer.stderr or answer.stdout).strip()
    return f"cannot requeue SLURM job {job}: {reason}" if answer.returncode else f"SLURM job {job} is back in the queue"
