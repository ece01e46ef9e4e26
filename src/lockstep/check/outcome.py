"""What a check says: of each card PASS, FAIL or UNDECIDED, why, and how sure one may be. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lockstep.check.records import Card, Replica, Workload


def labels(cards: Sequence[Card]) -> tuple[str, ...]:
    """What each is called in all that is said, in their order: "GPU 3", with its node where there are several, and
    with its slot where one card is driven by several processes. No two are equal."""
    several = len({card.node for card in cards}) > 1
    plain = [f"{card.host or f'node {card.node}'} {card.name}" if several else card.name for card in cards]
    counts = Counter(plain)
    named = [
        f"{name} (slot {card.slot})" if counts[name] > 1 else name for name, card in zip(plain, cards, strict=True)
    ]
    counts = Counter(named)  # two nodes of one host name
    return tuple(f"n{card.node} {name}" if counts[name] > 1 else name for name, card in zip(named, cards, strict=True))


class Status(StrEnum):
    """Of one card. UNDECIDED: something is wrong, and nobody can say whose fault it is."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Difference:
    """The first bits of a card that are not those of the others."""

    workload: str
    step: int
    tensor: str  # "gradients:layers.1.mlp.w1"; "loss" or "norm" where no tensor differs
    elements: int | None = None  # how many differ; None: nobody can say any more
    positions: tuple[tuple[int, ...], ...] = ()  # of the first ones
    right: tuple[str, ...] = ()  # their bits in hex, on the other cards
    wrong: tuple[str, ...] = ()  # and on this one
    nature: str = ""  # transient, persistent or intermittent, once it was run again


@dataclass(frozen=True)
class Pace:
    """How fast one card is in one workload, beside the group."""

    workload: str
    median_seconds: float
    p95_seconds: float
    ratio: float  # own median over the median of the group
    slow_ratio: float = 0.0  # how many times as long as the others when it was found slow; 0: it was not

    @property
    def slow(self) -> bool:
        return self.slow_ratio > 0


@dataclass(frozen=True)
class CardVerdict:
    """Of one card."""

    card: Card
    status: Status
    reasons: tuple[str, ...] = ()  # one short sentence each; of a PASS: none
    notes: tuple[str, ...] = ()  # worth knowing, and no reason to fail it
    difference: Difference | None = None
    paces: tuple[Pace, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """Of all cards together. `agreement`: workload -> label of the card -> one letter for each compared step.

    The letters are those of health/vote.py: `.` agrees, `x` differs, `?` no majority, `-` missing.
    """

    verdicts: tuple[CardVerdict, ...]
    agreement: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    @property
    def passed(self) -> bool:
        return all(verdict.status is Status.PASS for verdict in self.verdicts)


@dataclass(frozen=True)
class Checked:
    """A whole check, as the table, check.json and the page show it."""

    judgement: Judgement
    replicas: tuple[Replica, ...]
    workloads: tuple[Workload, ...]
    level: str  # quick, default or deep
    device: str  # cuda or cpu
    config_hash: str  # of everything that decides the bits: two sites may compare
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    golden: Mapping[str, Any] = field(default_factory=dict[str, Any])  # file, key, "used" | "written" | "no entry"
    covered: tuple[str, ...] = ()  # kernels that ran, minutes, peak temperature
    not_covered: tuple[str, ...] = ()  # in plain words
    began: float = 0.0
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        from lockstep.errors import ExitCode

        return ExitCode.DONE if self.judgement.passed else ExitCode.BAD_DEVICE
