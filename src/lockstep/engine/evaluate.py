"""Validation: the same batches every time, sums divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.contracts import Batch
from lockstep.engine.step import Stepper


@torch.no_grad()
def evaluate(stepper: Stepper, batches: Sequence[Batch]) -> Mapping[str, float]:
    """Each measure of the objective over all batches of all ranks.

    The sum of each batch is put in its place in one table, and the table is added up in the order of the batches: the
    bits are those of one process. A batch of no rows is there so that all ranks run the model equally often.
    """
    group = stepper.council.group
    totals: dict[str, torch.Tensor] = {}
    stepper.model.eval()
    try:
        for index, batch in enumerate(batches):
            stepper.link.enter("evaluate")
            with stepper.precision.context():
                sums = stepper.objective.evaluate(stepper.model, batch.to(stepper.device))
            for name, part in sums.items():
                table = totals.setdefault(
                    name, torch.zeros(2, len(batches), group.world, dtype=torch.float64, device=stepper.device)
                )
                if batch.rows:
                    table[0, index, group.rank] = part.total.double()
                    table[1, index, group.rank] = part.weight
    finally:
        stepper.model.train()
    if group.world > 1:
        stepper.link.enter("communication")
    for table in totals.values():
        group.sum_(table)
    return {name: _ratio(*table.cpu().flatten(1)) for name, table in totals.items()}


def _ratio(sums: torch.Tensor, weights: torch.Tensor) -> float:
    return sum(sums.tolist()) / max(1.0, sum(weights.tolist()))
