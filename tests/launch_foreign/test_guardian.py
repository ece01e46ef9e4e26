"""torchrun and accelerate as the user types them: the cause on the last lines, nobody left, whatever happens.

The workers have no torch (stub.py); the launchers are the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import ExitCode, OutputError
from lockstep.launch import beats, common_folder, guardian, link, watchdog
from tests.launch_foreign.foreign import LAUNCHERS, STUB, Foreign, failure_of, last_block, make_run, start, wait_for

FAULTS = {  # kind -> (exit code, words of the cause)
    "kill": (137, "killed by SIGKILL (out of memory?)"),
    "exit": (7, "exited with code 7"),
    "raise": (1, "ValueError: on purpose"),
    "hang": (124, "hangs: no sign of life"),
    "stop": (124, "is stopped (SIGSTOP)"),
    "gil": (124, "hangs: no sign of life"),
}
STEP = 50  # a trainer first loads torch, and the guardian is there long before: the stub waits for it
LIMIT_SECONDS = 1.0  # of silence, for a guardian that is called by hand
QUICK = {("torchrun", "stop"), ("accelerate", "exit")}  # and a kill of the real trainer: test_trainer.py


def stub(launcher: str, folder: Path, fault: str = "", steps: int = 2000) -> tuple[Foreign, Path]:
    run = make_run(folder)
    return start(launcher, str(STUB), str(run), str(steps), fault, cwd=folder), run


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        pytest.param(launcher, kind, marks=[] if (launcher, kind) in QUICK else pytest.mark.slow)
        for launcher in LAUNCHERS
        for kind in FAULTS
    ],
)
def test_the_cause_has_the_last_word(launcher: str, kind: str, tmp_path: Path) -> None:
    rank = len(kind) % 2
    foreign, run = stub(launcher, tmp_path, f"{kind}@rank={rank},step={STEP}")
    code, output = foreign.finish()
    assert code == 1, "theirs, whatever we do"
    exit_code, cause = FAULTS[kind]
    block = last_block(output)
    assert block[0] == f"[FAILURE] Training failed on GPU {rank}", output
    assert len(block) <= 5
    assert cause in block[1]
    assert f"step {STEP}, forward" in block[1]
    record = failure_of(run)
    assert (record["exit_code"], record["rank"], record["step"], record["section"]) == (
        exit_code,
        rank,
        STEP,
        "forward",
    )
    if exit_code == 124:
        assert any("stub.py" in line for line in record["trace"]), "its stack"
        stacks = sorted(path.read_text() for path in run.glob("workers/*/stacks.txt"))
        assert len(stacks) == 2, "everyone's stack is kept"
    assert foreign.survivors() == []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("torchrun", signal.SIGUSR1),
        pytest.param("torchrun", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("accelerate", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("accelerate", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_nobody_outlives_the_launcher(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    foreign, run = stub(launcher, tmp_path)
    wait_for([run / "pid.0", run / "pid.1"])
    foreign.process.send_signal(number)
    assert foreign.finish()[0] == -number
    assert foreign.survivors(guardian.GRACE_SECONDS + 2) == []


@pytest.mark.ranks
def test_a_healthy_run_does_without_its_guardian(tmp_path: Path) -> None:
    foreign, run = stub("torchrun", tmp_path, steps=60)
    wait_for([run / "pid.0", run / "pid.1"])
    deadline = time.monotonic() + 30
    while not (found := guardians(foreign.run_id)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(found) == 1, "one for both workers"
    os.kill(found[0], signal.SIGKILL)
    code, output = foreign.finish()
    assert (code, last_block(output)) == (0, [])
    assert (run / "at.1.59").exists()
    assert foreign.survivors() == []


@pytest.mark.ranks
def test_a_stop_that_only_the_launcher_saw_is_no_failure(tmp_path: Path) -> None:
    """The launcher asks how its workers ended before a late guardian can: what they have written is all it knows."""
    foreign, run = stub("torchrun", tmp_path)
    wait_for([run / "pid.0", run / "pid.1"])
    deadline = time.monotonic() + 60
    while not (run / f"at.1.{STEP}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (late,) = guardians(foreign.run_id)
    os.kill(late, signal.SIGSTOP)
    foreign.process.send_signal(signal.SIGTERM)
    foreign.process.wait(60)
    workers = [Path("/proc", (run / f"pid.{rank}").read_text().split()[0]) for rank in (0, 1)]
    assert not [path for path in workers if path.exists()], "nobody is left to be asked"
    os.kill(late, signal.SIGCONT)
    assert foreign.finish()[0] == 1, "theirs, whatever we do"
    assert foreign.survivors() == []
    assert not (run / "failure.json").exists()


def guardians(run_id: str) -> list[int]:
    from lockstep.launch import processes

    found = {pid: Path(f"/proc/{pid}/cmdline") for pid in processes.of_run(run_id)}
    return [pid for pid, path in found.items() if path.exists() and b"launch.guardian" in path.read_bytes()]


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    common_folder.own(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    common_folder.own(folder)
    folder.chmod(0o770)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for bad in (folder, link, tmp_path / "file"):
        with pytest.raises(OutputError, match="not ours"):
            common_folder.own(bad)


def test_what_a_dead_launcher_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: not what a living process holds, though we cannot see its launcher (a container's /proc)."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = f"lockstep-{os.getuid()}-"
    names = (f"{mine}4194304-a", f"{mine}4194304-b", f"{mine}{os.getpid()}-c", "lockstep-x")
    stale, held, living, other = (tmp_path / name for name in names)
    for folder in (stale, held, living, other):
        folder.mkdir(mode=0o700)
        (folder / common_folder.ALIVE).touch()
    common_folder.hold(held)
    common_folder.sweep()
    assert [folder.exists() for folder in (stale, held, living, other)] == [False, True, True, True]


ASK = "from lockstep.launch import guardian; print(guardian.find_agent(guardian.ELASTIC))"
JOIN = (
    "from lockstep.launch import guardian; from lockstep.runtime.env import Env; guardian.enlist(Env(rank=1, world=2))"
)


def test_shells_between_launcher_and_worker_are_seen_through() -> None:
    """`torchrun --no-python ./w.sh` without exec: the agent is further up."""
    command = ["bash", "-c", 'bash -c "$0; true"; true', f"{sys.executable} -c '{ASK}'"]
    environ = {**os.environ, guardian.ELASTIC: "here"}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert int(answer.stdout) == os.getpid()


def test_an_orphan_says_why_it_ends(tmp_path: Path) -> None:
    """Who has inherited it (a shell here, PID 1 elsewhere) has no such variable and is no Python program."""
    command = ["bash", "-c", f"{guardian.ELASTIC}=here {sys.executable} -c '{JOIN}'; exit $?"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert answer.returncode == 143
    said = "lockstep: the launcher of rank 1 is gone: nothing was begun\n"
    assert answer.stderr == f"{said}  try: unset TORCHELASTIC_RUN_ID RANK WORLD_SIZE\n"


@pytest.mark.slow
@pytest.mark.ranks
def test_healthy_workers_behind_a_shell_script(tmp_path: Path) -> None:
    run, script = make_run(tmp_path), tmp_path / "w.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} {STUB} {run} 20\nexit $?\n")
    script.chmod(0o755)
    foreign = start("torchrun", "--no-python", str(script), cwd=tmp_path)
    code, output = foreign.finish()
    assert (code, last_block(output)) == (0, []), output
    assert foreign.survivors() == []


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[guardian.Guardian, subprocess.Popen[bytes]]]:
    """A guardian of two silent workers, and their launcher."""
    beats.create(tmp_path, 2).close()
    (tmp_path / link.LIMIT).write_text(str(LIMIT_SECONDS))
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    for slot, worker in enumerate(sleepers[1:]):
        beats.Slot(tmp_path / beats.FILE, slot).attach(worker.pid, rank=slot, tag=f"GPU{slot}", dumps=False)
        beats.Slot(tmp_path / beats.FILE, slot).mark(beats.INDEX["forward"], 3)
    keeper = guardian.Guardian(tmp_path, 2, sleepers[0].pid, node=0, nodes=1, launcher="torchrun")
    keeper._meet()
    yield keeper, sleepers[0]
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()
    for worker in (*keeper.workers.values(), *([keeper.agent] if keeper.agent else [])):
        os.close(worker.handle)
    os.close(keeper.screen)
    keeper.beats.close()


def test_a_launcher_in_the_background_is_not_judged(
    watched: tuple[guardian.Guardian, subprocess.Popen[bytes]],
) -> None:
    """Ctrl-Z: nobody hangs, not even when it goes on; silence counts from there."""
    keeper, agent = watched
    agent.send_signal(signal.SIGSTOP)
    while watchdog.process_state(agent.pid) != "T":
        time.sleep(0.01)
    time.sleep(LIMIT_SECONDS + 0.1)
    keeper._look_for_hang()
    assert keeper.record is None
    agent.send_signal(signal.SIGCONT)
    while watchdog.process_state(agent.pid) == "T":
        time.sleep(0.01)
    keeper._look_for_hang()
    assert keeper.record is None
    time.sleep(LIMIT_SECONDS + 0.1)
    keeper._look_for_hang()
    assert keeper.record is not None
    assert keeper.record["kind"] == "hang"


@pytest.mark.parametrize("stop_first", [True, False])
def test_to_lose_a_peer_that_was_stopped_is_no_failure(
    watched: tuple[guardian.Guardian, subprocess.Popen[bytes]], stop_first: bool
) -> None:
    """But torchrun ends the others with SIGTERM after any failure: a stop that comes later excuses nobody."""
    keeper, _agent = watched
    told = {"secondary": True, "cause": "connection closed by peer", "kind": "lost_peer"}
    link.failure_path(keeper.folder, 1).write_text(json.dumps(told))
    for slot, code in ((0, 143), (1, 1)) if stop_first else ((1, 1), (0, 143)):
        keeper._add_end(slot, code, 0)
    keeper._blame_first()
    assert (keeper.record is None) == stop_first


def test_a_damaged_list_of_nodes_is_no_reason_to_die(
    watched: tuple[guardian.Guardian, subprocess.Popen[bytes]],
) -> None:
    keeper, _agent = watched
    for text in ("[1]", '[{"node": 1}]', "{", '{"node": 1}'):
        (keeper.folder / "nodes.json").write_text(text)
        assert keeper._silent_nodes() == []


def test_by_hand_the_next_try_is_as_new(watched: tuple[guardian.Guardian, subprocess.Popen[bytes]]) -> None:
    """One of two was started and ended with Ctrl-C: its guardian waits for no other as long as the shell lives."""
    keeper, _agent = watched
    keeper.workers.pop(1)
    keeper.met.remove(1)
    keeper.workers[0].send(signal.SIGKILL)
    while not keeper._wait(1.0):
        pass
    keeper.workers[0].code = int(ExitCode.INTERRUPTED)
    assert keeper.over
    keeper.by_hand = False
    assert not keeper.over, "torchrun starts the other one sooner or later"


def test_a_folder_is_discarded_when_nobody_needs_it(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    needs = (
        "import pathlib, sys; from lockstep.launch import common_folder; common_folder.hold(pathlib.Path(sys.argv[1]))"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{needs}; print(flush=True); input()", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    common_folder.discard(folder)
    assert folder.is_dir(), "it lives"
    holder.kill()
    holder.communicate()
    common_folder.discard(folder)
    assert not folder.exists()
    common_folder.discard(folder)


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_the_shell_of_a_person_who_started_a_worker_is_left_alone(
    watched: tuple[guardian.Guardian, subprocess.Popen[bytes]], by_torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RANK=0 WORLD_SIZE=2 lockstep train, typed: its failure is said at once. torchrun without workers is ended."""
    keeper, agent = watched
    assert keeper.by_hand, "there is no variable of torchrun's here"
    keeper.by_hand = not by_torchrun
    for name in ("LONELY_SECONDS", "GRACE_SECONDS", "AGENT_SECONDS"):
        monkeypatch.setattr(guardian, name, 0.2)
    keeper.nodes = 2
    for slot in (0, 1):
        keeper._add_end(slot, 2, 0)
    keeper._blame_first()
    keeper._say()
    if by_torchrun:
        assert agent.wait(30) < 0, "ended by a signal"
    else:
        time.sleep(0.1)
        assert agent.poll() is None
