"""Gradients under the eye of debug mode: which are not finite, which are large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

LARGE_NORM = 100.0


def gradient_warnings(parameters: Iterable[tuple[str, nn.Parameter]], *, scale: float = 1.0) -> Iterator[str]:
    """One line per gradient worth a word. Looks at every gradient: for debug mode only."""
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach().float() / scale
        norm = torch.linalg.vector_norm(gradient).item()
        if torch.isnan(gradient).any():
            yield f"NaN in gradient: {name}"
        elif torch.isinf(gradient).any():
            yield f"Inf in gradient: {name}"
        elif norm > LARGE_NORM:
            yield f"Large gradient in {name}: {norm:.4f}"
