"""Several workers on one real GPU: the same guarantees as on the CPU.

On a machine without pytest-timeout: pytest -c /dev/null --rootdir=. tests/gpu
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEP = re.compile(r"^\[GPU(\d+)\] Step \[(\d+)/\d+\] \| (Loss: \S+ \| LR: \S+ \| Grad Norm: \S+)", re.MULTILINE)


def train(folder: Path, workers: int, *words: str, **variables: str) -> harness.Job:
    command = [
        sys.executable, "-m", "lockstep", "train", "llama", "tiny", "--mode", "replicas", "--name", "shared",
        "--gpus", ",".join(["0"] * workers), "--deterministic", "--log-all-ranks", "model.compile=off",
        "report.sample_prompt=", "report.tensorboard=false", *words,
    ]  # fmt: skip
    return harness.start(command, cwd=folder, **variables)


@pytest.mark.parametrize("workers", [2, 4])
def test_replicas_on_one_card_agree(tmp_path: Path, workers: int) -> None:
    ended = train(tmp_path, workers, "--max-steps", "8").finish(180)
    assert ended.code == 0, ended.out
    ended.check_clean()
    seen = {(int(gpu), int(step)): numbers for gpu, step, numbers in STEP.findall(ended.out)}
    assert set(seen) == {(gpu, step) for gpu in range(workers) for step in range(8)}
    assert all(seen[gpu, step] == seen[0, step] for gpu, step in seen)
    assert f"All {workers} replicas agree" in ended.out
    events = [json.loads(line) for line in (tmp_path / "runs/shared/events.jsonl").read_text().splitlines()]
    assert any(event.get("gpu_temperature_c") for event in events if event["kind"] == "step")


def test_a_flipped_bit_on_one_replica_is_named(tmp_path: Path) -> None:
    fault = "flip_weight@rank=2,step=3,bit=3"
    ended = train(tmp_path, 3, "--max-steps", "6", LOCKSTEP_FAULT=fault).finish(180)
    assert ended.code == 3, ended.out
    assert "GPU 2 ends step 3 with other bits" in ended.out
    ended.check_clean()


@pytest.mark.parametrize("workers", [2, 4])
def test_one_is_killed(tmp_path: Path, workers: int) -> None:
    job = train(tmp_path, workers, "--max-steps", "100000")
    job.wait_for("[GPU1] Step [3", 120)
    job.send(signal.SIGKILL, job.members("RANK=1")[0])
    ended = job.finish(60)
    harness.check_failure(ended, tmp_path / "runs/shared", code=137, rank=1, cause="SIGKILL")
    assert ended.seconds <= 3.0


@pytest.mark.parametrize("workers", [2, 4])
def test_one_is_stopped(tmp_path: Path, workers: int) -> None:
    job = train(tmp_path, workers, "--max-steps", "100000", "system.hang_seconds=5")
    job.wait_for("[GPU1] Step [3", 120)
    job.send(signal.SIGSTOP, job.members("RANK=1")[0])
    ended = job.finish(60)
    record = harness.check_failure(ended, tmp_path / "runs/shared", code=124, rank=1, cause="stopped")
    assert record["section"] in ("data", "forward", "backward", "communication")
    assert ended.seconds <= 5 + 5


def test_out_of_memory_on_one_worker_is_explained(tmp_path: Path) -> None:
    """Row 8: a real torch.OutOfMemoryError."""
    ended = train(tmp_path, 2, "--max-steps", "100000", LOCKSTEP_FAULT="oom@rank=1,step=3").finish(120)
    record = harness.check_failure(ended, tmp_path / "runs/shared", code=1, rank=1, cause="out of memory")
    assert "GiB" in record["cause"]
    assert "batch" in record["next"] + record["cause"]


def test_a_launcher_that_is_killed_takes_them_with_it(tmp_path: Path) -> None:
    job = train(tmp_path, 2, "--max-steps", "100000")
    job.wait_for("[GPU1] Step [3", 120)
    job.send(signal.SIGKILL)
    ended = job.finish(10)
    ended.check_clean()


def test_sigterm_saves_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path, 2, "--max-steps", "30").finish(180)
    assert whole.code == 0, whole.out
    (tmp_path / "runs/shared").rename(tmp_path / "runs/whole")
    job = train(tmp_path, 2, "--max-steps", "30", LOCKSTEP_FAULT="slow@factor=20")
    job.wait_for("[GPU1] Step [5", 120)
    job.send(signal.SIGTERM)
    ended = job.finish(60)
    assert ended.code == 143, ended.out
    ended.check_clean()
    resumed = harness.start([sys.executable, "-m", "lockstep", "resume", "shared"], cwd=tmp_path).finish(180)
    assert resumed.code == 0, resumed.out

    def losses(name: str) -> dict[int, str]:
        lines = (tmp_path / "runs" / name / "events.jsonl").read_text().splitlines()
        return {event["step"]: event["loss_hex"] for event in map(json.loads, lines) if event["kind"] == "step"}

    assert losses("shared") == losses("whole")
