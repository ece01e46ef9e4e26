"""Processes of a check: one that dies or hangs costs itself alone, and nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lockstep.check.crew import LOG, Crew, Ending, Member, Task
from lockstep.errors import ExitCode, Stopped
from lockstep.launch import processes

STUB = Path(__file__).parent / "stub.py"
PATIENCE_SECONDS = 8.0  # a busy machine is slow to start seven interpreters


def task(folder: Path, how: str, *, steps: int = 3) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "fingerprint.jsonl"
    command = (sys.executable, str(STUB), str(record), str(steps), how)
    return Task(folder.name, command, dict(os.environ), folder, record=record)


def run(crew: Crew, *tasks: Task) -> list[Ending]:
    return crew.run(tasks, patience_seconds=PATIENCE_SECONDS, tell=lambda _: None)


def wait_until(happened: Callable[[], bool]) -> None:
    """A minute at most."""
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)


def alive_of(crew: Crew) -> list[int]:
    return processes.of_run(crew._run_id)


def test_one_that_dies_or_hangs_costs_itself_alone(tmp_path: Path) -> None:
    hows = ("fine", "kill", "segv", "stop", "hang", "rubbish", "raise")
    with Crew() as crew:
        fine, kill, segv, stop, hang, rubbish, wrong = run(crew, *(task(tmp_path / how, how) for how in hows))
        assert alive_of(crew) == []
    assert fine == Ending(0, "", ("the stub speaks",))
    assert (kill.code, segv.code) == (137, 139)
    assert kill.error.startswith("killed by SIGKILL")
    assert segv.error.startswith("killed by SIGSEGV")
    for ending in (stop, hang, rubbish):
        assert ending.code == 137, "it was ended"
        assert ending.error.startswith("hangs in llama at step 3: nothing for ")
    assert wrong.code == 1
    assert "RuntimeError: the stub gives up" in wrong.error
    assert "RuntimeError: the stub gives up" in (tmp_path / "raise" / LOG).read_text()


@pytest.mark.slow
def test_who_writes_is_not_silent(tmp_path: Path) -> None:
    """Negative control of the patience: longer than it in all, never so long without a line."""
    with Crew() as crew:
        [ending] = run(crew, task(tmp_path / "slow", "fine", steps=int(1.5 * PATIENCE_SECONDS / 0.01)))
    assert ending.error == ""


def test_the_place_of_a_replica_is_told(tmp_path: Path) -> None:
    seen: list[str] = []

    def tell(members: Sequence[Member]) -> None:
        seen.append(f"{members[0].place} {members[0].place.done}")

    with Crew() as crew:
        crew.run([task(tmp_path / "fine", "fine")], patience_seconds=60, tell=tell)
    assert seen[-1] == "in llama at step 3 1"


def test_a_child_that_ran_away_is_ended(tmp_path: Path) -> None:
    with Crew() as crew:
        run(crew, task(tmp_path / "fork", "fork"))
        assert len(alive_of(crew)) == 1, "the test is real: it is there"
    assert alive_of(crew) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_signal_ends_all(tmp_path: Path, number: signal.Signals, code: ExitCode) -> None:
    crew = Crew()
    tasks = [task(tmp_path / "hang", "hang"), task(tmp_path / "stop", "stop")]

    def interrupt() -> None:
        wait_until(lambda: all(each.record and each.record.exists() for each in tasks))
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Stopped) as stopped, crew:
        crew.run(tasks, patience_seconds=60, tell=lambda _: None)
    assert stopped.value.exit_code == code
    assert alive_of(crew) == []
    assert not crew.work.exists()


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.check.test_crew import Crew, task
crew = Crew()
print(crew._run_id, crew.work, flush=True)
crew.run([task(Path({folder!r}) / "hang", "hang")], patience_seconds=60, tell=lambda _: None)
"""


def test_a_conductor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = KILLED.format(root=str(STUB.parents[2]), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as conductor:
        assert conductor.stdout is not None
        run_id, work = conductor.stdout.readline().split()
        wait_until((tmp_path / "hang/fingerprint.jsonl").exists)
        assert processes.of_run(run_id)
        conductor.kill()
    wait_until(lambda: not processes.of_run(run_id) and not Path(work).exists())
    assert processes.of_run(run_id) == []
    assert not Path(work).exists()
