"""`training.batch_size: auto`: the largest micro-batch that fits every GPU of a run; accumulation does the rest.

The rows of a step stay what they were, so the loss and its gradient do too, but for rounding. A size is not believed in
but tried: a step that changes nothing, by each rank alone, so that one that runs out of memory leaves nobody waiting.
What the ranks have seen they tell each other, and all draw the same conclusion from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.load import to_dict
from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch
from lockstep.engine.present import memory_estimate, shards
from lockstep.engine.shortage import is_shortage
from lockstep.runtime import env, hardware, measured
from lockstep.runtime.memory_limits import Bounds
from lockstep.runtime.parallel import Sharded

if TYPE_CHECKING:
    from lockstep.engine.build import Plan
    from lockstep.engine.step import Stepper
    from lockstep.models.build import Built
    from lockstep.runtime.group import Group

ROOM = 0.92  # of the card: the rest is for what torch does not count
MORE = 1.05  # times the room of a measurement: those who were on the card beside it have left, and more may fit now
TRIED = 2  # micro-batches of a trial: the second one meets the gradients of the first
DEVICES = ("cuda",)  # where running out of memory is an error that can be caught
GIB = 2**30


@dataclass(frozen=True)
class Trial:
    """A size that fits, and the memory of the rank that has the least to spare."""

    rows: int
    peak: int
    room: int
    card: int


@dataclass(frozen=True)
class Search:
    """What is tried, and what is known before."""

    sizes: Sequence[int]  # rising
    attempt: Callable[[int], int | None]  # bytes at the peak of this rank; None: they were not there
    estimate: Callable[[int], int]  # bytes, of any size
    bounds: Bounds  # of this rank's card
    group: Group

    @property
    def room(self) -> int:
        """Bytes that may be used here."""
        return int(ROOM * self.bounds.limit) - self.bounds.taken

    def largest(self) -> Trial | None:
        """The largest size that fits all ranks; None: not even the smallest does.

        From the largest that fits by the estimate: down as long as it does not, up as long as there is room.
        """
        place, too_large = self.sizes.index(self.foreseen()), len(self.sizes)
        best: Trial | None = None
        while place >= 0 and not (best and self.sizes[place] <= best.rows):
            trial = self.tried(self.sizes[place])
            if trial is None:
                too_large, place = place, place - 1
            else:
                best, place = trial, self._up(trial, too_large)
        return best

    def tried(self, rows: int) -> Trial | None:
        """By all ranks at once; each tells what it has seen."""
        seen = self.group.gather([self.attempt(rows), self.room, self.bounds.limit])
        if any(peak is None for peak, _, _ in seen):
            return None
        peak, room, card = max(seen, key=lambda told: told[0] / max(1, told[1]))
        return Trial(rows, peak, room, card) if peak <= room else None

    def foreseen(self) -> int:
        """The largest that fits all ranks by the estimate; else the smallest."""
        room = min(self.group.gather(self.room))
        return max((rows for rows in self.sizes if self.estimate(rows) <= room), default=self.sizes[0])

    def _up(self, trial: Trial, too_large: int) -> int:
        """The place of the largest size that may fit too, by the milder of two guesses: a trial in vain costs seconds.

        What was measured, and the estimate of the difference; or the estimate, as far off as it was here.
        """
        here, hopeful = self.estimate(trial.rows), 0
        for place, rows in enumerate(self.sizes[:too_large]):
            more = self.estimate(rows)
            if min(trial.peak + more - here, trial.peak * more / here) <= trial.room:
                hopeful = place
        return hopeful


def divisors(rows: int) -> list[int]:
    """The sizes that so many rows can be cut into equally."""
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    return sorted({*small, *(rows // size for size in small)})


def with_rows(config: RunConfig, rows: int) -> RunConfig:
    """The same rows of a step in micro-batches of another size."""
    count = config.training.batch_size * config.training.grad_accum_nums // rows
    training = config.training.model_copy(update={"batch_size": rows, "grad_accum_nums": count})
    return config.model_copy(update={"training": training})


def least(plan: Plan) -> RunConfig:
    """What must fit in any case: where micro-batches are to be found, one row."""
    return with_rows(plan.config, 1) if plan.auto_rows is not None and not _why_not(plan) else plan.config


@dataclass(frozen=True)
class Place:
    """Where a micro-batch is to be found: the run as it is planned, and the model that is ready to step."""

    plan: Plan
    built: Built
    stepper: Stepper
    everyone: Group  # also replicas, which train alone and are to be equal all the same
    about: dict[str, Any]  # what a checkpoint belongs to
    batches: Callable[[int], Sequence[Batch]]  # of one step, in micro-batches of so many rows

    def need(self, rows: int) -> int:
        """Bytes, by the estimate."""
        config = with_rows(self.plan.config, rows)
        parted = shards(config.system.mode, env.detect())
        return memory_estimate(config, self.plan.shape, compiled=self.built.compiled, shards=parted).total


def settled(at: Place) -> tuple[Plan, Built]:
    """The plan with the split that fits, if that is to be found, and what its user should hear of it.

    A checkpoint tells it; what a run that goes on is called stays as it was.
    """
    if at.plan.auto_rows is None:
        return at.plan, at.built
    config, line = find(at)
    if not at.plan.auto_rows:
        found = {"batch_size": config.training.batch_size, "grad_accum_nums": config.training.grad_accum_nums}
        at.about["config"]["training"] |= found
        at.about["identity"] |= {f"training.{name}": value for name, value in found.items()}
    return replace(at.plan, config=config), replace(at.built, notices=(*at.built.notices, line))


def find(at: Place) -> tuple[RunConfig, str]:
    """The configuration with the split that fits, and the line that says so. All ranks call it."""
    config, kept = at.plan.config, at.plan.auto_rows
    rows = config.training.batch_size * config.training.grad_accum_nums
    sizes = [size for size in divisors(rows) if size <= (kept or rows)]
    if reason := _why_not(at.plan):
        found, why = config.training.batch_size, reason
    else:
        found, why = _look(at, sizes)
    config, world = with_rows(config, found), at.stepper.council.group.world
    count = config.training.grad_accum_nums
    text = f"batch: {found} row{'s' * (found > 1)} x {count} (auto: {why}; global batch {world * rows} rows)"
    return config, text


def _why_not(plan: Plan) -> str:
    """Why nothing is looked for, and what `auto` stands for is taken; or ''."""
    if plan.config.system.canonical:
        return "as without it, since canonical sums are of micro-batches"
    return "" if plan.device.type in DEVICES else "as without it, since want of memory ends a process on the CPU"


def _look(at: Place, sizes: Sequence[int]) -> tuple[int, str]:
    """A size that fits, and where it comes from: the run that goes on, an earlier start, trials, or an estimate."""
    attempts = Attempts(at)
    search = Search(sizes, attempts, at.need, hardware.memory_bounds(at.plan.device), at.everyone)
    if isinstance(at.stepper.exchange, Sharded):
        if at.plan.auto_rows:
            return sizes[-1], "as the run was begun"
        rows = search.foreseen()
        return rows, f"by the estimate of {at.need(rows) / GIB:.1f} GiB alone: a model in shards is not tried"
    names = at.everyone.gather(hardware.device_name(at.plan.device))
    cards = ", ".join(f"{names.count(name)} x {name}" if len(names) > 1 else name for name in sorted(set(names)))
    deciding = _deciding(at, rows=sizes[-1], cards=sorted(set(names)))
    room = min(at.everyone.gather(search.room))
    known = None if at.plan.auto_rows else _of_such_room(measured.known(deciding), room)
    told = at.everyone.gather(known.get("rows") if known else at.plan.auto_rows and sizes[-1])
    trial = search.tried(told[0]) if told.count(told[0]) == len(told) and told[0] in sizes else None
    if trial is not None:
        why = f"largest that fits {cards}, measured {known['day']}" if known else "as the run was begun"
    else:
        why, trial = f"largest that fits {cards}, measured now", search.largest()
        if trial and not at.plan.auto_rows:
            measured.keep(deciding, {"rows": trial.rows, "peak_bytes": trial.peak, "room_bytes": room})
    attempts.end(trial.rows if trial else 1)
    if trial is None:  # the step will fail, and say what would help
        return 1, f"not even that fits {cards}"
    return trial.rows, f"{why}, peak {trial.peak / GIB:.1f} of {trial.card / GIB:.1f} GiB"


def _of_such_room(found: measured.Entry | None, room: int) -> measured.Entry | None:
    """What was found before, unless there is more room now. If there is less, the trial of it will tell."""
    then = found.get("room_bytes") if found else None
    return found if isinstance(then, int) and room <= MORE * then else None


class Attempts:
    """Steps that change nothing, of one size after the other."""

    def __init__(self, at: Place) -> None:
        self.at = at
        self._last = 0  # rows that the compiler knows

    def __call__(self, rows: int) -> int | None:
        """Bytes at the peak; None: there were not so many."""
        self.end(rows)
        device, batches = self.at.plan.device, self.at.batches(rows)[:TRIED]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            self.at.stepper.rehearse_alone(batches)
        except Exception as error:
            if not is_shortage(error) and not (
                error.__cause__ and is_shortage(error.__cause__)
            ):  # as a compiler has it
                raise
            return None
        finally:
            self._last = rows
        peak = hardware.peak_memory_bytes(device)
        length = self.at.plan.config.training.context_length
        full = sum(batch.tokens for batch in batches) >= sum(batch.rows for batch in batches) * length
        return peak if full else max(peak, self.at.need(rows))  # later rows may be longer than these

    def end(self, rows: int) -> None:
        """Before another size, or the run itself: what was compiled for others would be made to fit all of them.

        A run with the same numbers that was not looked for must find the same kernels.
        """
        if self.at.built.compiled and self._last not in (0, rows):
            torch.compiler.reset()
        if self.at.plan.device.type == "cuda":
            hardware.let_go(self.at.plan.device)


def _deciding(at: Place, *, rows: int, cards: Sequence[str]) -> dict[str, Any]:
    """All that decides how much fits."""
    config, tree = at.plan.config, to_dict(at.plan.config)
    of_training = ("context_length", "precision", "optimizer_states")
    return {
        "what": "micro-batch",
        "cards": list(cards),
        "card_bytes": hardware.memory_bounds(at.plan.device).limit,
        "rows": rows,
        "shape": at.plan.shape.to_hf(),
        "model": tree["model"],
        "objective": tree["objective"],
        "documents": config.data.documents,
        "training": {name: tree["training"][name] for name in of_training},
        "checkpointing": config.system.gradient_checkpointing,
        "deterministic": config.system.deterministic,
        "exchanged": at.stepper.council.group.world > 1,
        "attention": at.built.attention,
        "compiled": at.built.compiled,
        "versions": at.about["versions"],
    }
