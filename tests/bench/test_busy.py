"""When a machine counts as busy."""

from __future__ import annotations

import os

import pytest

from lockstep.bench import busy


def test_more_work_than_cores_is_busy_and_as_much_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for load, expected in ((8.0, []), (8.1, ["the load average is 8.1 on 8 cores"])):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert busy.reasons([]) == expected
