"""After a step that was not finite: the same step once more, to find where it began. Nothing is updated.

The weights before the step are still there (step.py), its batches were kept, its noise is keyed by position. What does
not happen again was no matter of mathematics: a flipped bit, a kernel that races. All ranks take part.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lockstep.contracts import Batch, StepRecord
from lockstep.data.order import Order
from lockstep.engine.parts import Parts
from lockstep.engine.step import Reading, Stepper
from lockstep.health.finding import Finding, Place, Table, bad_tables, kind_of
from lockstep.health.locate import Subject, locate
from lockstep.models.attention import plainly
from lockstep.runtime import env
from lockstep.runtime.parallel import Sharded

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHOWN_CHARACTERS = 200  # of the text of a row
MOST_ROWS = 64  # whose text is kept


@dataclass(frozen=True)
class BadStep:
    """A step that was not finite, with what it was given."""

    record: StepRecord
    reading: Reading
    batches: Sequence[Batch]
    weights: Mapping[str, int]  # of the global batch
    first_place: int = -1  # of its first micro-batch in the global batch; -1: as this rank has it

    @property
    def step(self) -> int:
        return self.record.step


@dataclass(frozen=True)
class Again:
    """What one rank sees when the step is run once more."""

    loss: float
    norm: float
    gradients: tuple[Table, ...]
    weights: tuple[Table, ...]
    inputs: tuple[Table, ...]
    place: Place | None = None

    @property
    def fine(self) -> bool:
        bad = bool(self.gradients or self.weights or self.inputs)
        return not bad and math.isfinite(self.loss) and math.isfinite(self.norm)


def examine(parts: Parts, bad: BadStep) -> Finding:
    """Run the step again and say what is known. All ranks call it, and agree on whose fault it is."""
    parts.link.enter("forward", bad.step)
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()  # without the compiler a pass takes more room
    stepper, group, reading = parts.stepper, parts.council.group, bad.reading
    of_gradient = math.isfinite(reading.loss) and not math.isfinite(reading.grad_norm)
    own = math.isfinite(reading.own_loss) and (math.isfinite(reading.own_gradient) or not of_gradient)
    sharded = isinstance(stepper.exchange, Sharded)
    lost: tuple[str, ...] = ()
    with scale_of(stepper, reading.loss_scale):
        again = run_again(stepper, bad)
        given = bool(again.weights or again.inputs)
        said = group.gather({"first": own, "fine": again.fine, "loss": math.isfinite(again.loss), "given": given})
        reproduced = not all(each["fine"] for each in said)
        place = given_place(again)
        if reproduced and not any(each["given"] for each in said) and (sharded or not again.fine):
            place, lost = _searched(stepper, bad, again)
    found = group.gather(place is not None)
    ranks = _guilty(said, found, sharded=sharded, reproduced=reproduced)
    known = _known(parts, bad).replace(kind=_kind(reading, again, place), reproduced=reproduced, place=place)
    found_here = known.replace(gradients=again.gradients, weights=again.weights, inputs=again.inputs)
    notes = (*lost, *_notes(bad, again, place, ids=known.row_ids))
    return found_here.replace(notes=notes, **({} if group.world == 1 else {"ranks": ranks}))


def without_looking(parts: Parts, bad: BadStep, why: str) -> Finding:
    """What is known of a step that could not be run again: the report must not depend on it."""
    return _known(parts, bad).replace(notes=(f"the step could not be run again: {why}",))


def _known(parts: Parts, bad: BadStep) -> Finding:
    """What needs no second look. Of replicas each is a group of its own."""
    group, place, reading = parts.council.group, env.detect(), bad.reading
    rank = group.rank if group.world > 1 else place.rank
    return Finding(
        kind=_read_kind(reading),
        step=bad.step,
        loss=reading.loss,
        grad_norm=reading.grad_norm,
        rank=rank,
        gpu=place.tag,
        ranks=(rank,),
        reproduced=True,
        row_ids=_or_nothing(lambda: row_ids(parts, bad.step)),
        texts=_or_nothing(lambda: texts(parts, bad.batches)),
        history=tuple(parts.history),
    )


def _searched(stepper: Stepper, bad: BadStep, again: Again) -> tuple[Place | None, tuple[str, ...]]:
    """Where it begins, or why that cannot be said. A model in shards is searched by all ranks or by none."""
    try:
        return find_place(stepper, bad, again), ()
    except Exception as failure:
        if isinstance(stepper.exchange, Sharded):
            raise
        return None, (f"the place could not be found: {type(failure).__name__}: {str(failure)[:120]}",)


def run_again(stepper: Stepper, bad: BadStep) -> Again:
    """The step as it ran, faults included, on this rank."""
    weights = bad_tables(stepper.model.named_parameters())
    inputs = bad_tables(named_inputs(bad.batches))
    loss = stepper.again(bad.step, bad.batches, bad.weights, first_place=bad.first_place)
    gradients = [(name, item.grad) for name, item in stepper.model.named_parameters() if item.grad is not None]
    norm = 0.0 if isinstance(stepper.exchange, Sharded) else own_norm(stepper)
    return Again(loss.item(), norm, bad_tables(gradients), weights, inputs)


def own_norm(stepper: Stepper) -> float:
    """Of this rank's gradients: it may overflow where none of them does."""
    from lockstep.runtime.reduce import total_norm

    return total_norm(stepper.parameters).item()


