"""A foreign launcher's agent under our supervisor: its workers are not our children, and are watched all the same."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.launch import harness
from tests.launch.test_faults import ROOT, start
from tests.launch.test_signals import saved

# As torchrun does: workers in sessions of their own, looked at every 100 ms; one fails, all are ended, exit code 1. It
# stays until they are gone, 30 s at most: a worker whose agent is dead dies with it, also while it saves.
AGENT = """
import os, signal, subprocess, sys, time
def worker(rank):
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GPU_RANK": str(rank)}
    command = [sys.executable, "-m", "tests.launch.stub"]
    return subprocess.Popen(command, env=os.environ | place, start_new_session=True)
workers = [worker(rank) for rank in range(2)]
def end(*_):
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.wait(30)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
while any(worker.poll() is None for worker in workers):
    if any(worker.poll() for worker in workers):
        end()
    time.sleep(0.1)
"""
LAUNCH = """
import os, sys, tempfile
from pathlib import Path
from lockstep.guard import say
from lockstep.launch.supervise import Proc, Watch, supervise
work = Path(tempfile.mkdtemp(prefix="lockstep-"))
slots = tuple(range(int(os.environ["WORLD_SIZE"])))
agent = Proc("", slots, (sys.executable, "-c", os.environ["AGENT"]), dict(os.environ), is_agent=True)
sys.exit(supervise([agent], Watch(hang_seconds=1.0), work, say).exit_code)
"""


SLOW_AGENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
print("no worker yet", flush=True)
time.sleep(60)
"""
TELLING_AGENT = """
print("Root Cause (first observed failure):\\n  rank : 1\\n  exitcode  : -11 (pid: 7)", flush=True)
raise SystemExit(1)
"""


def launch(
    run: Path, *, fault: str = "", options: str = "steps=500", agent: str = AGENT, workers: int = 2
) -> harness.Job:
    run.mkdir()
    world = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    own = {"AGENT": agent, "STUB_RUN": str(run), "STUB_OPTIONS": options, "LOCKSTEP_FAULT": fault}
    return harness.start([sys.executable, "-c", LAUNCH], cwd=ROOT, **world, **own)


def test_a_killed_worker_is_named_with_its_own_code(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = launch(run)
    job.wait_for("Step [40] rank 1")  # the launcher knows its workers by now
    job.send(signal.SIGKILL, job.members("RANK=1")[0])
    record = harness.check_failure(job.finish(20), run, code=137, rank=1, cause="killed by SIGKILL")
    assert record["gpu"] == "GPU1"


def test_an_exception_is_the_workers_word(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = launch(run, fault="raise@rank=1,step=3").finish(20)
    harness.check_failure(ended, run, code=1, rank=1, cause="injected fault raise at step 3")


def test_a_stopped_worker_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = launch(run, fault="kill@rank=1,step=4,signal=19", options="steps=500,meet").finish(20)
    harness.check_failure(ended, run, code=124, rank=1, cause="is stopped")


def test_preemption_reaches_the_workers_and_not_the_agent(tmp_path: Path) -> None:
    """torchrun dies of SIGUSR1 and leaves its workers behind."""
    run = tmp_path / "run"
    job = launch(run)
    job.wait_for("Step [2] rank 0")
    job.wait_for("Step [2] rank 1")
    job.send(signal.SIGUSR1)
    ended = job.finish(20)
    assert ended.code == 75, ended.out
    ended.check_clean()
    saved(run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_agent_that_is_stopped_before_it_has_workers(
    tmp_path: Path, workers: int, number: signal.Signals, code: int
) -> None:
    """torchrun then ends with 1: the signal's code is the truth. Of Ctrl-C its Python would make a traceback."""
    job = launch(tmp_path / "run", agent=SLOW_AGENT, workers=workers)
    job.wait_for("no worker yet")
    job.send(number)
    ended = job.finish(20)
    assert (ended.code, ended.block) == (code, []), ended.out
    assert "Traceback" not in ended.out


def test_an_agent_that_fails_when_all_its_workers_are_done(tmp_path: Path) -> None:
    """They have trained to the end and saved: nothing of the run has failed."""
    ended = launch(tmp_path / "run", agent=f"{AGENT}sys.exit(1)", options="steps=30").finish(20)
    assert (ended.code, ended.block) == (0, []), ended.out


def test_an_agents_own_summary_tells_the_code(tmp_path: Path) -> None:
    """Its worker died before it could say anything, and it alone knows how."""
    ended = launch(tmp_path / "run", agent=TELLING_AGENT).finish(20)
    assert (ended.code, len(ended.block) > 1) == (139, True), ended.out


def test_nobody_survives_the_launcher(tmp_path: Path) -> None:
    job = launch(tmp_path / "run", options="steps=5000,child")
    job.wait_for("Step [2] rank 1")
    launcher = job.pid
    os.kill(launcher, signal.SIGKILL)
    begin = time.monotonic()
    job.finish(5).check_clean()
    assert time.monotonic() - begin < 2.5


def test_a_quiet_agent(tmp_path: Path) -> None:
    """Negative control."""
    ended = launch(tmp_path / "run", options="steps=30").finish(20)
    assert (ended.code, ended.block) == (0, []), ended.out
    ended.check_clean()


def test_a_node_that_is_gone_is_named(tmp_path: Path) -> None:
    """All workers here wait: the culprit is another node, found by knocking at its door."""
    run = tmp_path / "run"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        options = f"steps=500,nodes={closed.getsockname()[1]}"
        ended = start(run, "hang_seconds=1", "nodes=2", options=options).finish(20)
    record = harness.check_failure(ended, run, code=124, rank=0)
    assert record["cause"].endswith("the workers of node 1 (there, 127.0.0.1) have ended")
    assert record["kind"] == "lost_peer"
