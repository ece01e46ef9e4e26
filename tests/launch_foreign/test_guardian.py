"""torchrun and accelerate as the user types them: the cause on the last lines, nobody left, whatever happens.

The workers have no torch (stub.py); the launchers are the real ones.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from lockstep.errors import OutputError
from lockstep.launch import guardian
from tests.launch_foreign.foreign import LAUNCHERS, STUB, Foreign, failure_of, last_block, make_run, start, wait_for

FAULTS = {  # kind -> (exit code, words of the cause)
    "kill": (137, "killed by SIGKILL (out of memory?)"),
    "exit": (7, "exited with code 7"),
    "raise": (1, "ValueError: on purpose"),
    "hang": (124, "hangs: no sign of life"),
    "stop": (124, "is stopped (SIGSTOP)"),
    "gil": (124, "hangs: no sign of life"),
}
STEP = 50  # a second after attaching: a trainer first loads torch, and the guardian is there long before
QUICK = {("torchrun", "kill"), ("torchrun", "stop"), ("accelerate", "exit")}


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
    deadline = time.monotonic() + 10
    while not (found := guardians(foreign.run_id)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(found) == 1, "one for both workers"
    os.kill(found[0], signal.SIGKILL)
    code, output = foreign.finish()
    assert (code, last_block(output)) == (0, [])
    assert (run / "at.1.59").exists()
    assert foreign.survivors() == []


def guardians(run_id: str) -> list[int]:
    from lockstep.launch import processes

    found = {pid: Path(f"/proc/{pid}/cmdline") for pid in processes.of_run(run_id)}
    return [pid for pid, path in found.items() if path.exists() and b"launch.guardian" in path.read_bytes()]


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    guardian.own(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    guardian.own(folder)
    folder.chmod(0o770)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for bad in (folder, link, tmp_path / "file"):
        with pytest.raises(OutputError, match="not ours"):
            guardian.own(bad)


def test_what_a_dead_launcher_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = f"lockstep-{os.getuid()}-"
    stale, living, other = (tmp_path / name for name in (f"{mine}4194304-a", f"{mine}{os.getpid()}-b", "lockstep-x"))
    for folder in (stale, living, other):
        folder.mkdir()
    guardian.sweep()
    assert [folder.exists() for folder in (stale, living, other)] == [False, True, True]
