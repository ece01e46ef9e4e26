"""What is run again after a first judgement, and on which card: pure. A suspect is run again where it differed, and a
card that agreed runs the same, with the tensor kept; then the two exchange their slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.check.outcome import CardVerdict, Judgement, Status
from lockstep.check.records import Card

MOST_SUSPECTS = 4  # that are run again: beyond that it is not one card that is ill


@dataclass(frozen=True)
class Order:
    """One card, driven by one slot, does one workload again up to a step; the tensor's bytes are kept."""

    card: Card
    workload: str
    step: int
    tensor: str = ""  # "": none is kept
    whole: bool = False  # on to the end: of two cards that differ, the one that is right has nobody else to agree with

    def __str__(self) -> str:
        return self.workload if self.whole else f"{self.workload} to step {self.step}"


def first_orders(judgement: Judgement) -> list[Order]:
    """Each suspect again, and beside it a card that agreed with the others, of the same machine where there is one."""
    orders: list[Order] = []
    for verdict in _suspects(judgement):
        orders.append(_order(verdict, verdict.card))
        healthy = _healthy(judgement, verdict)
        if healthy is not None:
            orders.append(_order(verdict, healthy))
    return list(dict.fromkeys(orders))


def swap_orders(judgement: Judgement) -> list[Order]:
    """The suspect driven by the slot of a healthy card, and that card by the suspect's: is it the GPU or the slot?

    Only where the fault came again, and on one machine: nothing is told by a fault that stays away.
    """
    orders: list[Order] = []
    for verdict in _suspects(judgement):
        healthy = _healthy(judgement, verdict)
        again = verdict.difference is not None and verdict.difference.nature in ("persistent", "intermittent")
        if verdict.status is not Status.FAIL or not again or healthy is None or healthy.node != verdict.card.node:
            continue
        if healthy.index == verdict.card.index:  # two slots of one card: there is no other card to be had
            continue
        orders.append(_order(verdict, dataclasses.replace(verdict.card, slot=healthy.slot), kept=False))
        orders.append(_order(verdict, dataclasses.replace(healthy, slot=verdict.card.slot), kept=False))
    return orders


def waves(orders: Sequence[Order]) -> Iterator[list[Order]]:
    """The orders, so many at once that no card and no slot has two."""
    waiting = list(orders)
    while waiting:
        wave: list[Order] = []
        for order in waiting:
            if all(not _same_place(order.card, other.card) for other in wave):
                wave.append(order)
        waiting = [order for order in waiting if order not in wave]
        yield wave


def _same_place(one: Card, other: Card) -> bool:
    return one.node == other.node and (one.index == other.index or one.slot == other.slot)


def _suspects(judgement: Judgement) -> list[CardVerdict]:
    return [verdict for verdict in judgement.verdicts if verdict.difference is not None][:MOST_SUSPECTS]


def _healthy(judgement: Judgement, suspect: CardVerdict) -> Card | None:
    """A card that passed: of the same machine and model before others."""
    passed = [verdict.card for verdict in judgement.verdicts if verdict.status is Status.PASS]
    kin = [card for card in passed if (card.model, card.driver) == (suspect.card.model, suspect.card.driver)]
    return min(kin, key=lambda card: card.node != suspect.card.node, default=None)


def _order(verdict: CardVerdict, card: Card, *, kept: bool = True) -> Order:
    difference = verdict.difference
    assert difference is not None
    tensor = difference.tensor if kept and ":" in difference.tensor else ""
    return Order(card, difference.workload, difference.step, tensor, whole=verdict.status is Status.UNDECIDED)
