"""SLURM: a job step inside an allocation, a submitted script outside of one, and going back to the queue."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from lockstep.errors import ExitCode, LockstepError, NotFoundError
from lockstep.launch.children import Proc
from lockstep.runtime import env as environment
from lockstep.runtime.env import Env

# our launchers end each other; srun killing one that still saves or requeues would only do harm
SRUN_PATIENCE = ("--kill-on-bad-exit=0", "--wait=600")
OWN_NAMES = ("LOCKSTEP_WORK", "LOCKSTEP_RUN_ID", "LOCKSTEP_LAUNCHER_PID")
_requeued: set[str] = set()


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether srun can start here and now: a batch script or an salloc shell, not a task of a step."""
    return "SLURM_JOB_ID" in environ and not environment.is_slurm_task(environ)


def plan(module: Sequence[str], nodes: int, *, environ: Mapping[str, str]) -> list[Proc]:
    """One task per node, each our own launcher. module: what follows `python -m`, with `--launch workers` in it."""
    fresh = [word for name in OWN_NAMES for word in ("-u", name)]  # the tasks are launchers, not workers of this one
    command = ["env", *fresh, "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *SRUN_PATIENCE]
    return [Proc(tag="", slots=(0,), command=(*command, sys.executable, "-m", *module), environ=dict(environ))]


def submit(script: str) -> str:
    """Hand a script to sbatch; the number of its job."""
    try:
        answer = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        hint = "lockstep script slurm FAMILY PRESET > job.slurm, and submit it where SLURM is"
        raise NotFoundError("there is no sbatch on this machine", hint=hint) from error
    except subprocess.TimeoutExpired as error:
        raise LockstepError("sbatch did not answer within 60 s", hint="sinfo") from error
    found = re.match(r"\d+", answer.stdout)
    if answer.returncode or not found:
        reason = (answer.stderr or answer.stdout).strip().splitlines()
        raise LockstepError(f"sbatch refused the job: {reason[-1] if reason else answer.returncode}", hint="sinfo")
    return found[0]


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
