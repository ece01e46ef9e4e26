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
    """In a process of its own: this one may hold the card already."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "lockstep", "bench", *words, "--anyway", "--steps=10", f"--json={file}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads(file.read_text())


def test_the_production_shape(tmp_path: Path) -> None:
    found = bench(tmp_path, "llama", "production", *WIDE)
    parts = found["anatomy"]["parts_ms"]
    assert sum(parts.values()) == pytest.approx(found["step_ms"])
    assert parts["matrix products"] > parts["attention"] > 0
    assert all(parts[name] > 0 for name in ("optimizer and clipping", "cross-entropy", "pointwise and reductions"))
    assert parts["other"] < 0.02 * found["step_ms"], found["anatomy"]["unnamed_ms"]
    assert abs(parts["gaps"]) < 0.1 * found["step_ms"]
    assert 0.2 < found["mfu_causal"] < found["mfu_palm"] < 0.9
    assert found["mfu_causal"] < found["of_measured_peak"] < 1
    assert 0.5 < found["measured_peak_flops"] / found["peak_flops"] < 1
    assert abs(found["estimate_off"]) < 0.25
    assert found["compile_seconds"] > 0


@pytest.mark.parametrize("family", ["llama", "mlm", "llada", "ad"])
def test_every_family(tmp_path: Path, family: str) -> None:
    found = bench(tmp_path, family, "tiny")
    parts = found["anatomy"]["parts_ms"]
    assert sum(parts.values()) == pytest.approx(found["step_ms"])
    assert parts["matrix products"] > 0
    assert parts["optimizer and clipping"] > 0
    assert parts["other"] < 0.05 * found["step_ms"], found["anatomy"]["unnamed_ms"]
    assert found["tokens_per_second"] > 0
