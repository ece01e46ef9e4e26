"""`lockstep bench` on a real GPU: the GPU's clock, kernels sorted into parts that make up the step, memory foreseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDE = ("--model.num-layers=2", "--training.context-length=2048", "--training.batch-size=2",
        "--training.grad-accum-nums=1")  # fmt: skip


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    """In processes of its own: this one may hold the card already."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "lockstep", "bench", *words, "--steps=10", f"--json={file}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    tree = json.loads(file.read_text())
    return tree | tree["workers"][0]


def test_the_production_shape(tmp_path: Path) -> None:
    found = bench(tmp_path, "llama", "production", *WIDE)
    parts, step = found["parts_ms"], found["step_ms"]
    assert parts["matrix products"] > parts["attention"] > 0
    assert all(parts[name] > 0 for name in ("optimizer and clipping", "cross-entropy", "pointwise and reductions"))
    assert parts["other"] < 0.02 * step, found["unnamed_ms"]
    assert sum(parts.values()) == pytest.approx(step, rel=0.1), "no kernel of another step is among them"
    assert 0.2 < found["mfu"] < 0.9
    assert abs(found["estimated_memory_bytes"] / found["peak_memory_bytes"] - 1) < 0.25
    assert found["start_seconds"] > found["step_ms"] / 1e3


@pytest.mark.parametrize("family", ["llama", "mlm", "llada", "ad"])
def test_every_family(tmp_path: Path, family: str) -> None:
    found = bench(tmp_path, family, "tiny")
    parts = found["parts_ms"]
    assert parts["matrix products"] > 0
    assert parts["optimizer and clipping"] > 0
    assert parts["other"] < 0.05 * found["step_ms"], found["unnamed_ms"]
    assert found["tokens_per_second"] > 0
