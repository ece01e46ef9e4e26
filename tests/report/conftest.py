"""Logging is set up per test and taken down after it."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from lockstep.contracts import StepRecord
from lockstep.report import logs


@pytest.fixture
def screen() -> io.StringIO:
    """What the user sees."""
    stream = io.StringIO()
    logs.setup_logging(stream=stream)
    return stream


@pytest.fixture
def record() -> Callable[..., StepRecord]:
    """The step of the documented sample line, with changes."""

    def make(step: int = 0, **changes: object) -> StepRecord:
        fields = {"loss": 12.234, "grad_norm": 2.75648, "lr": 1e-5, "seconds": 0.05, "tokens": 8192, "eta_seconds": 330}
        return StepRecord(step, **(fields | changes))

    return make
