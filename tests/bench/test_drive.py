"""Steps that are driven and timed: what is made of their seconds, their rows, and of one that is not finite."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lockstep.bench.drive import drive, measure
from lockstep.bench.figures import Flops
from lockstep.config.load import load
from lockstep.contracts import Batch
from lockstep.errors import NonFiniteError
from lockstep.models.shapes import resolve
from tests.engine.test_step import make_batch, make_stepper

ROWS = 8


def batches(steps: int = 4) -> Iterator[list[Batch]]:
    return ([make_batch(ROWS, seed=step)] for step in range(steps))


def test_steps_take_as_long_as_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here only rows take time, so that each step has the seconds that its rows have had."""
    took, now = [0.5, 2.0, 0.25, 4.0], [100.0]

    def slow() -> Iterator[list[Batch]]:
        for seconds, made in zip(took, batches(len(took)), strict=True):
            now[0] += seconds
            yield made

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = drive(make_stepper(), slow(), begin=0, steps=len(took))
    assert found.seconds == took
    assert (found.rows, found.tokens) == (ROWS, ROWS)


def test_a_head_that_sees_half_of_the_tokens_is_counted_by_half() -> None:
    """Diffusion hides half of them on average, and makes logits of no others."""
    loaded = load("llada", preset="tiny", overrides={"system.device": "cpu", "training.batch_size": 16})
    length = loaded.config.training.context_length
    shape = resolve(loaded.config.model, context_length=length)
    skipped = Flops.of(shape, length).palm - measure(loaded, steps=2).flops.palm
    assert skipped / (6 * shape.vocab_size * shape.hidden_size) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_has_no_figures(precision: str) -> None:
    with pytest.raises(NonFiniteError, match="a step of the bench is not finite: loss nan"):
        drive(make_stepper("nan_loss@step=1", precision), batches(), begin=0, steps=4)


def test_a_scale_that_is_too_large_for_fp16_is_no_reason_to_refuse() -> None:
    stepper = make_stepper("inf_grad@step=1", "fp16")
    assert len(drive(stepper, batches(), begin=0, steps=4).seconds) == 4
    assert 0 < float(stepper.optimizer.applied) < 4, "a step was left out, as in a run"
