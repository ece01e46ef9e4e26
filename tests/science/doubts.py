"""Figures of an evaluation that cannot be right: how a fault in an objective shows. Returns what is wrong, or ''."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lockstep.objectives.diffusion import BUCKETS
from lockstep.objectives.mlm import CHANNELS
from lockstep.objectives.options import MlmOptions

TOO_GOOD = 0.97  # accuracy on tokens that cannot be seen
FAR_FROM_SHARES, TOO_FAR = 0.15, 1.6


def of_masked_lm(measures: Mapping[str, float], options: MlmOptions) -> str:
    """Labels on tokens that nobody chose, or a model that sees its targets."""
    overall, hidden = measures.get("accuracy", math.nan), measures.get("accuracy_masked", math.nan)
    if max(overall, hidden) >= TOO_GOOD:
        return "targets leak into the input"
    shares = options.masked_share, options.random_share, 1 - options.masked_share - options.random_share
    due = sum(
        share * measures.get(f"accuracy_{name}", math.nan)
        for name, share in zip(CHANNELS, shares, strict=True)
        if share > 1e-9
    )
    return "there are labels on tokens that are merely copied" if overall - due > FAR_FROM_SHARES else ""


def of_diffusion(measures: Mapping[str, float]) -> str:
    """Tokens that are not hidden, or a bound that is divided by something else than all tokens."""
    if measures.get("accuracy", math.nan) >= TOO_GOOD:
        return "targets leak into the input"
    mean = sum(measures.get(f"loss_t_{bucket}", math.nan) for bucket in range(BUCKETS)) / BUCKETS
    wrong = mean > 0 and not 1 / TOO_FAR < measures.get("loss", math.nan) / mean < TOO_FAR
    return "the bound is divided by something else than all tokens" if wrong else ""
