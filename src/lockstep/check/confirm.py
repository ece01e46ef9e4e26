"""What is run again after a first judgement, and on which card: pure. A suspect is run again where it differed, and a
card that agreed runs the same, with the tensor kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.check.outcome import CardVerdict, Judgement, Status
from lockstep.check.records import Card

MOST_SUSPECTS = 4  # that are run again: beyond that it is not one card that is ill


@dataclass(frozen=True)
class Order:
    """One card does one workload again up to a step; the tensor's bytes are kept."""

    card: Card
    workload: str
    step: int
    tensor: str = ""  # "": none is kept
    whole: bool = False  # on to the end: of two cards that differ, the one that is right has nobody else to agree with

    def __str__(self) -> str:
        return self.workload if self.whole else f"{self.workload} to step {self.step}"


def orders(judgement: Judgement) -> list[Order]:
    """Each suspect again, and beside it a card that agreed with the others, of the same machine where there is one."""
    found: list[Order] = []
    suspects = [verdict for verdict in judgement.verdicts if verdict.difference is not None]
    for verdict in suspects[:MOST_SUSPECTS]:
        found.append(_order(verdict, verdict.card))
        healthy = _healthy(judgement, verdict)
        if healthy is not None:
            found.append(_order(verdict, healthy))
    return list(dict.fromkeys(found))


def waves(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """The orders, so many at once that no card has two."""
    waiting = list(orders)
    while waiting:
        wave: list[Order] = []
        for order in waiting:
            if all((order.card.node, order.card.index) != (other.card.node, other.card.index) for other in wave):
                wave.append(order)
        waiting = [order for order in waiting if order not in wave]
        yield wave


def _healthy(judgement: Judgement, suspect: CardVerdict) -> Card | None:
    """A card that passed: of the same machine and model before others."""
    passed = [verdict.card for verdict in judgement.verdicts if verdict.status is Status.PASS]
    kin = [card for card in passed if (card.model, card.driver) == (suspect.card.model, suspect.card.driver)]
    return min(kin, key=lambda card: card.node != suspect.card.node, default=None)


def _order(verdict: CardVerdict, card: Card) -> Order:
    difference = verdict.difference
    assert difference is not None
    tensor = difference.tensor if ":" in difference.tensor else ""
    return Order(card, difference.workload, difference.step, tensor, whole=verdict.status is Status.UNDECIDED)