def find_place(stepper: Stepper, bad: BadStep, again: Again) -> Place | None:
    """Where it begins on this rank: in a weight, in what it is given, or where the model makes it."""
    if place := given_place(again):
        return place
    sharded = isinstance(stepper.exchange, Sharded)
    subject = Subject(
        stepper.model,
        lambda: stepper.again(bad.step, bad.batches, bad.weights, first_place=bad.first_place),
        inputs=named_inputs(bad.batches),
        sharded=sharded,
        plainly=plainly,
        beat=lambda: stepper.link.enter("forward"),
    )
    return locate(subject)


def given_place(again: Again) -> Place | None:
    """What was bad before the step began. Of a model in shards only who holds the part knows it."""
    for phase, tables in (("weights", again.weights), ("input", again.inputs)):
        if tables:
            name = tables[0].name
            return Place(phase, name.rpartition(".")[0] or name, tensors=tables[:1])
    return None


def named_inputs(batches: Sequence[Batch]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of all micro-batches."""
    return [
        (f"batch {place} {name}", tensor)
        for place, batch in enumerate(batches)
        for name, tensor in batch.tensors.items()
        if tensor.is_floating_point()
    ]


def row_ids(parts: Parts, step: int) -> tuple[int, ...]:
    """Which rows of the table this rank had in a step."""
    group, options = parts.council.group, parts.config.training
    rows = options.batch_size * options.grad_accum_nums
    order = Order(parts.table.rows, parts.config.system.seed)
    return tuple(order.at(step * parts.batch_rows + group.rank * rows, rows)[0].tolist())


def texts(parts: Parts, batches: Sequence[Batch]) -> tuple[str, ...]:
    """What the rows say, as far as they are tokens."""
    if parts.words is None:
        return ()
    rows: list[list[int]] = []
    for batch in batches:
        tokens = batch.tensors.get("tokens", batch.tensors.get("inputs"))
        if tokens is not None and tokens.ndim == 2:
            rows += tokens.tolist()
    size = parts.words.vocab_size
    said = (parts.words.decode([each for each in row if 0 <= each < size]) for row in rows[:MOST_ROWS])
    return tuple(text[:SHOWN_CHARACTERS] for text in said)


@contextlib.contextmanager
def scale_of(stepper: Stepper, scale: float) -> Iterator[None]:
    """The loss scale the step had; it may have moved on."""
    scaler = stepper.precision.scaler
    if scaler is None:
        yield
        return
    before = scaler.state_dict()
    scaler.scale.fill_(scale)
    try:
        yield
    finally:
        scaler.load_state_dict(before)


def _guilty(
    said: Sequence[Mapping[str, Any]], found: Sequence[bool], *, sharded: bool, reproduced: bool
) -> tuple[int, ...]:
    """The ranks that had it before any exchange. Of a model in shards gradients are of all: who has a place, has it."""
    count = range(len(said))
    if not reproduced:
        return tuple(rank for rank in count if not said[rank]["first"])
    if given := tuple(rank for rank in count if said[rank]["given"]):
        return given
    lost = tuple(rank for rank in count if not said[rank]["loss"])
    bad = lost or tuple(rank for rank in count if not said[rank]["fine"])
    placed = tuple(rank for rank in count if found[rank])
    return lost or placed or bad if sharded else bad


def _kind(reading: Reading, again: Again, place: Place | None) -> str:
    if _read_kind(reading) == "overflow":
        return "overflow"
    for name, tables in (("weight", again.weights), ("input", again.inputs)):
        if tables:
            return f"nan_{name}" if any(table.nans for table in tables) else f"inf_{name}"
    if place and place.phase in ("weights", "input") and place.tensors:
        name = "weight" if place.phase == "weights" else "input"
        return f"nan_{name}" if place.tensors[0].nans else f"inf_{name}"
    return _read_kind(reading)


def _read_kind(reading: Reading) -> str:
    """What the numbers of the step say by themselves."""
    if reading.overflow and not reading.fatal:
        return "overflow"
    if math.isfinite(reading.loss) and math.isfinite(reading.grad_norm):  # only the look at the weights was bad
        return "nan_weight"
    return kind_of(reading.loss, reading.grad_norm)


def _notes(bad: BadStep, again: Again, place: Place | None, *, ids: Sequence[int]) -> tuple[str, ...]:
    notes: list[str] = []
    if place and place.phase in ("forward", "backward") and place.batch >= 0 and len(bad.batches) > 1:
        begin = sum(batch.rows for batch in bad.batches[: place.batch])
        own = ", ".join(map(str, ids[begin : begin + bad.batches[place.batch].rows]))
        notes.append(f"micro-batch {place.batch} of {len(bad.batches)}{f': rows {own}' if own else ''}")
    if not again.gradients and math.isfinite(again.loss) and not math.isfinite(again.norm):
        notes.append("every gradient is finite, their norm is not: it is too large for fp32")
    return tuple(notes)


def _or_nothing(action: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
    """What is good to know, and no reason to know nothing else."""
    try:
        return action()
    except Exception as failure:
        logger.debug("Not to be had: %s", failure)
        return ()
