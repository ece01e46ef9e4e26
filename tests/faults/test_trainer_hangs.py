"""Workers of the real trainer that stand still or fall behind: rows 13, 14, 15 of the fault matrix, items 54, 164."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep import rundir
from tests.faults import trainer
from tests.faults.conftest import Whole
from tests.faults.trainer import trials
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
HANG_SECONDS = 5.0
SECTIONS = ("data", "forward", "backward", "communication", "save", "evaluate")
TIMES = {"save": 10, "evaluate": 10}  # steps after which these come


@pytest.mark.slow  # by default with stubs: tests/launch/test_faults.py, tests/launch_foreign/test_guardian.py
@pytest.mark.parametrize(
    ("how", "section", "trial"),
    trials(*((how, section) for how in ("hang", "stop", "gil") for section in SECTIONS)),
)
def test_a_worker_that_stands_still(tmp_path: Path, how: str, section: str, trial: int) -> None:
    """Rows 13, 14, items 54, 164: rank and section are named, everybody's stack is kept, 124 in time."""
    rank = (trial + 1) % 2
    way = ("script", "direct", "tee", "nohup", "script")[trial]
    limit = f"system.hang_seconds={HANG_SECONDS}"
    job = trainer.start(tmp_path, limit, way=way, HURT=f"{how}:{section}:{rank}:3")
    trainer.wait_for_step(job, TIMES.get(section, 2) - 1)  # the last line that is sure to come before it
    begin = time.monotonic()
    ended = job.finish(60)
    run = trainer.run_folder(tmp_path)
    words = "is stopped (SIGSTOP)" if how == "stop" else "hangs"
    if how == "stop":  # to show its stack it had to run again: what it then began to save is swept by the next start
        rundir.sweep(run / "checkpoints")
    record = harness.check_failure(ended, run, code=124, rank=rank, cause=f"{words}: no sign of life for")
    assert (record["kind"], record["section"]) == ("hang", section), record
    for tag in ("GPU0", "GPU1"):
        (stacks,) = (run / "workers" / f"n0-{tag}").glob("stacks*.txt")
        text = stacks.read_text(encoding="utf-8")
        assert "train.py" in text
        assert ("sitecustomize.py" in text) == (tag == f"GPU{rank}"), "the stack shows who it was"
    assert time.monotonic() - begin <= HANG_SECONDS + 2 + 3 + 1, "detected within the limit + 2 s, ended 3 s later"


def test_a_slow_worker(whole: Whole) -> None:
    """Row 15: told while it runs and at the end, and the run goes on."""
    assert whole.ended.code == 0, whole.ended.out
    warnings = [line for line in whole.ended.out.splitlines() if "slow" in line and "WARNING" in line]
    assert warnings, whole.ended.out
    assert all("GPU1" in line and "GPU0" not in line for line in warnings)
    assert len(warnings) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "trial"), trials(1.3, 3.0, 1.0))
def test_how_slow_is_slow(tmp_path: Path, factor: float, trial: int) -> None:
    """Row 15: found at 30 % within 50 steps, and a quiet run (factor 1, the negative control) is left alone.

    Large enough steps that a busy machine does not decide it."""
    fault = f"slow@rank=1,factor={factor}" if factor > 1 else ""
    words = ("--max-steps", "50", "training.context_length=256", "training.batch_size=8")
    ended = trainer.run(tmp_path, *words, LOCKSTEP_FAULT=fault)
    assert ended.code == 0, ended.out
    assert ("GPU1 is slow" in ended.out) == (factor > 1), ended.out
    assert "GPU0 is slow" not in ended.out
    ended.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_patience(tmp_path: Path, trial: int) -> None:
    """Negative control of rows 13, 14: a worker that stands still for less than the limit is not ended."""
    fault = f"hang@rank={trial % 2},step=6,seconds=2"
    ended = trainer.run(tmp_path, f"system.hang_seconds={HANG_SECONDS}", LOCKSTEP_FAULT=fault)
    assert (ended.code, ended.block) == (0, []), ended.out
    assert not (trainer.run_folder(tmp_path) / "failure.json").exists()
