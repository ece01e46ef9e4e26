"""Who was given which row, and what would be wrong with that: the one check that good and bad loaders go through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.contracts import Batch


@dataclass(frozen=True, order=True)
class Seen:
    """One row that a rank was given."""

    position: int  # over the whole run: step * rows of a global batch + slot
    rank: int
    epoch: int
    row: int


def seen_in(steps: Iterable[tuple[int, list[Batch]]], *, rank: int, batch_rows: int) -> list[Seen]:
    """From batches that show their slots, epochs and row ids."""
    return [
        Seen(step * batch_rows + slot, rank, epoch, row)
        for step, batches in steps
        for batch in batches
        for slot, epoch, row in zip(*(batch.tensors[name].tolist() for name in ("slots", "epochs", "ids")), strict=True)
    ]


def faults(seen: Iterable[Seen], *, rows: int, epochs: int) -> set[str]:
    """What is wrong, in a few words; the first `epochs` epochs must be complete, more may have begun."""
    ordered = sorted(seen)
    found: set[str] = set()
    if [entry.position for entry in ordered] != list(range(len(ordered))):
        found.add("positions left out or dealt twice")
    orders: dict[int, list[int]] = {}
    for entry in ordered:
        orders.setdefault(entry.epoch, []).append(entry.row)
    for epoch, order in orders.items():
        if max(Counter(order).values()) > 1:
            found.add("a row twice in an epoch")
        if epoch < epochs and set(order) != set(range(rows)):
            found.add("a row never seen in an epoch")
    if len(orders) < epochs:
        found.add("an epoch that never came")
    whole = [tuple(orders[epoch]) for epoch in range(min(epochs, len(orders)))]
    if len(set(whole)) < len(whole):
        found.add("two epochs in the same order")
    owners: dict[tuple[int, int], set[int]] = {}
    for entry in ordered:
        owners.setdefault((entry.epoch, entry.row), set()).add(entry.rank)
    if any(len(ranks) > 1 for ranks in owners.values()):
        found.add("a row on two ranks in an epoch")
    return found
