"""The real trainer under faults: how it is started, who is who among its processes, and what it has recorded."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.launch import harness

ROOT = Path(__file__).parents[2]
HURT = Path(__file__).parent / "hurt"
QUIET = ("report.sample_prompt=", "report.tensorboard=false", "report.progress=off", "training.eval_batches=1")
STEPS = 40
NATIVE = shlex.join((sys.executable, "-m", "lockstep", "train", "llama", "tiny"))
SCRIPT = shlex.join(("bash", str(ROOT / "run.sh"), "--preset", "tiny"))
WAYS = {  # how a user starts it; {} are the words that follow
    "direct": f"exec {NATIVE} {{}}",
    "script": f"exec {SCRIPT} {{}}",
    "tee": f"set -o pipefail; {SCRIPT} {{}} | tee out.txt",
    "nohup": f"exec nohup {SCRIPT} {{}}",
    "training": f"exec {shlex.join(('bash', str(ROOT / 'doors/model_check/run_training.sh')))} --preset tiny {{}}",
    "setsid": f"setsid -w {SCRIPT} {{}}",
}
START_SECONDS = 120.0  # of a busy machine
END_SECONDS = 180.0
STARTED: list[harness.Job] = []  # by the test at hand: one that fails leaves nobody behind


def trials(*cases: Any, default: Iterable[Any] = (), times: int = 5) -> list[Any]:
    """Each case so many times as long proofs; the first time of some cases is run by default too."""
    quick = tuple(default)
    found: list[Any] = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        for trial in range(times):
            name = "-".join([*(str(value).replace("@", "_") for value in values), str(trial)])
            marks = () if case in quick and trial == 0 else (pytest.mark.slow,)
            found.append(pytest.param(*values, trial, id=name, marks=marks))
    return found


def start(cwd: Path, *words: str, way: str = "direct", workers: int = 2, **environ: str) -> harness.Job:
    """Start training in a folder; the run folder is runs/run unless it is given another --name."""
    cwd.mkdir(parents=True, exist_ok=True)
    named = () if "--name" in words or "--resume" in words else ("--name", "run")
    count = () if "--gpus" in words else ("--gpus", str(workers))
    steps = () if "--max-steps" in words else ("--max-steps", str(STEPS))
    every = ("--device", "cpu", *count, *steps, *named, *QUIET, *words)
    job = harness.start(["bash", "-c", WAYS[way].format(shlex.join(every))], cwd=cwd, **hurt(environ))
    STARTED.append(job)
    return job


def hurt(environ: dict[str, str]) -> dict[str, str]:
    """The same variables; with HURT also the folder that heeds it."""
    before = os.environ.get("PYTHONPATH")  # where the package under test may be
    path = os.pathsep.join([str(HURT), *([before] if before else [])])
    return environ | ({"PYTHONPATH": path} if "HURT" in environ else {})


def run(cwd: Path, *words: str, **more: Any) -> harness.Ended:
    """Start it and wait for its end."""
    return start(cwd, *words, **more).finish(END_SECONDS)


def resume(cwd: Path, name: str = "run") -> harness.Ended:
    """`lockstep resume` of a run, to its end."""
    command = (sys.executable, "-m", "lockstep", "resume", f"runs/{name}")
    return harness.run(command, cwd=cwd, seconds=END_SECONDS)


def wait_for_step(job: harness.Job, step: int) -> None:
    job.wait_for(f"Step [{step}/", START_SECONDS)


def environ_of(pid: int) -> dict[str, str]:
    pairs = (item.partition("=") for item in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"))
    return {name: value for name, _, value in pairs if name}


def worker(job: harness.Job, rank: int) -> int:
    """The process of a worker."""
    return workers(job, 2)[rank]


def workers(job: harness.Job, count: int) -> list[int]:
    """The processes of all workers in the order of their ranks, as soon as all are there."""

    def found() -> list[int]:
        by_rank = {rank: job.members(f"RANK={rank}") for rank in range(count)}
        return [pids[0] for pids in by_rank.values() if pids]

    wait_until(lambda: len(found()) == count, job)
    return found()


def launcher(job: harness.Job) -> int:
    """The launcher itself, behind whatever shells: its workers know it."""
    return int(environ_of(worker(job, 0))["LOCKSTEP_LAUNCHER_PID"])


def wait_until(happened: Callable[[], bool], job: harness.Job, seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while True:
        is_over = time.monotonic() > deadline or job.process.poll() is not None  # before the look: its last deed counts
        if happened():
            return
        if is_over:
            out = job.out
            job.end()
            raise AssertionError(f"did not happen:\n{out[-3000:]}")
        time.sleep(0.01)


def run_folder(cwd: Path) -> Path:
    return cwd / "runs" / "run"


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    lines = (root / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def losses(root: Path) -> dict[int, tuple[str, str]]:
    """Step -> (loss, gradient norm), to the bit; a step that was made again after a resume counts as it was last."""
    return {event["step"]: (event["loss_hex"], event["grad_norm_hex"]) for event in events(root, "step")}


def fake_scontrol(folder: Path) -> dict[str, str]:
    """Variables of a SLURM job whose scontrol only writes down what it was asked for, to folder/asked."""
    folder.mkdir(parents=True)
    tool = folder / "scontrol"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(folder / "asked"))}\n', encoding="utf-8")
    tool.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}


def asked_of(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def check_remedy(record: dict[str, Any], ended: harness.Ended) -> None:
    """The advice is the first change that is enough, and nobody tries the same again by himself."""
    assert record["kind"] == "memory"
    assert record["estimated_bytes"] > 0
    assert "--gradient-checkpointing (" in record["next"], record["next"]
    assert ended.out.count("Step [0/") == 1, "of the one worker that is shown"
    assert ended.out.count("[FAILURE]") == 1
