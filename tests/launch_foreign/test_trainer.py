"""The real trainer under torchrun and accelerate as users type them (faults.md rows 1, 9, 11, 13, 14)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch_foreign.foreign import LAUNCHERS, failure_of, last_block, start

pytestmark = pytest.mark.ranks

WORDS = ("-m", "lockstep", "train", "llama", "tiny", "--device", "cpu", "--name", "run", "--system.hang_seconds", "5")
FAULTS = {  # kind -> (exit code in failure.json, words of the cause)
    "kill": (137, "killed by SIGKILL (out of memory?)"),
    "raise": (1, "InjectedFault"),
    "exit": (7, "exited with code 7"),
    "hang": (124, "hangs: no sign of life"),
    "stop": (124, "is stopped (SIGSTOP)"),
    "gil": (124, "hangs: no sign of life"),
}
TIMES = 5


def one_failure(launcher: str, kind: str, folder: Path, *, rank: int) -> None:
    extra = ",code=7" if kind == "exit" else ",where=forward" if kind == "raise" else ""
    fault = {"LOCKSTEP_FAULT": f"{kind}@rank={rank},step=7{extra}"}
    foreign = start(launcher, *WORDS, "--training.max_steps", "5000", cwd=folder, variables=fault)
    code, output = foreign.finish()
    exit_code, cause = FAULTS[kind]
    assert code == 1, "theirs, whatever we do"
    block = last_block(output)
    assert block, output
    assert block[0] == f"[FAILURE] Training failed on GPU {rank}"
    assert len(block) <= 5
    assert cause in block[1]
    record = failure_of(folder / "runs/run")
    assert (record["exit_code"], record["rank"]) == (exit_code, rank)
    assert record["step"] in (6, 7)
    assert foreign.survivors() == []


@pytest.mark.parametrize("launcher", [pytest.param("accelerate", marks=pytest.mark.slow), "torchrun"])
def test_a_killed_rank(launcher: str, tmp_path: Path, shared_cache: Path) -> None:
    one_failure(launcher, "kill", tmp_path, rank=1)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("kind", list(FAULTS))
def test_every_fault_five_times(launcher: str, kind: str, tmp_path: Path, shared_cache: Path) -> None:
    for number in range(TIMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        one_failure(launcher, kind, folder, rank=number % 2)


@pytest.mark.slow
def test_both_launchers_train_alike(tmp_path: Path, shared_cache: Path) -> None:
    losses: dict[str, list[str]] = {}
    for launcher in LAUNCHERS:
        folder = tmp_path / launcher
        folder.mkdir()
        foreign = start(launcher, *WORDS, "--training.max_steps", "10", cwd=folder)
        code, output = foreign.finish(90)
        assert code == 0, output
        assert output.count("Starting experiment") == 1, "one rank speaks"
        events = [json.loads(line) for line in (folder / "runs/run/events.jsonl").read_text().splitlines()]
        losses[launcher] = [event["loss_hex"] for event in events if event["kind"] == "step"]
        assert foreign.survivors() == []
    assert losses["torchrun"] == losses["accelerate"]
    assert len(losses["torchrun"]) == 10


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_started_for_the_user_the_exit_code_is_kept(launcher: str, tmp_path: Path, shared_cache: Path) -> None:
    """--launch torchrun|accelerate: under our supervisor even these return the first failing worker's code."""

    words = [*WORDS, "--gpus", "2", "--launch", launcher, "--training.max_steps", "5000"]
    fault = {"LOCKSTEP_FAULT": "exit@rank=1,step=7,code=7", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=os.environ | fault, capture_output=True, text=True, timeout=90
    )
    assert answer.returncode == 7, answer.stdout + answer.stderr
    assert failure_of(tmp_path / "runs/run")["rank"] == 1
