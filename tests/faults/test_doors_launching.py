"""The documented launchers with real workers: items 1-6, 9, 46, 49, 50, 55, 59, 60, 99, 121, 167, 173, 175; row 31."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fake_smi
from tests.faults import trainer
from tests.faults.conftest import Whole
from tests.faults.trainer import trials
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
TAIL = (
    r"Step \[(?P<step>\d+)/(?P<of>\d+)\] \| (?P<numbers>Loss: (-?\d+\.\d{4}|nan|inf) \| LR: (\d\.\d{2}e[+-]\d{2})"
    r" \| Grad Norm: (\d+\.\d{4}|nan|inf)) \| ETA: (\d+):(\d{2})"
)
STEP_LINES = {
    "script": re.compile(r"^\[GPU(?P<gpu>\d+)\] " + TAIL + "$"),
    "training": re.compile(r"^GPU(?P<gpu>\d+):INFO \| \[GPU (?P<same>\d+)\] " + TAIL + "$"),
}
FIRST_STEP_SECONDS = 30.0  # the budget of item 175; measured 6.5 s on two cores with other work beside it


def steps_of(out: str, way: str) -> dict[int, list[re.Match[str]]]:
    """The step lines of each GPU; every line that holds one matches the documented form."""
    found: dict[int, list[re.Match[str]]] = {}
    for line in out.splitlines():
        if "Step [" in line:
            match = STEP_LINES[way].match(line)
            assert match, line
            assert match.groupdict().get("same", match["gpu"]) == match["gpu"]
            found.setdefault(int(match["gpu"]), []).append(match)
    return found


def check_screen(ended: harness.Ended, way: str, workers: int) -> None:
    """Items 1-6, 60: success, each step of each worker in order, each line labelled, and the same lines in the logs."""
    assert ended.code == 0, ended.out
    assert ended.out.rstrip().endswith("[SUCCESS] All GPU training completed successfully")
    lines = ended.out.splitlines()
    steps = steps_of(ended.out, way)
    assert sorted(steps) == list(range(workers))
    for found in steps.values():
        assert [int(match["step"]) for match in found] == list(range(trainer.STEPS))
        assert {int(match["of"]) for match in found} == {trainer.STEPS}
    told = [line for line in lines if line.startswith("Log directory: ")]
    assert len(told) == 2, "at the start and at the end"
    assert len(set(told)) == 1
    folder = Path(told[0].partition(": ")[2])
    assert re.fullmatch(r"/tmp/model_check_logs_\d+_\d+", str(folder))
    for gpu in range(workers):
        prefix = f"[GPU{gpu}] " if way == "script" else f"GPU{gpu}:"
        shown = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert shown == (folder / f"gpu_{gpu}.log").read_text(encoding="utf-8").splitlines()
        others = [line for line in lines if f"GPU{gpu}" in line and not line.startswith(prefix)]
        # of the launcher, which names each worker; none of another worker
        assert not [line for line in others if re.match(r"\[GPU\d|GPU\d+:", line)]


def check_log_dir(folder: Path, workers: int) -> None:
    """--log-dir: a file per worker with its own steps, in the documented form."""
    assert sorted(path.name for path in folder.iterdir()) == [f"gpu{rank}.log" for rank in range(workers)]
    for rank in range(workers):
        lines = (folder / f"gpu{rank}.log").read_text(encoding="utf-8").splitlines()
        form = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \| GPU{rank} \| [\w.]+ \| [A-Z]+ \| "
        steps = [line for line in lines if "Step [" in line]
        assert len(steps) == trainer.STEPS
        assert all(re.match(form, line) for line in steps), steps[0]


def check_alike(out: str, way: str) -> None:
    """Item 9: the strings of every step are the same on every worker."""
    for alike in zip(*steps_of(out, way).values(), strict=True):
        assert len({match["numbers"] for match in alike}) == 1


def test_run_sh_with_four_replicas(tmp_path: Path) -> None:
    """Items 1, 3, 5, 6, 9, 60, 121, 167, 175, and a quiet run that nothing is said about (row 15, 46).

    One worker writes past Python, as NCCL does: the line carries its label and is in that worker's file alone."""
    begin = time.monotonic()
    words = (
        "--mode",
        "replicas",
        "--log-dir",
        "logs",
        "system.slow_factor=4",
    )  # 4 workers on 2 cores are not equally fast
    more = {"NCCL_DEBUG": "INFO", "HURT": "raw:forward:2:5"}
    job = trainer.start(tmp_path, *words, way="script", workers=4, **more)
    trainer.wait_for_step(job, 0)
    seconds = time.monotonic() - begin
    pids = trainer.workers(job, 4)
    workers = [trainer.environ_of(pid) for pid in pids]
    told = trainer.run_folder(tmp_path) / "workers" / "n0-GPU3" / "heartbeat"
    trainer.wait_until(told.exists, job)  # of what status is to show
    status = subprocess.run(
        (sys.executable, "-m", "lockstep", "status", "run"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    ended = job.finish(trainer.END_SECONDS)
    check_screen(ended, "script", 4)
    check_alike(ended.out, "script")
    ended.check_clean()
    assert "WARNING" not in ended.out
    assert {worker["NCCL_DEBUG"] for worker in workers} == {"INFO"}
    assert [worker["GPU_RANK"] for worker in workers] == ["0", "1", "2", "3"]
    assert not {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & set().union(*workers)
    raw = "NCCL INFO of rank 2: INFO"
    assert ended.out.count(f"[GPU2] {raw}\n") == ended.out.count(raw) == 1
    files = {path.parent.name for path in (tmp_path / "runs").rglob("output.txt") if raw in path.read_text()}
    assert files == {"n0-GPU2"}
    check_log_dir(tmp_path / "logs" / "run", 4)
    assert status.returncode == 0, status.stderr
    assert re.search(r"step\s+\d+", status.stdout, re.IGNORECASE), status.stdout
    assert "GPU3" in status.stdout
    print(f"\nfirst step line after {seconds:.1f} s")
    assert seconds <= FIRST_STEP_SECONDS


def test_run_training_sh_with_one_shared_model(whole: Whole) -> None:
    """Items 2, 3, 4, 6, 9 (every worker prints the global loss), 60."""
    check_screen(whole.ended, "training", 2)
    check_alike(whole.ended.out, "training")
    assert sorted(whole.losses) == list(range(trainer.STEPS))


def test_the_workers_banner_is_shown_once(whole: Whole) -> None:
    """Item 131: though every line of every worker is shown; 60 signs above, below the title, and at the end."""
    assert whole.ended.out.count("Number of processes") == 1
    lines = [line.partition("[GPU 0] ")[2] for line in whole.ended.out.splitlines() if "[GPU 0] " in line]
    at = lines.index("Number of processes: 2")
    rule = "=" * 60
    assert lines[at - 3 : at] == [rule, "Multi-GPU Training Configuration", rule]
    rest = lines[at + 1 : lines.index(rule, at)]
    names = ("Distributed type", "Mixed precision", "Gradient accumulation steps", "Main process device")
    assert tuple(line.partition(":")[0] for line in rest) == names
    assert rest[0] == "Distributed type: DistributedType.MULTI_CPU"


@pytest.mark.parametrize(("way", "trial"), trials("script", "training", default=["script"]))
def test_a_reader_that_goes_away(tmp_path: Path, way: str, trial: int) -> None:
    """Item 59: `| head -1` leaves nobody, and is no failure of the run's own."""
    words = ("--device", "cpu", "--gpus", "2", "--name", "run", "--max-steps", "2000", *trainer.QUIET)
    command = trainer.WAYS[way].removeprefix("exec ").format(shlex.join(words))
    lines = 1 + 20 * trial  # the first line of all, and some of the workers'
    ended = harness.run(["bash", "-c", f"{command} | head -{lines}"], cwd=tmp_path, seconds=trainer.END_SECONDS)
    assert len(ended.out.splitlines()) == lines
    ended.check_clean()


def test_children_see_one_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items 46, 49: of three GPUs the first and the third, one per worker, by their numbers."""
    fake_smi.plant(tmp_path / "bin", monkeypatch, [fake_smi.gpu(index) for index in range(3)])
    command = (*shlex.split(trainer.SCRIPT), "--gpus", "0,2", "--name", "run", *trainer.QUIET)
    job = harness.start(command, cwd=tmp_path)
    try:
        trainer.workers(job, 2)
        seen = [trainer.environ_of(pid) for pid in trainer.workers(job, 2)]
    finally:
        job.end()
    for environ, gpu in zip(seen, ("0", "2"), strict=True):
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_RANK", "CUDA_DEVICE_ORDER")
        assert [environ[name] for name in names] == [gpu, gpu, gpu, "PCI_BUS_ID"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 8, 10])
def test_one_worker_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Items 46, 50: a bare `bash run.sh` starts as many workers as the tool lists."""
    fake_smi.plant(tmp_path / "bin", monkeypatch, [fake_smi.gpu(index) for index in range(count)])
    job = harness.start(shlex.split(trainer.SCRIPT), cwd=tmp_path)
    try:
        job.wait_for(f"{count} GPU{'s' if count > 1 else ''} started", trainer.START_SECONDS)
        seen = [trainer.environ_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in trainer.workers(job, count)]
    finally:
        job.end()
    assert seen == [str(index) for index in range(count)]


@pytest.mark.parametrize("explicit", [True, False])
def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, explicit: bool) -> None:
    """Item 50: the demo and a notice for a bare start, 2 with a hint where GPUs were asked for. Nothing is trained."""
    fake_smi.plant(tmp_path / "bin", monkeypatch, [])
    script = ("bash", str(trainer.ROOT / "run.sh"), *(("--gpus", "2") if explicit else ("--dry-run",)))
    ended = harness.run(script, cwd=tmp_path, seconds=trainer.END_SECONDS)
    if explicit:
        assert ended.code == 2, ended.out
        assert "--device cpu" in ended.out
    else:
        assert ended.code == 0, ended.out
        assert "demo" in ended.out


def take_port(wanted: int) -> socket.socket:
    """Listen on this port, or on any other where somebody else does already."""
    try:
        return socket.create_server(("", wanted))
    except OSError:
        return socket.create_server(("", 0))


@pytest.mark.parametrize("way", [pytest.param("direct", marks=pytest.mark.slow), "script"])
def test_a_port_that_is_taken(tmp_path: Path, way: str) -> None:
    """Row 31, item 99: a port that was given is refused, by its number and its holder, before anything is started."""
    with take_port(12355 if way == "script" else 29500) as taken:
        port = taken.getsockname()[1]
        begin = time.monotonic()
        ended = trainer.run(tmp_path, "--master-port", str(port), way=way)
        assert time.monotonic() - begin <= 30
    assert ended.code == 2, ended.out
    assert f"port {port} is taken by process {os.getpid()}" in ended.out
    assert not (tmp_path / "runs").exists()
    ended.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_a_port_that_is_free_is_used(tmp_path: Path, trial: int) -> None:
    """Row 31, item 120, and the negative control of the test above."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    job = trainer.start(tmp_path, "--master-port", str(port), way=("direct", "script")[trial % 2])
    trainer.wait_for_step(job, 0)
    listening = subprocess.run(("ss", "-ltnH"), capture_output=True, text=True, check=False).stdout
    assert f":{port} " in listening
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 0, ended.out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_jobs_at_once(tmp_path: Path) -> None:
    """Row 31, items 99, 173: without a port each finds its own; in one folder each gets its own run."""
    words = ("--device", "cpu", "--gpus", "2", "--max-steps", "3", *trainer.QUIET)
    command = ["bash", "-c", trainer.WAYS["direct"].format(shlex.join(words))]
    jobs = [harness.start(command, cwd=tmp_path) for _ in range(8)]
    ends = [job.finish(800) for job in jobs]
    assert [ended.code for ended in ends] == [0] * 8, [ended.out[-500:] for ended in ends if ended.code]
    runs = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert len(runs) == 8
    assert len({json.dumps(trainer.losses(run), sort_keys=True) for run in runs}) == 1
    for ended in ends:
        ended.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_two_runs_of_one_name(tmp_path: Path, whole: Whole, trial: int) -> None:
    """Item 173: the second is refused, and the first ends as if nothing had been; also when it tries to resume it."""
    job = trainer.start(tmp_path, way=("direct", "script")[trial % 2], LOCKSTEP_FAULT="hang@seconds=0.5")
    trainer.wait_for_step(job, 11)  # something is saved by then
    second = trainer.resume(tmp_path) if trial % 2 else trainer.run(tmp_path)
    assert second.code == 2, second.out
    assert "another process is training" in second.out or "exists already" in second.out
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 0, ended.out
    assert trainer.losses(trainer.run_folder(tmp_path)) == whole.losses


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_status_logs_and_stop_from_another_shell(tmp_path: Path, trial: int) -> None:
    """Item 167, and `lockstep stop`: read from files, the workers are not touched; stop saves."""
    job = trainer.start(tmp_path, "--max-steps", "2000", way="script", LOCKSTEP_FAULT="hang@seconds=0.05")
    trainer.wait_for_step(job, 3)
    time.sleep(2.5)  # heartbeats are written every two seconds

    def ask(*words: str) -> str:
        command = (sys.executable, "-m", "lockstep", *words)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = ask("status", "run")
    assert re.search(r"\d+/2,?000", shown), shown
    assert "GPU1" in shown
    assert "Step [" in ask("logs", "run", "--gpu", "1")
    assert "saved" in ask("stop", "run")
    ended = job.finish(30)
    assert ended.code == 143, ended.out
    ended.check_clean()
    assert not list(trainer.run_folder(tmp_path).rglob("failure*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_a_worker_that_ignores_sigterm(tmp_path: Path, trial: int) -> None:
    """Item 55: it is ended all the same when a peer has died, stopped or not."""
    rank = trial % 2
    job = trainer.start(tmp_path, way="script", LOCKSTEP_FAULT="hang@seconds=0.2")
    trainer.wait_for_step(job, 1)
    victim, deaf = trainer.worker(job, rank), trainer.worker(job, 1 - rank)
    job.send(signal.SIGSTOP, deaf)  # a stopped process hears no SIGTERM
    job.send(signal.SIGKILL, victim)
    ended = job.finish(30)
    harness.check_failure(ended, trainer.run_folder(tmp_path), code=137, rank=rank, cause="killed by SIGKILL")
    assert ended.seconds <= 10
