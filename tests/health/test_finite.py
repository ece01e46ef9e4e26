"""Debug mode on gradients: three lines to the letter, a table of layers, and silence where there is nothing to say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.health.finite import EXPLODING, LARGE_NORM, SHOWN_LAYERS, GradientWatch, gradient_warnings, look
from lockstep.health.finite import layer_table as table_of


def named(*gradients: torch.Tensor | None, name: str = "layers.{}.weight") -> list[tuple[str, nn.Parameter]]:
    parameters: list[tuple[str, nn.Parameter]] = []
    for index, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(2, 2))
        parameter.grad = gradient
        parameters.append((name.format(index), parameter))
    return parameters


def warned(*gradients: torch.Tensor | None, scale: float = 1.0) -> list[str]:
    return list(gradient_warnings(look(named(*gradients), scale=scale)))


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


def of_norm(norm: float) -> torch.Tensor:
    return torch.full((2, 2), norm / 2)


def test_dead_and_exploding_layers_are_in_the_table() -> None:
    seen = look(named(of_norm(1), of_norm(0), of_norm(1.5), of_norm(2 * EXPLODING), None))
    assert table_of(seen) == [
        "Layers without a gradient: 1, with a far larger one than others: 1, of 4",
        "  layers.1.weight  dead",
        "  layers.3.weight  exploding  gradient norm 20, in other layers usually 1",
    ]


def test_of_two_layers_one_can_be_told_from_the_other() -> None:
    assert [line.split()[:2] for line in table_of(look(named(of_norm(1), of_norm(EXPLODING + 1))))[1:]] == [
        ["layers.1.weight", "exploding"]
    ]


def test_no_table_without_a_reason() -> None:
    """Control: layers that differ as layers do, other kinds of tensors, and what is not finite, which has its line."""
    assert table_of(look(named(of_norm(1), of_norm(3), of_norm(0.9 * EXPLODING)))) == []
    kinds = [*named(of_norm(1e-3), name="norm.weight"), *named(of_norm(50), name="tok_embed.weight")]
    assert table_of(look(kinds)) == []
    assert table_of(look(named(planted(math.nan), planted(math.inf), of_norm(1)))) == []
    assert table_of([]) == []


def test_a_long_table_is_cut() -> None:
    lines = table_of(look(named(*[of_norm(0)] * (SHOWN_LAYERS + 3))))
    assert len(lines) == SHOWN_LAYERS + 2
    assert lines[-1] == "  and 3 more"


def test_the_table_comes_when_it_is_due_or_with_a_warning_and_not_twice() -> None:
    watch, dead = GradientWatch(interval=4), named(of_norm(1), of_norm(0))
    assert [bool(watch.lines(step, dead)) for step in range(10)] == [step == 4 for step in range(10)]
    worse = named(of_norm(1), of_norm(0), of_norm(2 * LARGE_NORM))
    lines = watch.lines(9, worse)
    assert lines[:2] == [
        "Large gradient in layers.2.weight: 200.0000",
        "Layers without a gradient: 1, with a far larger one than others: 1, of 3",
    ]
    assert watch.lines(10, worse) == lines[:1]
    assert watch.lines(12, named(of_norm(1), of_norm(1))) == []
    assert watch.lines(16, dead) != [], "it came back"
