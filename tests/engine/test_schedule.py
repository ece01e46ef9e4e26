"""The learning rate of every step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

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


@pytest.mark.parametrize(("steps", "warmup"), [(50, 5), (5000, 500), (100, 2), (100, 99)])
def test_one_cycle_is_torchs(steps: int, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-5, total_steps=steps, pct_start=warmup / steps)
    expected = [theirs.get_last_lr()[0]]
    for _ in range(steps - 1):
        optimizer.step()
        theirs.step()
        expected.append(theirs.get_last_lr()[0])
    settings = {"max_steps": steps, "warmup_steps": warmup, "learning_rate": 1e-5, "min_lr_ratio": 4e-6}
    ours = learning_rates(TrainingOptions.model_validate({**settings, "schedule": "one_cycle"})).tolist()
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-14)
    assert learning_rates(TrainingOptions.model_validate(settings)).tolist() != pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (2, 2), (3, 1), (10, 0), (10, 10)])
def test_one_cycle_of_few_steps_has_its_peak(steps: int, warmup: int) -> None:
    settings = {"max_steps": steps, "warmup_steps": warmup, "learning_rate": 1.0, "schedule": "one_cycle"}
    rates = learning_rates(TrainingOptions.model_validate(settings)).tolist()
    peak = min(max(warmup and 1, warmup - 1), steps - 1)  # one step of warm-up is one below the peak
    assert max(rates) == rates[peak] == 1.0
    assert rates[:peak] == [] or rates[0] == pytest.approx(0.04)
