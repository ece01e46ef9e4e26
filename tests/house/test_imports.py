"""What an import may cost: help without torch, the core without the optional packages."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "triton")  # seconds
HEAVY = ("torch", "pydantic", "numpy", "transformers", "rich", "ruamel")
CORE = ("torch", "numpy", "safetensors", "pydantic", "ruamel.yaml", "tokenizers", "psutil", "filelock")
TRAIN = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    # what is blocked is not found, as if it were not installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import torch
of_torch = set(sys.modules)
from lockstep.config.load import load
from lockstep.engine.train import train
flags = [("training.max_steps", "2"), ("report.tensorboard", "true"), ("data.num_workers", "0")]
result = train(load("llama", preset="tiny", flags=flags))
assert result.steps == 2, result
print("compiler:", sorted(set(sys.argv[2].split(",")) & (set(sys.modules) - of_torch)))
print("loaded:", sorted(BLOCKED & set(sys.modules)))
"""


def test_help_is_cheap() -> None:
    """`lockstep --help` and a script's --help load nothing heavy."""
    code = (
        "import sys\nfrom lockstep.cli import main\nfrom lockstep import compat\n"
        "codes = [main(['--help']), compat.main('run.sh', ['--help'])]\n"
        f"print('CHECK', [int(code) for code in codes], [name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == "CHECK [0, 0] []", answer.stdout + answer.stderr


def modules_outside_the_core() -> set[str]:
    """Top-level modules of every installed distribution that is not in the closure of the core."""
    core: set[str] = set()
    waiting = list(CORE)
    while waiting:
        name = waiting.pop().lower().replace("_", "-").replace(".", "-")
        if name in core:
            continue
        core.add(name)
        if name == "tokenizers":  # asks for huggingface-hub, and needs it only to download
            continue
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [match[0] for line in wanted if "extra ==" not in line and (match := re.match(r"[\w.-]+", line))]
    core |= {"pip", "setuptools", "lockstep-train"}
    return {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not any(owner.lower().replace("_", "-").replace(".", "-") in core for owner in owners)
    }


def test_the_core_trains_with_eight_packages(tmp_path: Path) -> None:
    blocked = modules_outside_the_core()
    assert {"rich", "tensorboard", "transformers", "datasets", "pyarrow", "huggingface_hub", "pynvml"} <= blocked
    assert not {"torch", "numpy", "pydantic", "filelock", "psutil", "tokenizers"} & blocked
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(
        [sys.executable, "-c", TRAIN, ",".join(sorted(blocked)), ",".join(COMPILER)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.splitlines()[-2:] == ["compiler: []", "loaded: []"]
    assert "pip install tensorboard" in answer.stdout, (
        "the block is real: what wants tensorboard says that it is missing"
    )
