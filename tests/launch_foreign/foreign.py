"""Start a program the way a user of torchrun or accelerate does, and see what is left of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import secrets
import subprocess
import sys
import termios
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
FROM = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # where the package under test may be
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": FROM, "TORCHELASTIC_ERROR_FILE": ""}


@dataclass
class Foreign:
    """A launcher that the test typed, in a session of its own. run_id: what orphans are found by."""

    process: subprocess.Popen[str]
    run_id: str

    def finish(self, seconds: float = 180) -> tuple[int, str]:
        """(exit code, everything on the screen)."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def reaches(self, run: Path, step: int, seconds: float = 120) -> None:
        """Wait until a run has told of a step; the launcher must not have ended by then."""
        deadline = time.monotonic() + seconds
        while max(steps_of(run), default=-1) < step:
            assert self.process.poll() is None, self.finish(5)[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

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


def start_on_terminal(launcher: str, *words: str, cwd: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """The same on a terminal, to its end: (exit code, everything that was sent to the terminal)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x28\x00\x78\x00\x00\x00\x00\x00")  # 40 lines of 120
    command = [sys.executable, "-m", *LAUNCHERS[launcher], *words]
    environ = os.environ | QUIET | {"TERM": "xterm"} | dict(variables)
    process = subprocess.Popen(
        command, cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = b""
    try:
        while True:
            seen += os.read(ours, 65536)
    except OSError:  # the last writer has closed it
        code = process.wait(120)
    finally:
        os.close(ours)
    return code, seen.decode("utf-8", "replace")


def check_one_bar(screen: str, steps: int) -> None:
    """On a terminal there was one progress bar, to the end, and nobody but the first rank has said anything."""
    assert screen.count("\x1b[?25l") == 1, "each bar hides the cursor once, when it begins"
    plain = re.sub(rf"Step \[\d+/{steps}\]|\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    bars = [int(done) for done in re.findall(rf"(\d+)/{steps}\b", plain)]
    assert bars == sorted(bars), f"two bars take turns: {bars}"
    assert bars[-1:] == [steps], screen[-2000:]
    assert "[GPU1]" not in screen
    for step in range(steps):
        assert len(re.findall(rf"Step \[{step}/{steps}\]", screen)) <= 1


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


def events_of(run: Path) -> list[dict[str, Any]]:
    """What a run has told so far."""
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in events_of(run) if event["kind"] == "step"}


def bits_of(run: Path) -> dict[int, tuple[str, str, str]]:
    """Step -> loss, gradient norm and digest of the weights, to the bit."""
    return {step: (one["loss_hex"], one["grad_norm_hex"], one["digest"]) for step, one in steps_of(run).items()}


def losses_of(run: Path, steps: int) -> list[float]:
    """Of a run that has told of so many steps, of each once."""
    found = steps_of(run)
    assert sorted(found) == list(range(steps))
    return [found[step]["loss"] for step in sorted(found)]


def failure_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "failure.json").read_text())


def wait_for(paths: Sequence[Path], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, f"not there: {paths}"
        time.sleep(0.02)
