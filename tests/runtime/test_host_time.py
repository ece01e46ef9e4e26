"""The clock that stands still while a thread waits for a processor."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.runtime import host_time
from lockstep.runtime.host_time import own_seconds


def test_time_spent_waiting_for_a_processor_is_taken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "schedstat"
    monkeypatch.setattr(host_time, "SCHEDULING", told)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    told.write_text("5000 0 3\n")
    before = own_seconds()
    monkeypatch.setattr(time, "perf_counter", lambda: 103.0)
    told.write_text("5000 2500000000 9\n")
    assert own_seconds() - before == pytest.approx(0.5)


@pytest.mark.parametrize("content", [None, "", "1", "words words words"])
def test_without_a_word_of_the_kernel_it_is_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    told = tmp_path / "schedstat"
    if content is not None:
        told.write_text(content)
    monkeypatch.setattr(host_time, "SCHEDULING", told)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.25)
    assert own_seconds() == 7.25


def test_sleeping_counts() -> None:
    before = own_seconds()
    time.sleep(0.1)
    assert own_seconds() - before > 0.08


def test_losing_the_processor_between_the_two_readings_does_not_make_time_run_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock on the wall is read, another process has the processor for 8 ms, and only then is the wait read."""
    told = tmp_path / "schedstat"
    monkeypatch.setattr(host_time, "SCHEDULING", told)
    wall, waited, losses = 100.0, 0, 0

    def clock() -> float:
        nonlocal wall, waited, losses
        seen = wall
        if losses:
            wall, waited, losses = wall + 0.008, waited + 8_000_000, losses - 1
            told.write_text(f"5000 {waited} 3\n")
        return seen

    monkeypatch.setattr(time, "perf_counter", clock)
    told.write_text("5000 0 3\n")
    before = own_seconds()
    wall, losses = wall + 0.005, 1  # a step of 5 ms
    assert own_seconds() - before == pytest.approx(0.005)
    losses = 10**6  # a machine on which this always happens: it comes to an end
    own_seconds()
