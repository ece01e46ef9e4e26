"""Out of memory, in numbers: what was asked for, used and allowed, and which setting to change by how much."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.load import replaced
from lockstep.config.schema import RunConfig
from lockstep.engine.fitting import GPUS, ROOM, Change, compiles
from lockstep.engine.present import memory_estimate, shards
from lockstep.errors import LockstepError, MemoryShortageError
from lockstep.launch.failure import remedy_command, size_text
from lockstep.models import shapes
from lockstep.models.shapes import Memory, Shape
from lockstep.rundir import RunDir
from lockstep.runtime import env, hardware

if TYPE_CHECKING:
    from lockstep.engine.build import Plan

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50, "EiB": 1 << 60}
REQUEST = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.,]+) (bytes|[KMGTPE]iB)")  # torch on both devices; numpy
OTHER_WORDS = re.compile(r"allocate memory|CUDA (?:driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
EIGHTHS = (6, 4, 2, 1)  # of a context length
LEAST_TOKENS = 8
OF_THE_HOST = "more host memory for the job, or less beside it: no setting of the model takes it while it is on a GPU"


@dataclass(frozen=True)
class Work:
    """What was to be done where, as far as it costs memory."""

    config: RunConfig
    shape: Shape
    device: torch.device
    shards: int = 1
    world: int = 1

    def need(self, config: RunConfig | None = None, shape: Shape | None = None, shards: int = 0) -> Memory:
        """By the estimate, of this configuration or another one."""
        chosen = config or self.config
        compiled = compiles(chosen, self.device)
        return memory_estimate(chosen, shape or self.shape, compiled=compiled, shards=shards or self.shards)


def work_of(planned: Plan, place: env.Env) -> Work:
    """Of a run that is planned, or was."""
    parts = shards(planned.config.system.mode, place)
    return Work(planned.config, planned.shape, planned.device, parts, place.world)


@dataclass(frozen=True)
class Remedy:
    """Settings that need less. `exact`: they change no number, so a saved state can be gone on from as it is."""

    flags: str
    words: str
    exact: bool = False


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
    """The error as a user should read it: the numbers, and the one change that the estimate says is enough.

    `workers` of this machine live on the same memory, unless each has its own.
    """
    asked, bounds = requested_bytes(str(error)), hardware.memory_bounds(work.device)
    room, sharing = int(ROOM * (bounds.limit - bounds.taken)), workers if bounds.shared else 1
    options, need = work.config.training, work.need()
    missing = max(0, bounds.peak + asked - room) if asked is not None else 0
    to_come = need.total - room // sharing  # the request that failed may be the first of many
    found = remedy(work, missing=max(-(-missing // sharing), to_come))
    figures = [
        *([f"{size_text(asked)} asked for"] if asked is not None else []),
        f"peak {size_text(bounds.peak)}",
        f"{bounds.words} {size_text(bounds.limit)}",
    ]
    told = MemoryShortageError(
        f"out of memory: {', '.join(figures)}; estimated were {size_text(need.total)} with batch_size "
        f"{options.batch_size} x context_length {options.context_length}",
        where=hardware.device_name(work.device),
        hint=as_command(found, run),
    )
    told.remedy = found
    told.figures = {
        "requested_bytes": asked,
        "peak_bytes": bounds.peak,
        "limit_bytes": bounds.limit,
        "estimated_bytes": need.total,
    }
    told.__cause__ = error
    return told


def foreseen(work: Work, *, workers: int = 1) -> dict[str, Any]:
    """What a launcher says of a worker that the kernel has killed for want of memory: the host's, not a card's."""
    if work.device.type != "cpu":
        return {"estimated_bytes": None, "remedy": asdict(Remedy("", OF_THE_HOST))}
    bounds, need = hardware.memory_bounds(work.device), work.need().total
    to_come = need - int(ROOM * bounds.limit) // (workers if bounds.shared else 1)
    return {"estimated_bytes": need, "remedy": asdict(remedy(work, missing=max(0, to_come)))}


def as_command(found: Remedy, run: RunDir | None) -> str:
    """What to type; after a save, so that nothing is done twice."""
    return remedy_command(found.flags, found.words, exact=found.exact, run=run.root if run else None)


def remedy(work: Work, *, missing: int = 0) -> Remedy:
    """The mildest change that saves `missing` bytes by the estimate; where none does, the strongest, and what it lacks.

    Rows of a micro-batch move into accumulation, so that the global batch stays; then blocks are recomputed; then rows
    get shorter; then the model is cut into shards. What the configuration would refuse is never told.
    """
    need = work.need()
    strongest: Remedy | None = None
    most = 0
    for changes, parts in _ladder(work):
        trial = _accepted(work, changes)
        if trial is None:
            continue
        then = work.need(*trial, parts)
        saved = need.total - then.total
        if saved <= 0:
            continue
        flags = " ".join(change.flags for change in changes)
        exact = all(change.section == "system" for change in changes)
        if saved >= missing:
            return Remedy(flags, _words(need, then), exact)
        mild = trial[1] is work.shape and parts == work.shards  # not other rows or more GPUs that are not enough
        if saved > most and mild:
            strongest, most = Remedy(flags, _words(need, then), exact), saved
    lacking = f"{size_text(missing - most)} more are missing: " if missing > most else ""
    if need.total < missing:
        lacking += f"the run itself is estimated at {size_text(need.total)}, something else takes the memory"
    else:
        lacking += "fewer model.num_layers, or another model.model_path"
    return (
        Remedy(strongest.flags, f"{strongest.words}; {lacking}", strongest.exact) if strongest else Remedy("", lacking)
    )


def _words(before: Memory, after: Memory) -> str:
    """How much less it is, and of what."""
    saved = before.total - after.total
    share = after.passing / before.passing if before.passing else 1.0
    what = f"about {share:.0%} of the activations" if after.states == before.states else "in shards"
    return f"{what}, {size_text(saved)} less per worker"


def _ladder(work: Work) -> Iterator[tuple[Sequence[Change], int]]:
    """Changes, the mildest first, with the shards they would give."""
    training, rows = work.config.training, work.config.training.batch_size * work.config.training.grad_accum_nums
    fewer = [_rows_change(count, rows // count) for count in range(training.batch_size // 2, 0, -1) if not rows % count]
    yield from (([change], work.shards) for change in fewer)
    base = fewer[-1:]
    if not work.config.system.gradient_checkpointing:
        base = [*base, Change("--gradient-checkpointing", "system", {"gradient_checkpointing": True})]
        yield base, work.shards
    for eighths in EIGHTHS:
        length = training.context_length * eighths // 8 // LEAST_TOKENS * LEAST_TOKENS
        if length:
            shorter = Change(f"--training.context-length {length}", "training", {"context_length": length})
            yield [*base, shorter], work.shards
    for count in (work.world, *GPUS) if work.device.type == "cuda" else ():
        if count > work.shards and count >= work.world:
            gpus = f" --gpus {count}" if count > work.world else ""
            sharded = Change(f"--mode fsdp{gpus}", "system", {"mode": "fsdp"})
            yield [*_spread(work, base, count), sharded], count


def _spread(work: Work, base: Sequence[Change], count: int) -> list[Change]:
    """The same changes with so many workers: each does less of the same global batch, where that can be divided."""
    training = work.config.training
    rows, rest = divmod(training.batch_size * training.grad_accum_nums * work.world, count)
    if rest or count == work.world:
        return list(base)
    return [_rows_change(1, rows), *(change for change in base if change.section == "system")]


def _rows_change(batch_size: int, accumulated: int) -> Change:
    return Change(
        f"--training.batch-size {batch_size} --training.grad-accum-nums {accumulated}",
        "training",
        {"batch_size": batch_size, "grad_accum_nums": accumulated},
    )


def _accepted(work: Work, changes: Sequence[Change]) -> tuple[RunConfig, Shape] | None:
    """The configuration with these changes and its shape; None where it would be refused."""
    values = {f"{change.section}.{name}": value for change in changes for name, value in change.values.items()}
    try:
        changed = replaced(work.config, values).config
        length = changed.training.context_length
        if length == work.config.training.context_length:  # the sizes are what they were: no hub is asked again
            return changed, work.shape
        return changed, shapes.resolve(changed.model, context_length=length)
    except LockstepError:
        return None
