"""What counts as a stop and what does not: late steps, lost peers, a reader that stands still, exits with no reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch import team
from tests.launch import harness
from tests.launch.test_faults import LAUNCHER, ROOT, start
from tests.launch.test_signals import saved


def begun(run: Path, *watch: str, options: str) -> harness.Job:
    job = start(run, *watch, options=options)
    job.wait_for("[GPU1] Step [4]")
    job.wait_for("[GPU0] Step [4]")
    return job


def test_a_stop_may_come_two_steps_later_and_after_an_evaluation(tmp_path: Path) -> None:
    """The wish travels ahead; what is longer than the grace period is an evaluation, not disobedience."""
    run = tmp_path / "run"
    job = begun(run, "grace_seconds=0.3", options="steps=500,rate=10,lag=2,evaluate_seconds=1.5")
    job.send(signal.SIGTERM)
    ended = job.finish(20)
    assert (ended.code, "does not" in ended.out) == (143, False), ended.out
    saved(run)


def test_who_does_not_follow_is_ended(tmp_path: Path) -> None:
    """A rank inside a kernel hears no signal; the others have saved and are gone."""
    run = tmp_path / "run"
    job = begun(run, "grace_seconds=0.5", options="steps=500,stuck")
    job.send(signal.SIGUSR1)
    ended = job.finish(20)
    assert ended.code == 75, ended.out
    assert "does not: all are ended" in ended.out
    ended.check_clean()
    assert (run / "saved.0").exists()
    assert not (run / "failure.json").exists()


@pytest.mark.parametrize("number", team.STOPS)
def test_a_stop_while_workers_start_is_no_failure(tmp_path: Path, number: int) -> None:
    """Python itself answers SIGINT with a traceback and exit code 1 until the worker's first line."""
    job = start(tmp_path / "run", options="starting")
    job.wait_for("[GPU1] starting")
    job.wait_for("[GPU0] starting")
    job.send(number)
    ended = job.finish(20)
    assert (ended.code, ended.block) == (team.STOPS[number], []), ended.out
    ended.check_clean()


