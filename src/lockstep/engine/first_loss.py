"""What the loss of random weights must be, and how far chance may take it from there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch, Objective
from lockstep.kernels.linear_cross_entropy import IGNORE
from lockstep.models.agent_shapes import AgentShape
from lockstep.models.shapes import Shape
from lockstep.runtime.group import Group

TOLERANCE = 0.1
STANDARD_ERRORS = 4


class Foreseen(NamedTuple):
    """The loss to be expected of the first step, how much more or less is still chance, and why."""

    loss: float
    room: float
    formula: str = "ln V + d std²/2"


def foreseen(
    config: RunConfig,
    shape: Shape,
    batches: Sequence[Batch],
    *,
    objective: Objective | None = None,
    group: Group | None = None,
) -> Foreseen:
    """For the first step: where tokens have weights, their sum is known and no chance; where ids are forbidden, only
    the others are guessed.
    """
    std = config.model.head_init_std or config.model.init_std
    spread = std * math.sqrt(shape.hidden_size)  # of a logit: after the last norm |h| is sqrt(d)
    if isinstance(shape, AgentShape):
        return _of_an_agent(shape, objective, batches, spread)
    room = STANDARD_ERRORS * spread / math.sqrt(max(1.0, _independent(batches)))
    possible: int = getattr(objective, "possible_ids", shape.vocab_size)
    share = _weighted_share(batches, group or Group())
    return Foreseen((shape.first_loss(std) + math.log(possible / shape.vocab_size)) * share, TOLERANCE + room * share)


def _of_an_agent(shape: AgentShape, objective: Any, batches: Sequence[Batch], spread: float) -> Foreseen:
    """Each of its answers is a guess among few choices, and to random weights all steps look alike."""
    tell = getattr(objective, "guesses", None)  # whoever's own objective tells nothing of the kind guesses actions
    guesses: dict[str, tuple[float, float]] = tell(batches) if tell else {"action": (1.0, 1.0)}
    losses = [coefficient * (math.log(shape.said[name]) + spread**2 / 2) for name, (coefficient, _) in guesses.items()]
    variance = sum(coefficient**2 / max(1.0, count) for coefficient, count in guesses.values())
    others = [name for name in guesses if name != "action"]
    formula = "ln A + d std²/2 of A actions" + (f", and the like of {', '.join(others)}" if others else "")
    return Foreseen(math.fsum(losses), TOLERANCE + STANDARD_ERRORS * spread * math.sqrt(variance), formula)


def _weighted_share(batches: Sequence[Batch], group: Group) -> float:
    """The weights of the tokens of all ranks over what their sum is divided by; 1 where no token has its own."""
    if any("token_weights" not in batch.tensors for batch in batches):
        return 1.0
    total = math.fsum(float(batch.tensors["token_weights"].double().sum()) for batch in batches)
    told = group.gather([total, sum(batch.weights["loss"] for batch in batches)])
    return math.fsum(each[0] for each in told) / max(1, sum(each[1] for each in told))


def _independent(batches: Sequence[Batch]) -> float:
    """How many logits the mean is over. Untrained, all blanks look alike: a frequent word does not count more."""
    if any("places" not in batch.tensors for batch in batches):
        return sum(batch.tokens for batch in batches)
    targets = torch.cat([batch.tensors["targets"] for batch in batches])
    weights = [batch.tensors.get("token_weights", torch.ones(len(batch.tensors["targets"]))) for batch in batches]
    known = targets != IGNORE
    counts = torch.bincount(targets[known], weights=torch.cat(weights)[known].double())
    return float(counts.sum() ** 2 / counts.square().sum().clamp_min(1e-30))
