"""Signals to the launcher, to one worker, to all: everybody saves, the code is that of the signal, nobody is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import harness
from tests.launch.test_faults import LAUNCHER, ROOT, SLOW, start, times


def saved(run: Path, workers: int = 2) -> None:
    """Every worker's file is there and whole."""
    steps = [int((run / f"saved.{rank}").read_text()) for rank in range(workers)]
    assert all(step >= 0 for step in steps)
    assert not list(run.glob("*.tmp"))
    assert not (run / "failure.json").exists()


@times(3, 100)
def test_sigterm_to_the_launcher(tmp_path: Path, trials: int) -> None:
    """Row 3: at a random moment, also before the first step; 143, and saved by all once they train."""

    def one(number: int) -> None:
        run, chance = tmp_path / str(number), random.Random(number)
        job = start(run)
        if number % 3:
            job.wait_for("Step [0")
        time.sleep(chance.uniform(0, 0.4))
        both = "[GPU0] Step" in (out := job.out) and "[GPU1] Step" in out
        job.send(signal.SIGTERM)
        ended = job.finish(20)
        assert ended.code == 143, ended.out
        assert ended.block == []
        ended.check_clean()
        if both:
            saved(run)

    harness.many(trials, one)


@times(1, 50)
@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=SLOW)])
@pytest.mark.parametrize("target", ["launcher", "rank", "group"])
def test_preemption(tmp_path: Path, trials: int, number: signal.Signals, target: str) -> None:
    """Row 4: 75, and everybody has saved, whoever got the signal."""

    def one(trial: int) -> None:
        run = tmp_path / str(trial)
        job = start(run)
        job.wait_for("[GPU1] Step [1]")
        job.wait_for("[GPU0] Step [1]")
        if target == "group":
            for pid in job.members():
                with contextlib.suppress(ProcessLookupError):  # quick ones have ended by now
                    os.kill(pid, number)
        else:
            job.send(number, job.members(f"RANK={trial % 2}")[0] if target == "rank" else None)
        ended = job.finish(20)
        assert ended.code == 75, ended.out
        ended.check_clean()
        saved(run)

    harness.many(trials, one)


@times(1, 50)
@pytest.mark.parametrize("twice", [False, True])
def test_interrupt(tmp_path: Path, trials: int, twice: bool) -> None:
    """Row 5: the first SIGINT saves and stops, the second ends all within a second; 130 both."""

    def one(number: int) -> float:
        run = tmp_path / str(number)
        job = start(run, options="steps=500,rate=0.2" if twice else "steps=500")  # steps that last 5 s
        if not twice:
            job.wait_for("[GPU0] Step [0]")
            job.wait_for("[GPU1] Step [0]")
        while len(job.members("LOCAL_WORLD_SIZE=2")) < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        job.send(signal.SIGINT)
        if twice:
            time.sleep(0.3)
            job.send(signal.SIGINT)
        ended = job.finish(20)
        assert ended.code == 130, ended.out
        ended.check_clean()
        if twice:
            return ended.seconds
        saved(run)
        return 0.0

    harness.in_time(trials, one, 1.0)


@times(1, 20)
@pytest.mark.parametrize("nohup", [False, True])
def test_hangup(tmp_path: Path, trials: int, nohup: bool) -> None:
    """Row 6: as SIGTERM, unless it was ignored from the start."""

    def one(number: int) -> None:
        run = tmp_path / str(number)
        how = ["nohup"] if nohup else ["env", "--default-signal=HUP"]  # whatever the tests themselves ignore
        command = [*how, *LAUNCHER, "2", str(run)]
        steps = 40 if nohup else 5000  # the first worker is not done before the other has begun
        job = harness.start(command, cwd=ROOT, STUB_OPTIONS=f"steps={steps}")
        job.wait_for("[GPU1] Step [1]")
        job.wait_for("[GPU0] Step [1]")
        job.send(signal.SIGHUP)
        ended = job.finish(20)
        assert ended.code == (0 if nohup else 143), ended.out
        ended.check_clean()
        if not nohup:
            saved(run)

    harness.many(trials, one)


def test_failure_while_stopping(tmp_path: Path) -> None:
    """A worker that fails instead of saving is a failure still."""
    run = tmp_path / "run"
    job = start(run, fault="exit@rank=1,step=6,code=9", options="steps=500,rate=8,deaf")
    job.wait_for("[GPU1] Step [3]")
    job.send(signal.SIGTERM)
    harness.check_failure(job.finish(20), run, code=9, rank=1)


