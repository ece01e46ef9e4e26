"""A run that goes on with machines that share no disk: the first one hands them the checkpoint it goes on from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

from lockstep import rundir
from lockstep.errors import DataError
from lockstep.runtime.env import Env
from lockstep.runtime.group import Group

logger = logging.getLogger(__name__)

PART_BYTES = 64 << 20


def hand_over(checkpoint: Path, group: Group, place: Env) -> None:
    """Give the folder to every machine that lacks it, or has another of that name. All ranks call it.

    What arrives gets a manifest of its own, which must be that of the first machine: every byte has then arrived.
    """
    if place.nodes == 1 or checkpoint.suffix == ".pt":
        return
    everyone: list[str] = group.gather(_contents(checkpoint))
    wanted = everyone[0]
    if all(contents == wanted for contents in everyone):
        return
    files: list[tuple[str, int]] = group.together(lambda: _files(checkpoint))
    writes = everyone[group.rank] != wanted and place.local_rank == 0
    if group.rank == 0:
        logger.info("Handing %s to machines that do not have it", checkpoint)
    try:
        if writes:
            rundir.sweep(checkpoint.parent)  # what a killed attempt has left on this machine
        with rundir.publishing(checkpoint) if writes else contextlib.nullcontext() as staged:
            for name, size in files:
                _hand_file(checkpoint / name, staged / name if staged else None, size, group)
    except OSError as error:
        raise rundir.io_error(error, checkpoint, doing="taking over a checkpoint") from error
    if writes and _contents(checkpoint) != wanted:
        raise DataError("the checkpoint has not arrived as it was sent", where=str(checkpoint), hint="start again")
    group.barrier()  # the other workers of a machine read what the first of them has written


def _contents(checkpoint: Path) -> str:
    """A hash of all that the manifest says; '' where there is none: a name alone may be that of an older run."""
    try:
        files = rundir.read_json(checkpoint / rundir.MANIFEST)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _files(checkpoint: Path) -> list[tuple[str, int]]:
    found = (path for path in sorted(checkpoint.iterdir()) if path.is_file() and path.name != rundir.MANIFEST)
    return [(path.name, path.stat().st_size) for path in found]


def _hand_file(source: Path, target: Path | None, size: int, group: Group) -> None:
    """One file in parts, from the disk of rank 0 to where it is lacking."""
    nothing = Path(os.devnull)
    with (source if group.rank == 0 else nothing).open("rb") as reader, (target or nothing).open("wb") as writer:
        for start in range(0, size, PART_BYTES):
            count = min(PART_BYTES, size - start)
            writer.write(group.spread(reader.read(count), count))
