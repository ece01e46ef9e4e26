"""Early warning: what is far above the usual is told, what is usual is not."""

from __future__ import annotations

import math
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.contracts import StepRecord
from lockstep.engine import judge
from lockstep.health.spikes import QUIET_STEPS, Spikes


def noisy(steps: int, *, seed: int = 0) -> list[tuple[float, float]]:
    """A curve that falls, with noise; norms that vary by factors."""
    draw = random.Random(seed)
    return [(3 + 5 * math.exp(-step / 40) + draw.gauss(0, 0.1), math.exp(draw.gauss(0, 0.3))) for step in range(steps)]


def told(curve: list[tuple[float, float]]) -> list[str]:
    spikes = Spikes()
    return [line for step, (loss, norm) in enumerate(curve) for line in spikes.note(step, loss, norm)]


def test_a_quiet_run_says_nothing() -> None:
    for seed in range(5):
        assert told(noisy(2000, seed=seed)) == []


def test_a_spike_is_told_with_numbers() -> None:
    curve = noisy(200)
    curve[150] = (9.0, curve[150][1])
    curve[170] = (curve[170][0], 40.0)
    first, second = told(curve)
    assert first.startswith("Loss spike at step 150: 9.0000, usually 3.")
    assert first.endswith("(2.7 times)")
    assert second.startswith("Gradient norm spike at step 170: 40.0000, usually ")


def test_spikes_are_counted_and_told_now_and_then() -> None:
    curve = noisy(400)
    spikes = Spikes()
    lines: list[str] = []
    for step, (loss, norm) in enumerate(curve):
        lines += spikes.note(step, loss + 10 * (step >= 100 and step % 10 == 0), norm)
    assert spikes.loss.count == 30
    assert len(lines) == math.ceil(300 / QUIET_STEPS)
    assert "so far" in lines[-1]


def test_the_first_steps_and_what_is_not_finite_are_not_judged() -> None:
    assert told([(100.0, 100.0), (1.0, 1.0)] * 5) == []
    assert told([*noisy(100), (math.nan, math.inf), (math.inf, math.nan), (1.0, 0.0)]) == []


def test_one_factor_over_the_median_decides() -> None:
    still = [(2.0, 1.0)] * 50
    assert told([*still, *[(4.0, 4.0)] * 5]) == []
    assert [line.split(" spike")[0] for line in told([*still, (4.1, 4.1)])] == ["Loss", "Gradient norm"]


def test_the_loop_tells_it_once_and_to_every_sink(caplog: pytest.LogCaptureFixture) -> None:
    told: list[dict[str, Any]] = []
    parts: Any = SimpleNamespace(
        history=deque(maxlen=20),
        spikes=Spikes(),
        tell=lambda kind, **fields: told.append({"kind": kind, **fields}),
        council=SimpleNamespace(group=SimpleNamespace(rank=0)),
    )
    curve = noisy(100)
    curve[60] = (30.0, 1.0)
    for step, (loss, norm) in enumerate(curve):
        judge.warn(parts, StepRecord(step, loss, norm, lr=1e-3, seconds=0.1, tokens=8, skipped=step == 70))
    assert [(each["kind"], each["step"], each["count"]) for each in told] == [("spike", 60, 1)]
    assert [message for message in caplog.messages if "spike" in message] == [told[0]["text"]]
    assert [each["step"] for each in parts.history] == list(range(80, 100))
