"""What is known of a number that is not finite: where it began, which tensors show it, and in which words to say so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from lockstep.runtime.parallel import local

SHOWN_VALUES = 5
CHUNK_ELEMENTS = 1 << 24
PHASES = ("input", "weights", "forward", "loss", "backward")  # in the order in which a step could meet it


@dataclass(frozen=True)
class Table:
    """A tensor in a few numbers. Minimum and maximum are of its finite values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    nans: int
    infs: int
    minimum: float | None
    maximum: float | None
    values: tuple[str, ...]  # the first ones

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Table:
        """Waits for the device. Of a tensor in shards: the part that lies here."""
        part = local(tensor.detach())
        flat, real = part.reshape(-1), part.is_floating_point()
        nans = infs = 0
        lowest, highest = math.inf, -math.inf
        for chunk in flat.split(CHUNK_ELEMENTS):  # a card that is full has no room for a copy
            if real:
                chunk = chunk.float() if chunk.element_size() == 1 else chunk  # float8 has no arithmetic of its own
                nans += int(torch.isnan(chunk).sum())
                infs += int(torch.isinf(chunk).sum())
            finite = chunk[torch.isfinite(chunk)] if real else chunk
            if finite.numel():
                lowest, highest = min(lowest, finite.min().item()), max(highest, finite.max().item())
        known = lowest <= highest
        return Table(
            name=name,
            shape=tuple(part.shape),
            dtype=str(part.dtype).removeprefix("torch."),
            elements=flat.numel(),
            nans=nans,
            infs=infs,
            minimum=lowest if known else None,
            maximum=highest if known else None,
            values=tuple(as_word(value) for value in flat[:SHOWN_VALUES].tolist()),
        )

    @property
    def bad(self) -> int:
        return self.nans + self.infs


def as_word(value: float) -> str:
    """A value as the report shows it: NaN, Inf, -Inf, or four decimals."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


@torch.no_grad()
def bad_tables(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Table, ...]:
    """Of those tensors that are not finite. Asks the device once for all."""
    named = [(name, tensor) for name, tensor in tensors if local(tensor).is_floating_point() and local(tensor).numel()]
    if not named:
        return ()
    norms = [torch.linalg.vector_norm(local(tensor)).double() for _, tensor in named]  # no copy, and fast
    fine = torch.isfinite(torch.stack(norms)).tolist()
    doubtful = [entry for entry, good in zip(named, fine, strict=True) if not good]  # a norm may be too large by itself
    tables = (Table.of(name, tensor) for name, tensor in doubtful)
    return tuple(table for table in tables if table.bad)


@dataclass(frozen=True)
class Place:
    """Where the first bad number was made."""

    phase: str  # one of PHASES
    module: str  # "layers.1.mlp.w1"; "loss": after the model
    operation: str = ""  # "mm (aten.mm.default)"
    line: str = ""  # "models/layers.py:98: return self.w2(...)"
    block: str = ""  # the block that was bad with the kernels of training
    batch: int = -1  # which micro-batch of the rank
    eager: bool = True  # False: without the compiled kernels it does not happen
    tensors: tuple[Table, ...] = ()  # what went in and what came out

    def brief(self) -> str:
        """What an error says of it: "layers.1.mlp.w1 (forward, mm)"."""
        how = f", {self.operation.partition(' ')[0]}" if self.operation else ""
        only = "" if self.eager else " (only in the compiled block)"
        return f"{self.module or 'model'} ({self.phase}{how}){only}"

    def text(self) -> str:
        """In one line, with the operation's full name and its line in the source."""
        how = f", {self.operation}" if self.operation else ""
        where = f" at {self.line}" if self.line else ""
        only = "" if self.eager else " (only in the compiled block)"
        return f"{self.module or 'model'} ({self.phase}{how}){where}{only}"


@dataclass(frozen=True)
class Finding:
    """Everything that is known of one bad step on one rank."""

    kind: str  # nan_loss, inf_loss, nan_grad, inf_grad, nan_weight, inf_weight, nan_input, inf_input, overflow
    step: int
    loss: float
    grad_norm: float
    rank: int  # of this worker
    gpu: str
    ranks: tuple[int, ...]  # on which it was seen first
    reproduced: bool
    place: Place | None = None
    gradients: tuple[Table, ...] = ()  # those of this rank that are bad
    weights: tuple[Table, ...] = ()
    inputs: tuple[Table, ...] = ()
    row_ids: tuple[int, ...] = ()  # of this rank, in the table of training rows
    texts: tuple[str, ...] = ()  # what these rows say, where there is a tokenizer
    history: tuple[Mapping[str, float], ...] = ()  # the last steps: step, loss, grad_norm, lr, loss_scale
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def word(self) -> str:
        """NaN or Inf."""
        return "Inf" if self.kind.startswith("inf") or self.kind == "overflow" else "NaN"

    @property
    def guilty(self) -> bool:
        """Whether this rank is one that had it first."""
        return self.rank in self.ranks

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is no number in JSON is a word."""
        return _plain(dataclasses.asdict(self))


def from_json(saved: Mapping[str, Any]) -> Finding:
    """What `as_json` gave."""
    known = dict(saved)
    for key in ("loss", "grad_norm"):
        known[key] = float(known[key])
    for key in ("gradients", "weights", "inputs"):
        known[key] = tuple(_table(each) for each in known[key])
    if known["place"]:
        place = dict(known["place"])
        known["place"] = Place(**{**place, "tensors": tuple(_table(each) for each in place["tensors"])})
    tuples = {key: tuple(known[key]) for key in ("ranks", "row_ids", "texts", "notes")}
    history = tuple({name: float(value) for name, value in each.items()} for each in known["history"])
    return Finding(**{**known, **tuples, "history": history})


def _table(saved: Mapping[str, Any]) -> Table:
    return Table(**{**saved, "shape": tuple(saved["shape"]), "values": tuple(saved["values"])})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def kind_of(loss: float, grad_norm: float) -> str:
    """What the numbers of a step say; places may say more."""
    if not math.isfinite(loss):
        return "nan_loss" if math.isnan(loss) else "inf_loss"
    return "nan_grad" if math.isnan(grad_norm) else "inf_grad"
