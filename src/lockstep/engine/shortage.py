"""Out of memory, in numbers: what was asked for, used and allowed, and the first change that would make it fit."""

from __future__ import annotations

import errno
import re
from dataclasses import asdict
from typing import Any

import torch

from lockstep.engine.fitting import ROOM, SMALLER, Remedy, Work, remedies
from lockstep.errors import MemoryShortageError
from lockstep.launch.failure import remedy_command, size_text
from lockstep.rundir import RunDir
from lockstep.runtime import hardware
from lockstep.runtime.memory_limits import Bounds

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
REQUEST = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.,]+) (bytes|[KMGTPE]iB)")  # torch on both devices; numpy
OTHER_WORDS = re.compile(r"allocate memory|CUDA (?:driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
LESS = 0.9  # times the estimate, which was too low where it said that the run fits
OF_THE_HOST = "more host memory for the job, or less beside it: no setting of the model takes it while it is on a GPU"


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no more memory, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(inner := getattr(error, "inner_exception", None), BaseException):  # the compiler tells of another's
        return is_shortage(inner)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and OTHER_WORDS.search(str(error)) is not None


def requested_bytes(text: str) -> int | None:
    """What was asked for in vain, where the error says it."""
    found = REQUEST.search(text)
    return int(float(found[1].replace(",", "")) * UNITS[found[2]]) if found else None


def explain(error: BaseException, work: Work, *, run: RunDir | None = None, workers: int = 1) -> MemoryShortageError:
    """The error as a user should read it: the numbers, and the first change that the estimate says is enough.

    `workers` of this machine live on the same memory, unless each has its own.
    """
    asked, bounds = requested_bytes(str(error)), hardware.memory_bounds(work.device)
    options, need = work.config.training, work.need().total
    figures = [
        *([f"{size_text(asked)} asked for"] if asked is not None else []),
        f"peak {size_text(bounds.peak)}",
        f"{bounds.words} {size_text(bounds.limit)}",
    ]
    found = _remedy(work, bounds, workers)
    told = MemoryShortageError(
        f"out of memory: {', '.join(figures)}; estimated were {size_text(need)} with batch_size "
        f"{options.batch_size} x context_length {options.context_length}",
        where=hardware.device_name(work.device),
        hint=as_command(found, run),
    )
    told.remedy = found
    told.figures = {
        "requested_bytes": asked,
        "peak_bytes": bounds.peak,
        "limit_bytes": bounds.limit,
        "estimated_bytes": need,
    }
    told.__cause__ = error
    return told


def foreseen(work: Work, *, workers: int = 1) -> dict[str, Any]:
    """What a launcher says of a worker that the kernel has killed for want of memory: the host's, not a card's."""
    if work.device.type != "cpu":
        return {"estimated_bytes": None, "remedy": asdict(Remedy("", OF_THE_HOST))}
    found = _remedy(work, hardware.memory_bounds(work.device), workers)
    return {"estimated_bytes": work.need().total, "remedy": asdict(found)}


def _remedy(work: Work, bounds: Bounds, workers: int) -> Remedy:
    free = (bounds.limit - bounds.taken) // (workers if bounds.shared else 1)
    room = int(min(ROOM * free, LESS * work.need().total))
    return next(remedies(work, room), Remedy("", SMALLER))


def as_command(found: Remedy, run: RunDir | None) -> str:
    """What to type; after a save, so that nothing is done twice."""
    return remedy_command(found.flags, found.words, exact=found.exact, run=run.root if run else None)
