"""Signals to the real trainer: rows 3, 4, 5, 6 of the fault matrix, items 57, 154, 162."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.faults import trainer
from tests.faults.conftest import Whole
from tests.faults.trainer import trials
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
PACE = "hang@seconds=0.05"
SLOW_PACE = "hang@seconds=0.2"  # the few steps of a run that is compared outlast a signal that comes late
USER_WAYS = ("direct", "script", "tee", "nohup", "setsid")
STOP_SECONDS = 10.0  # a step and a save, on a busy machine


def check_no_failure(ended: harness.Ended, code: int) -> float:
    """A stop is no failure: no block, no record, nobody left; how long it took."""
    assert ended.code == code, f"exit code {ended.code}, expected {code}\n{ended.out[-3000:]}"
    ended.check_clean()
    assert ended.block == []
    return ended.seconds


def check_stopped(ended: harness.Ended, code: int) -> None:
    """The same, and in time."""
    assert check_no_failure(ended, code) <= STOP_SECONDS


def check_saved(cwd: Path) -> int:
    """The run was saved where it ended; at which step."""
    run = trainer.run_folder(cwd)
    assert not (run / "failure.json").exists()
    (end,) = trainer.events(run, "end")
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert newest.name == f"step_{end['step']:08d}", "the last step is saved"
    assert not list(run.rglob("*.tmp*"))
    return int(end["step"])


@pytest.mark.parametrize(("way", "trial"), trials(*USER_WAYS, default=["script"]))
def test_sigterm_while_training(tmp_path: Path, whole: Whole, way: str, trial: int) -> None:
    """Row 3, items 57, 154, 162: finish the step, save, 143; never requeued; resumed to the same bits."""

    def one(number: int) -> float:
        cwd = tmp_path / str(number)
        job = trainer.start(cwd, way=way, LOCKSTEP_FAULT=SLOW_PACE, **trainer.fake_scontrol(cwd / "bin"))
        launcher = trainer.launcher(job)
        trainer.wait_for_step(job, 2)
        time.sleep(random.Random(trial).uniform(0, 0.5))
        job.send(signal.SIGTERM, launcher)
        seconds = check_no_failure(job.finish(60), 143)
        assert 2 < check_saved(cwd) < trainer.STEPS
        if way != "direct":
            assert (cwd / ".checkpoints" / "interrupted.pt").is_file()
        assert trainer.asked_of(cwd / "bin") == []
        ended = trainer.resume(cwd)
        assert ended.code == 0, ended.out
        ended.check_clean()
        assert trainer.losses(trainer.run_folder(cwd)) == whole.losses
        return seconds

    harness.in_time(1, one, STOP_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(("section", "trial"), trials("save", "evaluate"))
def test_sigterm_while_saving_or_validating(tmp_path: Path, whole: Whole, section: str, trial: int) -> None:
    """Row 3: what was begun is finished, then saved; resumed to the same bits."""
    ended = trainer.run(tmp_path, HURT=f"term:{section}:{trial % 2}:3", LOCKSTEP_FAULT=PACE)
    assert ended.code == 143, ended.out
    ended.check_clean()
    assert 10 <= check_saved(tmp_path) <= 12
    ended = trainer.resume(tmp_path)
    assert ended.code == 0, ended.out
    assert trainer.losses(trainer.run_folder(tmp_path)) == whole.losses


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "trial"), trials("preparing", "starting"))
def test_sigterm_before_the_first_step(tmp_path: Path, whole: Whole, moment: str, trial: int) -> None:
    """Row 3: there is nothing to save yet; the same command afterwards trains to the same bits."""
    fresh = {"DATASET_CACHE_DIR": str(tmp_path / "datasets")} if moment == "preparing" else {}
    chance = random.Random(trial)
    job = trainer.start(tmp_path, LOCKSTEP_FAULT=PACE, **fresh)  # so that a late signal still finds a run
    if moment == "preparing":
        job.wait_for("Preparing dataset", trainer.START_SECONDS)
        time.sleep(chance.uniform(0, 4))
    else:
        trainer.workers(job, 2)
        time.sleep(chance.uniform(0, 3))
    early = "Step [0/" not in job.out
    job.send(signal.SIGTERM)
    check_stopped(job.finish(60), 143)
    run = trainer.run_folder(tmp_path)
    begun = run.exists()
    again = trainer.resume(tmp_path) if begun and not early else trainer.run(tmp_path, "--name", "again", **fresh)
    assert again.code == 0, again.out
    assert trainer.losses(run if begun and not early else run.parent / "again") == whole.losses


TARGETS = [(name, target) for name in ("SIGUSR1", "SIGUSR2") for target in ("launcher", "rank", "group")]


@pytest.mark.slow  # by default with stubs (tests/launch/test_signals.py), and in one process (engine/test_train.py)
@pytest.mark.parametrize(("name", "target", "trial"), trials(*TARGETS))
def test_preemption(tmp_path: Path, name: str, target: str, trial: int) -> None:
    """Row 4, item 154: whoever hears it, all save, 75, and the job is requeued exactly once."""
    number, rank = signal.Signals[name], trial % 2
    job = trainer.start(tmp_path, LOCKSTEP_FAULT=PACE, **trainer.fake_scontrol(tmp_path / "bin"))
    trainer.wait_for_step(job, 2)
    if target == "group":  # as `scancel --signal` does: every process of the job
        for pid in (trainer.launcher(job), *trainer.workers(job, 2)):
            os.kill(pid, number)
    job.send(number, {"launcher": trainer.launcher(job), "rank": trainer.worker(job, rank)}.get(target, 0) or None)
    ended = job.finish(60)
    check_stopped(ended, 75)
    assert 2 < check_saved(tmp_path) < trainer.STEPS
    assert trainer.asked_of(tmp_path / "bin") == ["requeue 7"]
    assert "SLURM job 7 is back in the queue" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(5))
def test_a_preempted_run_goes_on_to_the_same_bits(tmp_path: Path, whole: Whole, trial: int) -> None:
    """Row 4: what the requeued job does."""
    job = trainer.start(tmp_path, way="script", LOCKSTEP_FAULT=PACE, **trainer.fake_scontrol(tmp_path / "bin"))
    trainer.wait_for_step(job, 2 + trial)
    job.send(signal.SIGUSR1)
    check_stopped(job.finish(60), 75)
    ended = trainer.run(tmp_path, "--resume", way="script")
    assert ended.code == 0, ended.out
    assert trainer.losses(trainer.run_folder(tmp_path)) == whole.losses


def on_terminal(cwd: Path, command: str) -> tuple[subprocess.Popen[bytes], int]:
    """A command in the foreground of a terminal of its own; its process and our end of the terminal."""
    ours, theirs = pty.openpty()

    def take() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environ = os.environ | {"LOCKSTEP_FAULT": PACE, harness.STAMP: str(cwd)}
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def read_until(terminal: int, text: str, seconds: float = trainer.START_SECONDS) -> str:
    """What the terminal shows until this text."""
    deadline, seen = time.monotonic() + seconds, b""
    os.set_blocking(terminal, False)
    while text.encode() not in seen:
        assert time.monotonic() < deadline, seen.decode("utf-8", "replace")
        try:
            seen += os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # the other end is closed
            break
    return seen.decode("utf-8", "replace")


@pytest.mark.parametrize(("times", "way", "trial"), trials((1, "script"), (2, "direct"), default=[(2, "direct")]))
def test_control_c(tmp_path: Path, times: int, way: str, trial: int) -> None:
    """Row 5, item 57: by the terminal, to the whole foreground group. Once: saved, 130. Twice: at once, and what was
    saved before is whole."""

    def one(number: int) -> float:
        (tmp_path / str(number)).mkdir()
        return interrupted(tmp_path / str(number), times, way, trial)

    harness.in_time(1, one, 1.0 if times == 2 else STOP_SECONDS)


def interrupted(cwd: Path, times: int, way: str, trial: int) -> float:
    """Train, and Ctrl-C so many times; how long it took from the last one to the end."""
    words = ("--device", "cpu", "--gpus", "2", "--name", "run", "--max-steps", "300", *trainer.QUIET)
    slow_stop = ("training.save_interval=5", "training.eval_batches=400") if times == 2 else ()
    command = trainer.WAYS[way].format(" ".join((*words, *slow_stop)))
    process, terminal = on_terminal(cwd, command)
    try:
        read_until(terminal, "Step [6/")
        time.sleep(random.Random(trial).uniform(0, 0.2))
        os.write(terminal, b"\x03")
        begin = time.monotonic()
        if times == 2:
            time.sleep(0.3)
            begin = time.monotonic()
            os.write(terminal, b"\x03")
        shown = read_until(terminal, "no such text", trainer.END_SECONDS)
        code = process.wait(trainer.END_SECONDS)
        seconds = time.monotonic() - begin
        assert code == 130, shown
        harness.Ended(code, shown, seconds, str(cwd), time.monotonic()).check_clean()
    finally:
        harness.kill(str(cwd))
        os.close(terminal)
    run = trainer.run_folder(cwd)
    assert not (run / "failure.json").exists()
    if times == 1:
        check_saved(cwd)
        assert (cwd / ".checkpoints" / "interrupted.pt").is_file()
    else:
        from lockstep.engine import checkpoint

        for folder in (run / "checkpoints").glob("step_????????"):
            checkpoint.load(folder)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(("nohup", "trial"), trials(False, True))
def test_hangup(tmp_path: Path, whole: Whole, nohup: bool, trial: int) -> None:
    """Row 6: as SIGTERM, unless nohup told it not to hear."""
    job = trainer.start(tmp_path, way="nohup" if nohup else "script", LOCKSTEP_FAULT=PACE)
    trainer.wait_for_step(job, 2 + trial)
    for pid in (trainer.launcher(job), *trainer.workers(job, 2)) if trial % 2 else (trainer.launcher(job),):
        job.send(signal.SIGHUP, pid)
    ended = job.finish(60)
    if nohup:
        assert ended.code == 0, ended.out
    else:
        check_stopped(ended, 143)
        check_saved(tmp_path)
        assert trainer.resume(tmp_path).code == 0
    assert trainer.losses(trainer.run_folder(tmp_path)) == whole.losses
