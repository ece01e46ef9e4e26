"""Validation: the same batches every time, sums divided once."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.contracts import Batch, Objective
from lockstep.engine.council import Council
from lockstep.engine.step import Stepper
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.precision import Precision


@dataclass
class Judge:
    """What validation needs of a stepper, for a model that is not being trained."""

    model: nn.Module
    objective: Objective
    precision: Precision
    link: Marks = field(default_factory=NoMarks)

    def __post_init__(self) -> None:
        self.device = self.precision.device
        self.council = Council(self.objective.terms)


@torch.no_grad()
def evaluate(stepper: Stepper | Judge, batches: Sequence[Batch]) -> Mapping[str, float]:
    """Each measure of the objective over all batches of all ranks.

    The sum of each batch is put in its place in one table, and the table is added up in the order of the batches: the
    bits are those of one process. A batch of no rows is there so that all ranks run the model equally often. What there
    was nothing of has no measure; the loss is then NaN.
    """
    group = stepper.council.group
    totals: dict[str, torch.Tensor] = {}
    stepper.model.eval()
    try:
        for index, batch in enumerate(batches):
            stepper.link.enter("evaluate")
            with stepper.precision.context(), _compiled_as_it_is() if batch.is_short else nullcontext():
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
    found = {name: _ratio(*table.cpu().flatten(1)) for name, table in totals.items()}
    return {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}


def _compiled_as_it_is() -> AbstractContextManager[Any]:
    """For its own number of rows.

    At a second number the compiler makes one graph for all of them, which would take the other batches too from then
    on. It computes other bits than the first validation of a process, and so than that after a resume.
    """
    if "torch._dynamo" not in sys.modules:  # it takes seconds to load, and nothing is compiled
        return nullcontext()
    import torch._dynamo.config as dynamo

    known: Any = dynamo
    return known.patch(automatic_dynamic_shapes=False)


def _ratio(sums: torch.Tensor, weights: torch.Tensor) -> float:
    """NaN where there was nothing to measure: 0 would be the best of all losses."""
    weight = sum(weights.tolist())
    return sum(sums.tolist()) / weight if weight else math.nan
