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


def test_the_launcher_loads_nothing_that_counts(tmp_path: Path) -> None:
    """What it imports until its workers run: NumPy alone would be a fifth of its time. The control counts."""
    code = (
        "import sys\nfrom lockstep.config.load import load\n"
        "from lockstep import start\nfrom lockstep.engine import settle\n"
        "from lockstep.engine.prepare import is_prepared\n"
        "from lockstep.launch import restarting, supervise\n"
        "for family in ('llama', 'mlm', 'llada'):\n"
        "    config = load(family, preset='tiny').config\n"
        "    is_prepared(settle.applied(config, settle.decide(config)))\n"
        "print('CHECK', [name for name in ('torch', 'numpy') if name in sys.modules])\n"
        "from lockstep.data.order import round_keys\n"
        "print(len(round_keys()), 'numpy' in sys.modules)"
    )
    environ = {**os.environ, "DATASET_CACHE_DIR": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert answer.stdout.splitlines()[-2:] == ["CHECK []", "12 True"], answer.stdout + answer.stderr


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