def test_to_lose_a_peer_that_was_stopped_is_no_failure(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = begun(run, options="steps=500,lost")
    job.send(signal.SIGTERM)
    ended = job.finish(20)
    assert (ended.code, ended.block) == (143, []), ended.out
    assert not (run / "failure.json").exists()


def test_a_told_failure_is_no_stop_whatever_its_code(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = start(run, options="steps=500,told=143").finish(20)
    harness.check_failure(ended, run, code=143, rank=1, cause="SystemExit: told")


def test_all_leaving_in_mid_run_is_a_failure(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = "exit@rank=0,step=4,code=0;exit@rank=1,step=4,code=0"
    ended = start(run, fault=fault).finish(20)
    assert ended.code == 1, ended.out
    assert "exited before the others were done" in harness.failure(run)["cause"]


def test_all_leaving_with_nothing_to_do_is_none(tmp_path: Path) -> None:
    """Negative control."""
    ended = start(tmp_path / "run", options="idle").finish(20)
    assert (ended.code, ended.block) == (0, []), ended.out


def test_a_stopped_worker_makes_no_further_step(tmp_path: Path) -> None:
    """It runs on for its stack alone, not while others are waited for: what it would save now, they know nothing of."""
    run = tmp_path / "run"
    options = "steps=500,rate=5,meet,save_each,mute"
    ended = start(run, "hang_seconds=1", fault="kill@rank=1,step=4,signal=19", options=options).finish(20)
    harness.check_failure(ended, run, code=124, rank=1, cause="is stopped")
    assert "stub.py" in (run / "workers" / "n0-GPU1" / "stacks.txt").read_text()
    assert (run / "saved.1").read_text() == "3\n"


def test_who_stays_when_all_is_done_is_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = start(run, "hang_seconds=1", options="steps=10,linger").finish(20)
    harness.check_failure(ended, run, code=124, rank=1, cause="in done")


def test_a_launcher_without_its_reaper_goes_on(tmp_path: Path) -> None:
    job = begun(tmp_path / "run", options="steps=150")
    workers = job.members("LOCAL_WORLD_SIZE=2")
    (reaper,) = [
        pid
        for pid in job.members()
        if pid not in (job.pid, *workers) and "tests.launch.launcher" in harness.command_line(pid)
    ]
    os.kill(reaper, signal.SIGKILL)
    ended = job.finish(20)
    assert (ended.code, "Traceback" in ended.out) == (0, False), ended.out
    ended.check_clean()


@pytest.mark.parametrize("program", ["launcher", "kill_leaked"])
def test_whoever_started_us_survives(tmp_path: Path, program: str) -> None:
    """An id that was inherited is everybody's: the shell, the batch script."""
    code = "import sys; from lockstep.launch import processes; print(processes.kill_leaked(sys.argv[1]))"
    words = [*LAUNCHER, "2", str(tmp_path / "run")] if program == "launcher" else [sys.executable, "-c", code, "abc"]
    shell = ["bash", "-c", '"$@"; echo code $?; true', "bash", *words]
    ended = harness.run(shell, cwd=ROOT, STUB_OPTIONS="steps=5", LOCKSTEP_RUN_ID="abc")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "code 0"), ended.out


def test_signals_are_heard_until_all_is_cleared_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        crew = team.Team(1, work=tmp_path, run_id="none")
        monkeypatch.setattr(team.shutil, "rmtree", lambda *_args, **_options: os.kill(os.getpid(), signal.SIGTERM))
        crew.close()
        assert (list(crew.inbox.received), heard) == ([signal.SIGTERM], [])
    finally:
        signal.signal(signal.SIGTERM, before)


class Stalled:
    """A launcher whose reader stands still, as a pager does, with more to say than any buffer holds."""

    def __init__(self, run: Path, *watch: str, options: str) -> None:
        environ = {**os.environ, "STUB_OPTIONS": f"noise=200,rate=500,{options}", harness.STAMP: str(run)}
        command = [*LAUNCHER, "2", str(run), *watch]
        self.run = run
        self.job = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, start_new_session=True)
        assert self.job.stdout is not None
        self.job.stdout.read(100)
        time.sleep(1.5)

    def __enter__(self) -> Stalled:
        return self

    def __exit__(self, *_: object) -> None:
        harness.kill(str(self.run))
        with self.job:
            pass

    def rest(self) -> bytes:
        assert self.job.stdout is not None
        return self.job.stdout.read()


def test_a_stalled_reader_holds_up_no_worker(tmp_path: Path) -> None:
    """Twice what may wait for it: the workers are done, and their files have every line."""
    with Stalled(tmp_path / "stalled-quiet", "hang_seconds=1", options="steps=1200") as stalled:
        workers = [stalled.run / "workers" / f"n0-GPU{rank}" / "output.txt" for rank in range(2)]
        deadline = time.monotonic() + 60
        while not all(b"Step [1199]" in path.read_bytes()[-1000000:] for path in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert stalled.job.poll() is None, "it has more to say"
        rest = stalled.rest()
        assert (stalled.job.wait(20), b"[FAILURE]" in rest) == (0, False), rest[-1000:]
        assert b"lines were not shown" in rest
        assert [path.read_bytes().count(b"\n") for path in workers] == [1200 * 201] * 2, "nothing is lost"


def test_a_stop_behind_a_stalled_reader_saves(tmp_path: Path) -> None:
    """Nobody reads: workers save and end; the launcher's own line does not hold it up either."""
    with Stalled(tmp_path / "stalled-term", options="steps=50000") as stalled:
        stalled.job.send_signal(signal.SIGTERM)
        assert stalled.job.wait(10) == 143
        saved(stalled.run)
        assert not harness.survivors(str(stalled.run))
        assert len(stalled.rest()) < 4 << 20


@pytest.mark.parametrize("twice", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_end_by_force_needs_no_reader(tmp_path: Path, twice: bool) -> None:
    """The second Ctrl-C; and a worker that does not stop, whose ending is announced."""
    with Stalled(tmp_path / f"stalled-{twice}", "grace_seconds=0.5", options="steps=50000,deaf") as stalled:
        stalled.job.send_signal(signal.SIGINT)
        if twice:
            time.sleep(0.2)
            stalled.job.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert stalled.job.wait(10) == 130
        assert not twice or time.monotonic() - begin < 2
        assert not harness.survivors(str(stalled.run))
