"""A real SLURM: who is a worker there, `srun` alone, and the generated script through its whole life."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch.scripts import script
from tests.launch_foreign.cluster import ENDED, Cluster
from tests.launch_foreign.foreign import ROOT, STUB, failure_of, last_block, make_run, wait_for

pytestmark = pytest.mark.slurm

PLACE = """
import json, os, sys
from lockstep.runtime import env
place = env.detect()
meeting = env.rendezvous(place) if place.world > 1 else None
print(json.dumps([place.rank, place.world, place.node, place.nodes, place.launcher, meeting, env.node_place()]))
"""
AGAIN = "StartTime=now+5"  # it would wait two minutes; at once is too soon: the job's old credential is still revoked


def places(text: str) -> list[list[object]]:
    return sorted(json.loads(line) for line in text.splitlines() if line.startswith("["))


def test_who_is_a_worker(slurm: Cluster, tmp_path: Path) -> None:
    """A batch script's shell is none; the tasks of a step are, and agree on where to meet."""
    (tmp_path / "place.py").write_text(PLACE)
    lines = ["#!/bin/bash", f"{sys.executable} place.py", f"srun {sys.executable} place.py"]
    job = slurm.submit("\n".join(lines), "--nodes=2", "--ntasks-per-node=1", "--output=out.txt", cwd=tmp_path)
    assert slurm.wait(job)["JobState"] == "COMPLETED", (tmp_path / "out.txt").read_text()
    shell, *tasks = places((tmp_path / "out.txt").read_text())
    assert shell == [0, 1, 0, 1, "none", None, None]
    assert [place[:5] for place in tasks] == [[0, 2, 0, 2, "slurm"], [1, 2, 1, 2, "slurm"]]
    assert tasks[0][5] == tasks[1][5]
    assert [place[6] for place in tasks] == [[0, 2], [1, 2]], "room for a launcher on each node"


