"""What one round leaves to the next: which run it has begun.

It lies in a folder of this machine that outlives the rounds of a start: our launcher's, or torchrun's agent's.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from lockstep import rundir
from lockstep.launch import common_folder, guardian
from lockstep.runtime import env, rounds

FOLDER = "LOCKSTEP_ROUNDS"  # where our own launcher's workers find it
RUN = "run"


def open_folder() -> Path:
    """The folder of a launcher of ours: this process. Those of launchers that were killed are swept."""
    common_folder.sweep()
    return _hold(os.getpid(), "")


def variables(folder: Path, number: int, most: int) -> dict[str, str]:
    """What tells the workers of a round of ours that it is one."""
    return {FOLDER: str(folder), rounds.NUMBER: f"{number}/{most}"}


def run_in(folder: Path) -> Path | None:
    """The run that the rounds with this folder have begun, or were about to begin."""
    try:
        return Path((folder / RUN).read_text(encoding="utf-8"))
    except OSError:
        return None


def kept_run() -> Path | None:
    """The run that an earlier round of this worker's start has begun, or was about to begin."""
    folder = _folder() if rounds.current().number else None
    return run_in(folder) if folder else None


def keep_run(run: Path) -> None:
    """Should there be another round, it goes on in this run. Told before the folder is made: no end is too early."""
    if folder := _folder():
        rundir.write_bytes(folder / RUN, str(run).encode())


@functools.cache
def _folder() -> Path | None:
    """Of this worker's start; None: there will be no other round."""
    if place := env.get(FOLDER):
        return Path(place)
    if not rounds.current().most:
        return None
    agent = guardian.find_agent(guardian.ELASTIC)
    return _hold(agent, f"{guardian.started(agent)} {env.get(guardian.ELASTIC)}")


def _hold(launcher: int, key: str) -> Path:
    digest = hashlib.sha256(f"rounds {key}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}-{launcher}-{digest}"
    common_folder.hold(folder)
    return folder
