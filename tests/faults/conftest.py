"""What tests of the real trainer share: one prepared dataset, one undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import trainer
from tests.launch import harness


@pytest.fixture(scope="session")
def prepared(_prepared: Path) -> Path:
    """The cache of all tests, with the dataset of the tiny preset in it."""
    import contextlib
    import io
    import os

    from lockstep.cli import main

    folder = _prepared
    before = os.environ.get("DATASET_CACHE_DIR")
    os.environ["DATASET_CACHE_DIR"] = str(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(["prepare", "llama", "tiny"]) == 0
    finally:
        os.environ.pop("DATASET_CACHE_DIR")
        if before is not None:
            os.environ["DATASET_CACHE_DIR"] = before
    return folder


@pytest.fixture
def cache(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every trainer of the test finds the dataset prepared, and ends with the test."""
    monkeypatch.setenv("DATASET_CACHE_DIR", str(prepared))
    yield prepared
    for job in trainer.STARTED:
        if job.process.poll() is None:
            job.end()
    trainer.STARTED.clear()


@dataclass(frozen=True)
class Whole:
    """A run that nothing has disturbed."""

    ended: harness.Ended
    cwd: Path
    losses: dict[int, tuple[str, str]]


@pytest.fixture(scope="session")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """`bash run_training.sh`, two workers of one model, the second three times as slow: that changes no bit."""
    cwd = tmp_path_factory.mktemp("whole")
    slow = "slow@rank=1,factor=3"
    ended = trainer.run(cwd, way="training", LOCKSTEP_FAULT=slow, DATASET_CACHE_DIR=str(prepared))
    return Whole(ended, cwd, trainer.losses(trainer.run_folder(cwd)))
