"""Validation: the same batches every time, sums divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lockstep.contracts import Batch
from lockstep.engine.step import Stepper


@torch.no_grad()
def evaluate(stepper: Stepper, batches: Sequence[Batch]) -> Mapping[str, float]:
    """Each measure of the objective over all batches."""
    totals: dict[str, torch.Tensor] = {}
    weights: dict[str, int] = {}
    stepper.model.eval()
    try:
        for batch in batches:
            with stepper.precision.context():
                sums = stepper.objective.evaluate(stepper.model, batch.to(stepper.device))
            for name, part in sums.items():
                totals[name] = totals.get(name, 0) + part.total.double()
                weights[name] = weights.get(name, 0) + part.weight
    finally:
        stepper.model.train()
    return {name: (total / max(1, weights[name])).item() for name, total in totals.items()}