@pytest.mark.slow
def test_srun_alone_is_enough(slurm: Cluster, tmp_path: Path) -> None:
    answer = slurm.run(
        "srun", "--ntasks=2", sys.executable, "-m", "lockstep", "train", "llama", "tiny", "--device", "cpu",
        "--training.max_steps", "5", "--name", "two", cwd=tmp_path,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("Training completed successfully!") == 1
    assert re.findall(r"Number of processes: \d+", answer.stdout + answer.stderr) == ["Number of processes: 2"]
    record = json.loads((tmp_path / "runs/two/events.jsonl").read_text().splitlines()[0])
    assert record["kind"] == "start"


@pytest.mark.parametrize("kind", [pytest.param("kill", marks=pytest.mark.slow), "stop"])
def test_a_failing_task_has_its_cause_on_the_screen(kind: str, slurm: Cluster, tmp_path: Path) -> None:
    run = make_run(tmp_path, hang_seconds=2)
    command = ["srun", "--ntasks=2", f"--export=ALL,PYTHONPATH={ROOT}", sys.executable, str(STUB), str(run), "2000"]
    answer = slurm.run(*command, f"{kind}@rank=1,step=3", cwd=tmp_path)
    assert answer.returncode != 0
    block = last_block("\n".join(line for line in (answer.stdout + answer.stderr).splitlines() if "srun:" not in line))
    assert block[0] == "[FAILURE] Training failed on GPU 1", answer.stdout + answer.stderr
    assert failure_of(run)["exit_code"] == (124 if kind == "stop" else failure_of(run)["exit_code"])


WORDS = ("llama", "tiny", "--device", "cpu", "--name", "job", "--system.hang_seconds", "60")


def losses(run: Path) -> dict[int, str]:
    """Step -> loss to the bit; a resumed run's later word counts."""
    found: dict[int, str] = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "resume":
            found = {step: loss for step, loss in found.items() if step < event["step"]}
        if event["kind"] == "step":
            found[event["step"]] = event["loss_hex"]
    return found


def submitted(slurm: Cluster, folder: Path, steps: int, *, nodes: int, warning: int = 120, limit: str = "10") -> str:
    words = (*WORDS, "--training.max_steps", str(steps))
    text = script("slurm", words, nodes=nodes, gpus=2 if nodes == 1 else 1, name="job", time_limit=limit)
    text = text.replace("--signal=USR1@120", f"--signal=USR1@{warning}")
    return slurm.submit(text, "--output=out.txt", cwd=folder)


def step_reached(folder: Path, step: int, seconds: float = 60) -> None:
    wait_for([folder / "runs/job/events.jsonl"], seconds)
    deadline = time.monotonic() + seconds
    while max(losses(folder / "runs/job"), default=-1) < step:
        assert time.monotonic() < deadline, (folder / "out.txt").read_text()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of the same training when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submitted(slurm, folder, 600, nodes=1)
    assert slurm.wait(job)["JobState"] == "COMPLETED", (folder / "out.txt").read_text()
    return losses(folder / "runs/job")


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_generated_script_trains(nodes: int, slurm: Cluster, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, 20, nodes=nodes)
    state = slurm.wait(job)
    output = (tmp_path / "out.txt").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert sorted(losses(tmp_path / "runs/job")) == list(range(20))


@pytest.mark.slow
def test_the_documented_pipeline_submits(slurm: Cluster, tmp_path: Path) -> None:
    """`lockstep script slurm ... | sbatch`."""
    words = (sys.executable, "-m", "lockstep", "script", "slurm", *WORDS, "--gpus", "2", "--training.max_steps", "5")
    shell = f"{shlex.join(words)} | sbatch --parsable --output=out.txt"
    answer = slurm.run("bash", "-o", "pipefail", "-c", shell, cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert slurm.wait(answer.stdout.strip())["JobState"] == "COMPLETED", (tmp_path / "out.txt").read_text()
    assert sorted(losses(tmp_path / "runs/job")) == list(range(5))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_scancel_saves_and_never_requeues(nodes: int, slurm: Cluster, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, 100_000, nodes=nodes)
    step_reached(tmp_path, 15)
    slurm.run("scancel", job, cwd=tmp_path)
    state = slurm.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), (tmp_path / "out.txt").read_text()
    last = max(losses(tmp_path / "runs/job"))
    saved = max(int(path.name[5:]) for path in (tmp_path / "runs/job/checkpoints").glob("step_????????"))
    assert saved >= last - 1


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_warning_before_the_time_limit_requeues_and_resumes_to_the_bit(
    nodes: int, slurm: Cluster, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    job = submitted(slurm, tmp_path, 600, nodes=nodes)
    step_reached(tmp_path, 20)
    slurm.run("scancel", "--signal=USR1", job, cwd=tmp_path)  # what --signal sends to the step, now
    slurm.wait(job, ("PENDING", "COMPLETED"))
    slurm.run("scontrol", "update", f"JobId={job}", AGAIN, cwd=tmp_path)
    state = slurm.wait(job, seconds=200)
    output = (tmp_path / "out.txt").read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), output
    assert output.count("is back in the queue") == 1
    assert losses(tmp_path / "runs/job") == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_time_limit_that_runs_out_requeues_once_and_resumes_to_the_bit(
    nodes: int, slurm: Cluster, tmp_path: Path, undisturbed: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute is less than the training needs, and it is SLURM itself that says so: nobody sends a signal here.

    SLURM looks every 30 s and is up to 30 s early: with 15 s of warning it comes 15 to 45 s after the start.
    """
    monkeypatch.setenv("LOCKSTEP_FAULT", "hang@seconds=0.1")  # each step: 600 of them take longer than the minute
    job = submitted(slurm, tmp_path, 600, nodes=nodes, warning=15, limit="1")
    assert slurm.job(job)["TimeLimit"] == "00:01:00"
    step_reached(tmp_path, 5)
    begun = time.monotonic()
    state = slurm.wait(job, ("PENDING", *ENDED), seconds=100)
    output = (tmp_path / "out.txt").read_text()
    assert state["JobState"] == "PENDING", f"{state}\n{output}"
    assert time.monotonic() - begun < 60, "before the limit, not by it"
    interrupted = max(losses(tmp_path / "runs/job"))
    assert 5 <= interrupted < 599
    saved = {path.name for path in (tmp_path / "runs/job/checkpoints").glob("step_????????")}
    assert f"step_{interrupted + 1:08d}" in saved, "the last step is saved"
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10", AGAIN, cwd=tmp_path)
    state = slurm.wait(job, seconds=300)
    output = (tmp_path / "out.txt").read_text()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), output
    assert output.count("is back in the queue") == 1
    assert "DUE TO TIME LIMIT" not in output, "it was gone by then"
    events = [json.loads(line) for line in (tmp_path / "runs/job/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "resume"] == [interrupted + 1]
    assert losses(tmp_path / "runs/job") == undisturbed
