"""The types that flow through lockstep. Read me first: every other module speaks in these words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    Array = np.ndarray[Any, Any]
    Document = str | Array  # text, or token ids that are ready

PROMPT = 1 << 31  # set in an id of a document: it belongs to the prompt, which is given and not learnt


class Draw(NamedTuple):
    """What a collate may draw randomness from; together with row id, epoch and slot nothing else is needed."""

    seed: int
    step: int  # optimizer step, from 0
    batch_rows: int  # rows of the global batch of this step
    steps: int = 0  # of the whole run; 0: of no run, as in validation
    whole: Mapping[str, Array] = MappingProxyType({})  # of all rows of the global batch: the objective's whole_columns


class Rows(NamedTuple):
    """Some rows of the table, as the order of rows asked for them."""

    ids: Array  # (n,) place in the table
    epochs: Array  # (n,) which pass over the table each row belongs to: a batch may straddle two
    slots: Array  # (n,) place in the global batch of this step
    columns: Mapping[str, Array]  # name -> (n, width)


@dataclass(frozen=True)
class Vocabulary:
    """What an objective may have to know about the ids of a tokenizer."""

    size: int
    specials: Mapping[str, int]  # pad, cls, sep, unk, mask: those the tokenizer has
    continues: Array  # (size,) bool: ids that go on with a word another id began
    separator: int = -1  # ends each document; -1: nothing does


class Batch(NamedTuple):
    """What the model sees, and the denominators of its loss, known before the forward pass."""

    tensors: Mapping[str, torch.Tensor]
    weights: Mapping[str, int]  # loss term -> how many targets this batch holds
    rows: int
    tokens: int
    is_short: bool = False  # of fewer rows than the others: the last of a validation

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copy overlaps with computing when the memory is pinned."""
        return self._replace(tensors={name: each.to(device, non_blocking=True) for name, each in self.tensors.items()})

    def pin(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._replace(tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Sum:
    """A total and what it is to be divided by, so that averages never depend on how work was cut."""

    total: torch.Tensor
    weight: int


class Objective(Protocol):
    """What is learnt: from rows to a loss. One file in objectives/."""

    columns: Mapping[str, str]  # what a cached row holds: column -> numpy dtype
    terms: Mapping[str, float]  # loss term -> coefficient

    # It may have `with_vocabulary(vocabulary) -> Objective`, called before any other method; `whole_columns`, found of
    # all rows in `draw.whole`; `watched`, told of each step: measure -> its term; `steady`: all batches look alike, but
    # for their weights; `steadied() -> Objective`: the same with batches that do.

    def pack(self, documents: Iterable[Array], *, context_length: int, separator: int) -> Iterator[Mapping[str, Array]]:
        """Token ids of documents to blocks of finished rows: column -> (n, width)."""
        ...

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        """Pure: all randomness comes from (seed, epoch, row id) or (seed, step, slot).

        Who draws nothing may also have `collate_many(columns, count)`: equal cuts of many rows, in the type they are
        stored in, as `count` batches.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """SUM per term, never divided; and of each watched measure."""
        ...

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, Sum]:
        """Sums to report; the engine adds them up over batches and ranks. Has a key `loss`."""
        ...

    def sample(self, model: nn.Module, prompt: list[int], options: SampleOptions) -> list[int]:
        """Token ids that continue (or fill) the prompt."""
        ...


@dataclass(frozen=True)
class SampleOptions:
    """How to draw from a model. Temperature 0 is greedy."""

    tokens: int = 64
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0
    stop: tuple[int, ...] = ()


class Source(Protocol):
    """Where documents come from. One file in sources/."""

    name: str

    def fingerprint(self) -> Mapping[str, Any]:
        """Everything that decides the content, as JSON: part of the cache key. Cheap."""
        ...

    def documents(self) -> Iterator[Document]:
        """The documents in a fixed order."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    separator: int  # put after each document

    def fingerprint(self) -> str:
        """Hash of everything that decides the ids."""
        ...

    def encode(self, texts: list[str]) -> list[Array]:
        """One array of ids per text, no special tokens added."""
        ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as every sink sees it."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    tokens: int
    memory_bytes: int = 0
    skipped: bool = False  # fp16 overflow: nothing was updated
    loss_scale: float = 1.0
    digest: str = ""  # of the parameters, when asked for
    eta_seconds: float = 0.0
    mfu: float | None = None  # model FLOP/s over the peak of the card; None where the peak is unknown
    measures: Mapping[str, float] = field(default_factory=dict[str, float])  # what the objective watches


class Sink(Protocol):
    """Where records go. One file in report/."""

    def write(self, record: StepRecord) -> None: ...

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Anything that is not a step: start, eval, save, resume, fault, end."""
        ...

    def close(self) -> None: ...


class Verdict(Enum):
    """What a judge of a step says."""

    CONTINUE = "continue"
    SKIP = "skip"
    HALT = "halt"
