"""The loss that random weights must have. A text model that begins elsewhere is broken before it learns anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch, Objective
from lockstep.models.shapes import Shape
from lockstep.runtime.group import Group

TOLERANCE = 0.1  # of the expected loss


def expected(config: RunConfig, shape: Shape, batches: Sequence[Batch], objective: Objective, group: Group) -> float:
    """ln V + d std²/2 for V ids; where tokens have weights, times the share that their sum is of the denominator."""
    std = config.model.head_init_std or config.model.init_std
    possible: int = getattr(objective, "possible_ids", shape.vocab_size)  # some ids may be forbidden
    return (shape.first_loss(std) + math.log(possible / shape.vocab_size)) * _weighted_share(batches, group)


def _weighted_share(batches: Sequence[Batch], group: Group) -> float:
    """The weights of the tokens of all ranks over what their sum is divided by; 1 where no token has its own."""
    if any("token_weights" not in batch.tensors for batch in batches):
        return 1.0
    total = math.fsum(float(batch.tensors["token_weights"].double().sum()) for batch in batches)
    sums = group.gather([total, sum(batch.weights["loss"] for batch in batches)])
    return math.fsum(each[0] for each in sums) / max(1, sum(each[1] for each in sums))
