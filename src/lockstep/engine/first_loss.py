"""What the loss of random weights must be, and how far chance may take it from there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch
from lockstep.models.shapes import Shape

TOLERANCE = 0.1
STANDARD_ERRORS = 4


def foreseen(config: RunConfig, shape: Shape, batches: Sequence[Batch]) -> tuple[float, float]:
    """(the loss to be expected of the first step, how much more or less is still chance)."""
    std = config.model.head_init_std or config.model.init_std
    spread = std * math.sqrt(shape.hidden_size)  # of a logit: after the last norm |h| is sqrt(d)
    allowed = TOLERANCE + STANDARD_ERRORS * spread / math.sqrt(max(1.0, _independent(batches)))
    return shape.first_loss(std), allowed


def _independent(batches: Sequence[Batch]) -> float:
    """How many logits the mean is over. Untrained, all blanks look alike: a frequent word does not count more."""
    if any("places" not in batch.tensors for batch in batches):
        return sum(batch.tokens for batch in batches)
    counts = torch.bincount(torch.cat([batch.tensors["targets"] for batch in batches])).double()
    return float(counts.sum() ** 2 / counts.square().sum().clamp_min(1))
