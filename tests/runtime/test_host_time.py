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