def test_a_worker_that_goes_on_is_ended(tmp_path: Path) -> None:
    """Asked to stop and still making steps after the grace period: ended, with the code of the signal."""
    job = start(tmp_path / "run", "grace_seconds=0.5", options="steps=5000,deaf")
    job.wait_for("[GPU1] Step [1]")
    job.send(signal.SIGTERM)
    ended = job.finish(20)
    assert (ended.code, "and does not" in ended.out) == (143, True), ended.out
    ended.check_clean()


def test_slow_saving_is_waited_for(tmp_path: Path) -> None:
    """Negative control: a save that lasts longer than the grace period is finished."""
    run = tmp_path / "run"
    job = start(run, "grace_seconds=0.2", options="steps=500,save_seconds=1.5")
    job.wait_for("[GPU1] Step [1]")
    job.wait_for("[GPU0] Step [1]")
    job.send(signal.SIGTERM)
    ended = job.finish(20)
    assert ended.code == 143
    saved(run)


def test_reader_goes_away(tmp_path: Path) -> None:
    """Contract 59: `| head -1` ends everybody, 141."""
    shell = f"{' '.join(LAUNCHER)} 2 {tmp_path / 'run'} | head -1; echo code ${{PIPESTATUS[0]}}"
    ended = harness.run(["bash", "-c", shell], cwd=ROOT, STUB_OPTIONS="steps=5000", seconds=20)
    assert ended.out.splitlines()[-1] == "code 141", ended.out
    ended.check_clean()


@pytest.mark.parametrize("noticed", [False, True], ids=["at once", "later"])
def test_control_c_reaches_the_reader_too(tmp_path: Path, noticed: bool) -> None:
    """`| tee log`, Ctrl-C: tee is gone before the launcher hears of it. What was learnt is saved all the same."""
    environ = {**os.environ, "STUB_OPTIONS": "steps=50000,save_seconds=0.5", harness.STAMP: str(tmp_path)}
    command = [*LAUNCHER, "2", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, start_new_session=True) as job:
        assert job.stdout is not None
        read = b""
        while b"[GPU1] Step [1]" not in read or b"[GPU0] Step [1]" not in read:
            read += os.read(job.stdout.fileno(), 4096)
        job.stdout.close()
        time.sleep(0.2 * noticed)  # lines that nobody takes
        job.send_signal(signal.SIGINT)
        assert job.wait(20) == 130
    saved(tmp_path / "run")
    assert not harness.survivors(str(tmp_path))


@pytest.mark.slow
def test_slow_reader_does_not_deafen_the_launcher(tmp_path: Path) -> None:
    """While a pager stands still, signals still count."""
    environ = {**os.environ, "STUB_OPTIONS": "steps=50000,noise=200,rate=500", harness.STAMP: str(tmp_path)}
    command = [*LAUNCHER, "2", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, start_new_session=True) as job:
        assert job.stdout is not None
        job.stdout.read(100)
        time.sleep(1.5)  # by now every buffer between the workers and us is full
        job.send_signal(signal.SIGINT)
        time.sleep(0.2)
        job.send_signal(signal.SIGINT)
        time.sleep(0.8)
        rest = job.stdout.read()
        assert job.wait(5) == 130
    assert len(rest) < 4 << 20, "what a reader does not take is not kept without limit"
    assert not harness.survivors(str(tmp_path))


def test_work_folder_goes_with_a_killed_launcher(tmp_path: Path) -> None:
    """The reaper removes what a launcher that was killed could not."""
    command = [*LAUNCHER, "2", str(tmp_path / "run")]
    job = harness.start(command, cwd=ROOT, STUB_OPTIONS="steps=5000", TMPDIR=str(tmp_path))
    job.wait_for("[GPU1] Step [1]")
    assert list(tmp_path.glob("lockstep-*"))
    job.send(signal.SIGKILL)
    job.finish(5).check_clean()
    deadline = time.monotonic() + 2
    while list(tmp_path.glob("lockstep-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_launcher_is_cheap(tmp_path: Path) -> None:
    """It loads nothing heavy; what it costs is measured by benchmarks/start.py."""
    heavy = ("torch", "numpy", "pydantic", "rich", "transformers")
    code = (
        "import sys; from tests.launch.launcher import main; code = main(sys.argv[1:]); "
        f"print('loaded', code, [name for name in {heavy!r} if name in sys.modules])"
    )
    ended = harness.run([sys.executable, "-c", code, "2", str(tmp_path / "run")], cwd=ROOT, STUB_OPTIONS="steps=5")
    assert "loaded 0 []" in ended.out.splitlines(), ended.out
