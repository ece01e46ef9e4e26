"""Tests do not wait for the disk: a process that is killed loses nothing it has written, only a power cut does.

How a save goes on after a power cut at any moment is played in tests/faults/test_kills.py. `--full` waits.
"""

from __future__ import annotations

import os

VARIABLE = "LOCKSTEP_TESTS_SYNC"  # for the processes that tests start and that run tests' functions


def spare() -> None:
    """From now on, here and there."""
    os.environ[VARIABLE] = "no"
    setattr(os, "fsync", lambda _descriptor: None)  # noqa: B010 - typed as what it replaces


def spare_if_told() -> None:
    if os.environ.get(VARIABLE) == "no":
        spare()
