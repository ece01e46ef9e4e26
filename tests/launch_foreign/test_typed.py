"""torchrun and accelerate as users type them when nothing fails: stopped, resumed, shown, asked for a precision."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import processes
from tests.launch_foreign.foreign import (
    LAUNCHERS,
    Foreign,
    check_one_bar,
    failure_of,
    start,
    start_on_terminal,
)

pytestmark = pytest.mark.ranks

WORDS = ("-m", "lockstep", "train", "llama", "tiny", "--device", "cpu", "--name", "run")
QUIET = ("report.sample_prompt=", "report.tensorboard=false", "training.eval_batches=1")
STEPS = 40
SECONDS = 120.0


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "runs/run/events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path) -> dict[int, tuple[str, str]]:
    """Step -> (loss, gradient norm), to the bit; a step made again counts as it was last."""
    return {one["step"]: (one["loss_hex"], one["grad_norm_hex"]) for one in events(folder) if one["kind"] == "step"}


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs/run/checkpoints").glob("step_????????")}


def begin(launcher: str, folder: Path, *words: str, **variables: str) -> Foreign:
    folder.mkdir(exist_ok=True)
    return start(launcher, *WORDS, *QUIET, "--max-steps", str(STEPS), *words, cwd=folder, variables=variables)


def wait_for_step(foreign: Foreign, folder: Path, step: int) -> None:
    deadline = time.monotonic() + SECONDS
    while max(losses(folder), default=-1) < step:
        assert foreign.process.poll() is None, foreign.finish(5)[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def worker(foreign: Foreign, rank: int) -> int:
    """The process of a rank: the one of this run that torch's launcher has given it to."""
    for pid in processes.of_run(foreign.run_id):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in words and b"lockstep" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no process of rank {rank}")


@pytest.fixture(scope="module")
def whole(_prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("whole")
    foreign = begin("torchrun", folder, DATASET_CACHE_DIR=str(_prepared))
    code, output = foreign.finish(SECONDS)
    assert code == 0, output
    assert sorted(losses(folder)) == list(range(STEPS))
    assert output.count("Number of processes: 2") == 1
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_sigterm_saves_and_resumes_to_the_same_bits(
    launcher: str, tmp_path: Path, shared_cache: Path, whole: dict[int, tuple[str, str]]
) -> None:
    """torchrun passes it on to every rank: they stop together, and the same command with --resume goes on."""
    foreign = begin(launcher, tmp_path, LOCKSTEP_FAULT="hang@seconds=0.1")
    wait_for_step(foreign, tmp_path, 13)
    foreign.process.send_signal(signal.SIGTERM)
    code, output = foreign.finish(SECONDS)
    assert code != 0, output
    assert foreign.survivors() == []
    last = max(losses(tmp_path))
    assert 13 <= last < STEPS - 1, "it stopped"
    assert f"step_{last + 1:08d}" in saved(tmp_path), output
    failed = tmp_path / "runs/run/failure.json"
    assert not failed.exists(), f"a stop is no failure: {failed.read_text()}\n{output}"
    again = begin(launcher, tmp_path, "--resume", "auto")
    code, output = again.finish(SECONDS)
    assert code == 0, output
    (resumed,) = [event for event in events(tmp_path) if event["kind"] == "resume"]
    assert resumed["step"] == last + 1
    assert losses(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_saved_after_one_rank_was_killed(
    launcher: str, rank: int, tmp_path: Path, shared_cache: Path
) -> None:
    """torchrun then sends SIGTERM to the others: they must not take it for a wish to save half a model."""
    foreign = begin(launcher, tmp_path, LOCKSTEP_FAULT="hang@seconds=0.1")
    wait_for_step(foreign, tmp_path, 12)  # saved at 10, to be saved at 20
    before = saved(tmp_path)
    os.kill(worker(foreign, rank), signal.SIGKILL)
    code, output = foreign.finish(SECONDS)
    assert code == 1, "theirs, whatever we do"
    assert foreign.survivors() == []
    assert before == saved(tmp_path) == {"step_00000010"}, output
    assert not list((tmp_path / "runs/run").rglob("*.tmp*"))
    assert failure_of(tmp_path / "runs/run")["exit_code"] == 137


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_one_progress_bar_on_a_terminal(launcher: str, tmp_path: Path, shared_cache: Path) -> None:
    """Item 133: the other ranks are silent."""
    slow = {"LOCKSTEP_FAULT": "hang@seconds=0.1"}
    code, screen = start_on_terminal(launcher, *WORDS, *QUIET, "--max-steps", "12", cwd=tmp_path, variables=slow)
    assert code == 0, screen
    check_one_bar(screen, 12)


def accelerate(folder: Path, *flags: str, home: Path | None = None) -> str:
    """`accelerate launch FLAGS -m lockstep ...` with its own choice of precision; the screen."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE")}
    if home is not None:
        variables |= {"HOME": str(home)}
        for name in ("HF_HOME", "XDG_CACHE_HOME"):
            variables.pop(name, None)
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, *WORDS, *QUIET, "--max-steps", "8"]
    answer = subprocess.run(
        command, cwd=folder, env=variables | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=SECONDS
    )
    output = answer.stdout + answer.stderr
    assert answer.returncode == 0, f"{shlex.join(command)}\n{output}"
    return output


def check_precision(folder: Path, output: str, wanted: str) -> None:
    assert re.findall(r"Number of processes: \d+", output) == ["Number of processes: 2"]
    assert re.findall(r"Mixed precision: \S+", output) == [f"Mixed precision: {wanted}"]
    config = json.loads((folder / "runs/run/config.json").read_text())["config"]
    assert config["training"]["precision"] == wanted


@pytest.mark.slow
def test_the_precision_of_accelerates_flag(
    tmp_path: Path, shared_cache: Path, whole: dict[int, tuple[str, str]]
) -> None:
    port = "--main_process_port=0"
    output = accelerate(tmp_path, "--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16", port)
    check_precision(tmp_path, output, "bf16")
    exact, rounded = (float.fromhex(found[0][0]) for found in (whole, losses(tmp_path)))
    assert 0 < abs(exact - rounded) < 0.01 * exact, "it is not only said: the first loss is near, and not the same"


@pytest.mark.slow
def test_accelerates_default_config_is_honoured(tmp_path: Path, shared_cache: Path) -> None:
    """What `accelerate config` has written once counts for a bare `accelerate launch`."""
    home = tmp_path / "home"
    path = home / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: MULTI_GPU", "mixed_precision: fp16"]
    lines += ["num_machines: 1", "num_processes: 2", "machine_rank: 0", "main_process_port: 0", "use_cpu: false"]
    path.write_text("\n".join([*lines, ""]))
    output = accelerate(tmp_path, home=home)
    check_precision(tmp_path, output, "fp16")
    assert len(losses(tmp_path)) == 8
