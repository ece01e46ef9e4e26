"""The three lines of debug mode about gradients, to the letter, and silence where there is nothing to say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.health.finite import LARGE_NORM, gradient_warnings


def warned(*gradients: torch.Tensor | None, scale: float = 1.0) -> list[str]:
    parameters = []
    for index, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(2, 2))
        parameter.grad = gradient
        parameters.append((f"layers.{index}.weight", parameter))
    return list(gradient_warnings(parameters, scale=scale))


def planted(value: float) -> torch.Tensor:
    return torch.tensor([[0.5, value], [0.0, -1.0]])


def test_nan_inf_and_large_are_named() -> None:
    assert warned(planted(math.nan)) == ["NaN in gradient: layers.0.weight"]
    assert warned(planted(-math.inf)) == ["Inf in gradient: layers.0.weight"]
    assert warned(torch.full((2, 2), 60.0)) == ["Large gradient in layers.0.weight: 120.0000"]


def test_the_worst_word_wins_and_each_gradient_has_its_own() -> None:
    both = torch.tensor([[math.nan, math.inf], [1e9, 0.0]])
    assert warned(both, planted(0.5), None, planted(math.inf)) == [
        "NaN in gradient: layers.0.weight",
        "Inf in gradient: layers.3.weight",
    ]


@pytest.mark.parametrize("gradient", [planted(0.5), torch.zeros(2, 2), torch.full((2, 2), LARGE_NORM / 2), None])
def test_a_clean_gradient_is_no_line(gradient: torch.Tensor | None) -> None:
    assert warned(gradient) == []


def test_the_loss_scale_is_taken_out() -> None:
    """Under fp16 gradients are larger by the scale: judged by what the optimizer will see."""
    scaled = planted(0.5) * 65536
    assert warned(scaled, scale=65536.0) == []
    assert warned(scaled) != []
