"""Gradients under the eye of debug mode: which are not finite, which are large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from lockstep.runtime.parallel import local, sum_over_shards

LARGE_NORM = 100.0


def gradient_warnings(parameters: Iterable[tuple[str, nn.Parameter]], *, scale: float = 1.0) -> Iterator[str]:
    """One line per gradient worth a word. Looks at every gradient, on all ranks: for debug mode only."""
    named = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
    if not named:
        return
    seen = torch.stack([_look(local(gradient.detach()), scale) for _, gradient in named])
    for (name, _), (nans, infs, square) in zip(named, sum_over_shards(named[0][1], seen).tolist(), strict=True):
        if nans:
            yield f"NaN in gradient: {name}"
        elif infs:
            yield f"Inf in gradient: {name}"
        elif square > LARGE_NORM**2:
            yield f"Large gradient in {name}: {square**0.5:.4f}"


def _look(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """(NaNs, infinities, square of the norm): what adds up over the parts of a gradient."""
    gradient = gradient.float() / scale
    square = torch.linalg.vector_norm(gradient).double().square()
    return torch.stack([torch.isnan(gradient).sum().double(), torch.isinf(gradient).sum().double(), square])
