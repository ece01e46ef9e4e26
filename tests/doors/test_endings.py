"""How the documented scripts start and end: GPUs that are not there, names of runs, stops and crashes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import compat
from lockstep.errors import ExitCode, Stopped
from lockstep.launch.supervise import Outcome, Watch
from tests.doors.test_model_check import QUICK, TEST_CONFIG, Run
from tests.doors.windows import make


@pytest.mark.parametrize("script", ["pretrain_main.py", "run.sh"])
def test_a_gpu_that_is_not_there_never_becomes_the_cpu(
    door: Run, in_dir: Path, smi: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    smi((0, 0, 1000), (1, 0, 1000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    (in_dir / "logs").mkdir()
    monkeypatch.setattr(compat, "LOG_ROOT", in_dir / "logs")  # a place that nobody else writes to
    outcome = door(script, "--config", TEST_CONFIG)
    assert outcome.code == 2
    assert "CUDA_VISIBLE_DEVICES=9 names none of the GPUs 0-1" in outcome.err
    assert list((in_dir / "logs").iterdir()) == [], "refused before anything was made"


@pytest.mark.parametrize(
    ("words", "code"), [(["--gpus", "x"], ExitCode.USAGE), (["--data-path", "missing.txt"], ExitCode.NOT_FOUND)]
)
def test_no_folder_of_logs_is_named_that_is_not_there(
    door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    monkeypatch.setattr(compat, "LOG_ROOT", in_dir)
    outcome = door("run.sh", *QUICK, *words)
    assert (outcome.code, list(in_dir.glob("model_check_logs_*"))) == (code, [])
    assert "Log directory" not in outcome.text


@pytest.mark.parametrize(
    "words", [["run.sh"], ["launch_training.sh", "--tokenizer-name", "bytes"], ["run_multi_gpu_training.sh", "builtin"]]
)
def test_a_full_disk_behind_the_screen_keeps_nobody_from_training(
    door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Neither before the first step nor after the last one."""
    make(in_dir / "shakespeare_processed")
    opened = contextlib.ExitStack()
    rounds: list[Watch] = []

    def fill() -> None:  # anew: one that was complained of is silent
        full = opened.enter_context(Path("/dev/full").open("w"))  # noqa: SIM115 - `opened` closes it
        monkeypatch.setattr(sys, "stdout", full)

    def trained(_procs: object, watch: Watch, *_: object) -> Outcome:
        rounds.append(watch)
        if watch.log_folder:
            (watch.log_folder / "gpu_0.log").touch()
        fill()
        return Outcome(ExitCode.DONE)

    monkeypatch.setattr("lockstep.launch.supervise.supervise", trained)
    monkeypatch.setattr("lockstep.bench.estimate.lines", lambda *_, **__: ["not asked"])
    monkeypatch.setattr(compat, "LOG_ROOT", in_dir)
    with opened:
        fill()
        outcome = door(*words, "--device", "cpu", "--gpus", "2")
    assert (outcome.code, bool(rounds)) == (ExitCode.DONE, True), outcome.err
    assert outcome.err.endswith("cannot write: No space left on device. Training goes on without it\n")


def test_a_run_is_named_after_its_file(door: Run, in_dir: Path) -> None:
    assert door("pretrain_main.py", *QUICK, "--max-steps", "1").code == 0
    (run,) = (path for path in (in_dir / "runs").iterdir() if not path.is_symlink())
    assert run.name.startswith("llama-test_config-")


def interrupted(*_: object) -> None:
    from lockstep.report.logs import setup_logging

    setup_logging(tag="GPU0", prefix="colon")
    raise Stopped("stopped by SIGINT", where="runs/x", hint="lockstep resume runs/x", exit_code=ExitCode.INTERRUPTED)


def failing(*_: object) -> None:
    from lockstep.report.logs import setup_logging

    setup_logging(tag="GPU0", prefix="colon")
    raise RuntimeError("boom")


def test_a_stop_is_a_warning_and_a_crash_a_failure(door: Run, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "pretrain_main.py"
    monkeypatch.setattr("tempfile.tempdir", str(in_dir))
    monkeypatch.setattr("lockstep.engine.train.train", interrupted)
    outcome = door(script, *QUICK)
    assert outcome.code == 130
    assert "GPU0:WARNING | [GPU 0] stopped by SIGINT (runs/x)" in outcome.out
    assert "try: lockstep resume runs/x" in outcome.out
    assert not any(word in outcome.text for word in ("ERROR", "error", "FAILURE"))
    monkeypatch.setattr("lockstep.engine.train.train", failing)
    outcome = door(script, *QUICK)
    assert outcome.code == 1
    assert "GPU0:ERROR | [GPU 0] unexpected RuntimeError: boom" in outcome.out


def test_the_log_folder_is_new_and_never_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may lay a link under a name that can be guessed: logs must not follow it."""
    monkeypatch.setattr(compat, "LOG_ROOT", tmp_path)
    monkeypatch.setattr(time, "time", lambda: 1000.5)
    (tmp_path / f"model_check_logs_{os.getpid()}_1000").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"model_check_logs_{os.getpid()}_1001").mkdir()
    assert compat._free_log_folder().name == f"model_check_logs_{os.getpid()}_1002"
