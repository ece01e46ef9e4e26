"""What a replica writes down and what the judges read: torch-free, one JSON object a line, each with its own checksum.

A replica is one process on one card. It runs workloads; of each it tells the names of the tensors it looked at, then
one stamp a step: loss and gradient norm as exact hex, and the digest of every gradient, weight and moment. A line whose
checksum does not fit was damaged on its way: that blames nobody.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.health.records import DIGITS, Stamp, chain_of, read_lines

CHAIN = -1  # in `damaged`: no line of the record, but its sums are not those the card has added up


@dataclass(frozen=True)
class Card:
    """What is checked: a GPU, or a CPU worker that stands for one. `slot`: which process of this machine drives it."""

    index: int  # as nvidia-smi numbers it; the label of a CPU worker
    slot: int
    node: int = 0
    host: str = ""
    uuid: str = ""
    serial: str = ""
    model: str = ""
    driver: str = ""

    @property
    def name(self) -> str:
        """What the report calls it on one machine."""
        return f"GPU {self.index}" if self.uuid else f"worker {self.index}"


@dataclass(frozen=True)
class Workload:
    """Something every replica does alike. Training: a preset, with settings on top, for so many steps."""

    name: str  # "production", "attention", "mlm", ...
    kind: str = "train"  # train, memory, attention_probe, fp8_probe: a function in replica.py or probes.py
    family: str = "llama"
    preset: str = "tiny"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # dotted keys, as on the command line
    steps: int = 20
    warmup_steps: int = 3  # not judged by their time
    batches: int = 4  # kept in memory, used in turn
    pulse_seconds: float = 0.0  # > 0: as long busy, as long idle
    interval: int = 1  # steps between fingerprints
    pattern_bytes: int = 0  # of a memory workload


@dataclass(frozen=True)
class Work:
    """A workload on one card. `tensors`: "gradients:NAME", "weights:NAME", "moments:exp_avg.NAME", as a step goes."""

    workload: str
    tensors: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # kernels, bytes touched
    damaged: tuple[int, ...] = ()  # lines whose checksum does not fit; CHAIN: the sums of all do not
    error: str = ""  # why it ended early
    complete: bool = False
    chain: str = ""  # all sums of all steps, as the card itself has added them up; "": it did not


@dataclass(frozen=True)
class Replica:
    """All that one process has to say."""

    card: Card
    works: tuple[Work, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    before: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the card: clocks, temperature, ECC, ...
    after: Mapping[str, Any] = field(default_factory=dict[str, Any])
    samples: tuple[Mapping[str, Any], ...] = ()  # in between: time, temperature, power, clocks
    exit_code: int | None = None
    error: str = ""  # how the process died, if it did

    def work(self, workload: str) -> Work | None:
        return next((work for work in self.works if work.workload == workload), None)


def read(path: Path, card: Card, **about: Any) -> Replica:
    """The record of a replica, as far as it goes."""
    works: list[Work] = []
    versions: dict[str, str] = {}
    number = 0
    try:
        for number, content in read_lines(path):
            try:
                _add(content, works, versions)
            except (AttributeError, KeyError, TypeError, ValueError):  # whole, but not what a replica writes
                _damage(works, number)
    except OSError:
        _damage(works, number)
    return Replica(card=card, works=tuple(works), versions=versions, **about)


def _add(content: dict[str, Any] | None, works: list[Work], versions: dict[str, str]) -> None:
    """What one line tells; None: its checksum does not fit."""
    if content is None:
        raise ValueError
    kind = content.pop("kind")
    if kind == "workload":
        works.append(_work(**content))
    elif kind == "step" and works:
        works[-1] = dataclasses.replace(works[-1], stamps=(*works[-1].stamps, _stamp(**content)))
    elif kind == "done" and works:
        works[-1] = _ended(works[-1], **content)
    elif kind == "about":
        versions |= {str(name): str(told) for name, told in content["versions"].items()}


def _damage(works: list[Work], number: int) -> None:
    """Of the workload at hand; before the first one nobody knows of which."""
    last = works.pop() if works else Work("?")
    works.append(dataclasses.replace(last, damaged=(*last.damaged, number)))


def _stamp(*, step: int, loss: str = "", norm: str = "", sums: str = "", seconds: float = 0.0) -> Stamp:
    """With a look at each value: whoever compares must not stumble over one that makes no sense."""
    for value in filter(None, (loss, norm)):
        float.fromhex(value)
    if len(bytes.fromhex(sums)) * 2 % DIGITS:
        raise ValueError("a digest is cut short")
    return Stamp(operator.index(step), loss, norm, sums, float(seconds))


def _ended(work: Work, *, facts: Mapping[str, Any] | None = None, error: str = "", chain: str = "") -> Work:
    """With what the card itself has added up held against what is on record: lines can be whole and wrong."""
    told = dict(work.facts if facts is None else facts)
    ended = dataclasses.replace(work, facts=told, error=str(error), chain=chain, complete=not error)
    if not chain or chain == chain_of(work.stamps):
        return ended
    return dataclasses.replace(ended, damaged=(*work.damaged, CHAIN))


def _work(
    *,
    workload: str,
    tensors: Sequence[str] = (),
    shapes: Sequence[Sequence[int]] = (),
    dtypes: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> Work:
    sizes = tuple(tuple(map(operator.index, shape)) for shape in shapes)
    return Work(str(workload), tuple(map(str, tensors)), sizes, tuple(map(str, dtypes)), facts=dict(facts or {}))
