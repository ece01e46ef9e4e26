"""Start a program the way a user of torchrun or accelerate does, and see what is left of it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launch import processes

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub.py"
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--nproc_per_node=2"),
    "accelerate": ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"),
}
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": ""}


@dataclass
class Foreign:
    """A launcher that the test typed, in a session of its own. run_id: what orphans are found by."""

    process: subprocess.Popen[str]
    run_id: str

    def finish(self, seconds: float = 60) -> tuple[int, str]:
        """(exit code, everything on the screen)."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def survivors(self, within: float = 2.0) -> list[int]:
        """Processes that are left so long after the end."""
        deadline = time.monotonic() + within
        while (left := processes.of_run(self.run_id)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def start(launcher: str, *words: str, cwd: Path, variables: Mapping[str, str] | None = None) -> Foreign:
    """`python -m LAUNCHER FLAGS WORDS` with two workers."""
    run_id = secrets.token_hex(8)
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-m", *LAUNCHERS[launcher], *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=environ | QUIET | {processes.RUN_ID: run_id} | dict(variables or {}),
        start_new_session=True,
    )
    return Foreign(process, run_id)


def make_run(folder: Path, hang_seconds: float = 3.0) -> Path:
    """A run folder for the stub."""
    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"config": {"system": {"hang_seconds": hang_seconds}}}))
    return run


def last_block(output: str) -> list[str]:
    """The lines from [FAILURE] to the end of the screen."""
    _, found, rest = output.rpartition("[FAILURE]")
    return (found + rest).rstrip("\n").splitlines() if found else []


def failure_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "failure.json").read_text())


def wait_for(paths: Sequence[Path], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, f"not there: {paths}"
        time.sleep(0.02)
