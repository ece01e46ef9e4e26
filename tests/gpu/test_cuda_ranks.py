"""Ranks that train one model on a real GPU. Two share one card by gloo: NCCL refuses two ranks on a device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 20


def train(folder: Path, name: str, *words: str, ranks: int, precision: str) -> list[dict[str, Any]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
    if ranks == 1:
        launch = [sys.executable, "-m"]
    command = [
        *launch, "lockstep", "train", "llama", "tiny", "--name", name, "--max-steps", str(STEPS), "--deterministic",
        "--precision", precision, "report.sample_prompt=", "report.tensorboard=false", "debug.digest_interval=1",
        "training.save_interval=10", "model.compile=off", *words,
    ]  # fmt: skip
    return finish(harness.start(command, cwd=folder, LOCKSTEP_CUDA_BACKEND="gloo"), folder / "runs" / name)


def finish(job: harness.Job, run: Path) -> list[dict[str, Any]]:
    ended = job.finish(240)
    assert ended.code == 0, ended.out[-5000:]
    ended.check_clean()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "step"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_two_ranks_equal_one_with_the_same_global_batch(
    tmp_path: Path, mode: str, precision: str, tolerance: float
) -> None:
    whole = train(tmp_path, "one", "training.batch_size=4", ranks=1, precision=precision)
    parts = train(tmp_path, "two", "training.batch_size=2", "--mode", mode, ranks=2, precision=precision)
    for one, two in zip(whole, parts, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=tolerance)
        assert two["tokens"] == one["tokens"]
    wrong = train(tmp_path, "wrong", "training.batch_size=3", "--mode", mode, ranks=2, precision=precision)
    assert any(abs(w["loss"] - o["loss"]) > tolerance * o["loss"] for w, o in zip(wrong, whole, strict=True))


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, mode: str) -> None:
    words = ("--mode", mode, "training.grad_accum_nums=2", "model.dropout=0.1", "model.compile=on")
    whole = train(tmp_path, "whole", *words, ranks=2, precision="bf16")
    begun = tmp_path / "runs" / "whole" / "checkpoints" / "step_00000010"
    again = train(tmp_path, "again", *words, "--checkpoint", str(begun), ranks=2, precision="bf16")
    keys = ("step", "loss_hex", "grad_norm_hex", "digest")
    bits = [[[event[key] for key in keys] for event in run] for run in (whole[10:], again)]
    assert bits[0] == bits[1]
