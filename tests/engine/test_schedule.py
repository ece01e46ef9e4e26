"""The learning rate of every step."""

from __future__ import annotations

import itertools
import math

import pytest

from lockstep.engine.options import TrainingOptions
from lockstep.engine.schedule import learning_rates


def test_warm_up_rises_then_cosine_falls_to_a_tenth() -> None:
    options = TrainingOptions(max_steps=100, warmup_steps=10, learning_rate=1e-3)
    rates = learning_rates(options).tolist()
    assert all(a < b for a, b in itertools.pairwise(rates[:11]))
    assert rates[0] > 0
    assert rates[10] == pytest.approx(1e-3)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    expected = 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert rates[55] == pytest.approx(expected, rel=1e-6)
    assert rates[-1] == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("constant", 1.0)])
def test_other_shapes(schedule: str, middle: float) -> None:
    options = TrainingOptions.model_validate({"max_steps": 100, "learning_rate": 1.0, "schedule": schedule})
    assert learning_rates(options)[50].item() == pytest.approx(middle)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rates(TrainingOptions(learning_rate=1e-5))[0].item() == pytest.approx(1e-5)
