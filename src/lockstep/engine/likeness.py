"""Two checkpoints side by side: which tensors have other bits, how many elements, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.checkpoint import State, load

AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers of these bytes, as bits
KINDS = ("weights", "moments")
COUNTS = (  # of the host: what decides the steps to come. The losses of epochs are results
    "step", "tokens", "skipped", "overflow_run", "smoothed_loss", "best_loss", "stale_steps", "epoch_loss",
    "epoch_targets",
)  # fmt: skip


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that is not the same on both sides."""

    kind: str  # weights or moments
    name: str
    elements: int  # of the tensor; 0: it has another shape or type, or is on one side only
    differing: int
    place: int = 0  # flat, of the first element that differs
    values: tuple[str, str] = ("", "")  # there

    def text(self) -> str:
        if not self.elements:
            return f"{self.kind} {self.name}: {self.values[0]} | {self.values[1]}"
        one, other = self.values
        return (
            f"{self.kind} {self.name}, {self.differing:,} of {self.elements:,} elements, "
            f"the first at {self.place:,}: {one} | {other}"
        )


@dataclass(frozen=True)
class Likeness:
    """What two checkpoints have in common: empty differences mean the same bits."""

    tensors: int
    differing: tuple[TensorDifference, ...]
    counts: tuple[tuple[str, Any, Any], ...] = ()  # (name, one, other) that differ, of the host's state

    @property
    def equal(self) -> bool:
        return not (self.differing or self.counts)

    def text(self) -> str:
        said: list[str] = []
        if self.differing:
            said.append(f"{len(self.differing)} of {self.tensors} tensors differ, first {self.differing[0].text()}")
        said += [f"{name}: {one} | {other}" for name, one, other in self.counts]
        return "; ".join(said) or f"{self.tensors} tensors equal"


def compare(one: Path, other: Path) -> Likeness:
    """Two checkpoint folders, after every byte of both was checked. In pieces or whole makes no difference."""
    left, right = load(one), load(other)
    differing: list[TensorDifference] = []
    tensors = 0
    for kind, ours, theirs in zip(KINDS, (left.model, left.optimizer), (right.model, right.optimizer), strict=True):
        names = [*ours, *(name for name in theirs if name not in ours)]
        tensors += len(names)
        differing += _differing(kind, names, ours, theirs)
    return Likeness(tensors, tuple(differing), tuple(_counts(left, right)))


def _differing(
    kind: str, names: list[str], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Iterator[TensorDifference]:
    for name in names:
        one, other = (each.get(name) for each in (ours, theirs))
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            yield TensorDifference(kind, name, 0, 0, values=(_form(one), _form(other)))
            continue
        unequal = (_bits(one) != _bits(other)).nonzero()
        if len(unequal):
            place = int(unequal[0])
            values = (_exact(one.flatten()[place]), _exact(other.flatten()[place]))
            yield TensorDifference(kind, name, one.numel(), len(unequal), place, values)


def _bits(tensor: Tensor) -> Tensor:
    """The elements as whole numbers: NaN is equal to itself, and 0 is not -0."""
    return tensor.contiguous().flatten().view(AS_WHOLE[tensor.element_size()])


def _exact(element: Tensor) -> str:
    return float(element).hex() if element.is_floating_point() else str(element.item())


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _counts(left: State, right: State) -> Iterator[tuple[str, Any, Any]]:
    """Of the counters and the loss scale."""
    one, other = ({"loss_scale": state.run.get("loss_scale"), **_progress(state)} for state in (left, right))
    for name in ("loss_scale", *COUNTS):
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)


def _progress(state: State) -> Mapping[str, Any]:
    """What a state says of it, whoever wrote it."""
    told = state.run.get("progress")
    return told if isinstance(told, dict) else {}
