"""What lies between a command and its first step on a real GPU. How long it takes: benchmarks/h200_families.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.ready import ready
from tests.house.test_imports import COMPILER

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROGRAM = """
import sys, torch
of_torch = set(sys.modules)
from lockstep.cli import main
code = main(sys.argv[2:])
print("LOADED", int(code), sorted(set(sys.argv[1].split(",")) & (set(sys.modules) - of_torch)))
"""
WORDS = ("train", "llama", "demo", "--device", "cuda", "--gpus", "1", "--max-steps", "2", "report.tensorboard=false")


@pytest.mark.parametrize("compiles", ["off", "on"])
def test_the_demo_does_not_wait_for_the_compiler(compiles: str, tmp_path: Path) -> None:
    """Its preset says so; with `on` the compiler is seen, so the test would see it. Our own kernels need Triton."""
    asked = [] if compiles == "off" else ["model.compile=on"]
    wanted = ",".join(set(COMPILER) - {"triton"})
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, wanted, *WORDS, *asked], capture_output=True, text=True, cwd=tmp_path
    )
    said = next((line for line in answer.stdout.splitlines() if line.startswith("LOADED")), "")
    assert said.startswith("LOADED 0 "), answer.stdout + answer.stderr
    assert (said == "LOADED 0 []") == (compiles == "off"), said


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [({}, "cudnn"), ({"system.deterministic": True}, "flex"), ({"training.precision": "fp32"}, "flex")],
)
def test_auto_takes_the_first_kernel_of_the_fixed_order(settings: dict[str, Any], kernel: str, tmp_path: Path) -> None:
    """As the table in docs/speed.md has it for a card with cuDNN's attention."""
    built = ready(tmp_path, {"training.batch_size": 1, "training.grad_accum_nums": 1, **settings}).built
    assert (built.attention, built.compiled) == (kernel, True)
