"""Starting again: after which failures, how often, and in which run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ExitCode, Stopped
from lockstep.launch import between_rounds, restarting, supervise
from lockstep.launch.supervise import Outcome
from lockstep.rundir import RunDir, set_aside
from lockstep.runtime import faults, owner, rounds, signals
from tests.launch import harness
from tests.launch.launcher import stub_procs
from tests.launch.test_faults import LAUNCHER, ROOT

CRASH = {"exit_code": 137, "kind": "signal", "cause": "killed by SIGKILL"}


def failed(run: Path | None = None, *, stop: int = 0, **changes: Any) -> Outcome:
    record = CRASH | changes
    if run:
        RunDir(run).failure.write_text(json.dumps(record))
    return Outcome(int(record["exit_code"]), record, run, stop=stop)


class Trial:
    """Attempts that end as planned; what they were told, what was said, how long the pauses were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Outcome) -> None:
        self.told: list[Mapping[str, str]] = []
        self.said: list[str] = []
        self.pauses: list[float] = []
        self.ends = ends
        monkeypatch.setattr(time, "sleep", self.pauses.append)

    def __call__(self, variables: Mapping[str, str]) -> Outcome:
        self.told.append(variables)
        return self.ends[min(len(self.told), len(self.ends)) - 1]

    def run(self, most: int, node: int = 0) -> int:
        return restarting.keep_running(self, most=most, node=node, say=self.said.append)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


DOCUMENTED = [  # exit code, kind, whether it is restarted: the table of docs/launching.md, and every code there is
    (137, "signal", True), (137, "memory", True), (139, "signal", True), (134, "signal", True),
    (1, "exception", True), (1, "exit", True), (7, "exit", True), (1, "lost_peer", True),
    (124, "hang", True), (124, "lost_peer", True), (74, "io", True),
    (1, "memory", False), (74, "disk_full", False),
    *((code, "exception", False) for code in (2, 3, 65, 66, 73, 75, 130, 143)), (71, "nonfinite", False),
]  # fmt: skip


@pytest.mark.parametrize(("code", "kind", "again"), DOCUMENTED)
def test_which_failures_are_answered(
    monkeypatch: pytest.MonkeyPatch, run: Path, code: int, kind: str, again: bool
) -> None:
    trial = Trial(monkeypatch, failed(run, exit_code=code, kind=kind), Outcome(0, run=run))
    assert trial.run(1) == (0 if again else code)
    assert len(trial.told) == 1 + again
    assert [line.startswith("[RESTART] 1 of 1 in 5 s, after: killed") for line in trial.said] == [again]


def test_the_table_is_in_the_docs() -> None:
    """Each row has the exit codes and kinds that it speaks of, and every code is in one."""
    text = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (yes|no) \|$", text[text.index("| failure | restarted |") :], re.MULTILINE)
    named: dict[int, set[bool]] = {}
    for words, answer in rows:
        kinds = re.findall(r"kind `(\w+)`", words)
        for code in map(int, re.findall(r"\b\d+\b", words)):
            named.setdefault(code, set()).add(answer == "yes")
            kind = next((kind for kind in kinds if (code, kind) in restarting.IN_VAIN), "exception")
            assert bool(restarting.why_not(code, kind)) == (answer == "no"), (words, code, kind)
    assert set(named) == {int(code) for code in ExitCode} - {0}
    assert named[74] == {True, False}


def test_so_often_and_not_more(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    trial = Trial(monkeypatch, failed(run))
    assert trial.run(3) == 137
    assert trial.pauses == [5, 5, 5]
    assert [variables[rounds.NUMBER] for variables in trial.told] == ["0/3", "1/3", "2/3", "3/3"]
    assert trial.said[-1] == "  restarts: 3 of 3 made; exit code 137 is the last"
    assert harness.failure(run)["cause"] == CRASH["cause"]


def test_without_the_flag_there_is_one_attempt(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    trial = Trial(monkeypatch, failed(run))
    assert trial.run(0) == 137
    assert (trial.told, trial.said) == ([{}], [])


def test_a_stop_that_was_asked_for_is_one(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    """Also where a worker crashed on the way out."""
    trial = Trial(monkeypatch, failed(run, stop=signal.SIGINT))
    assert trial.run(3) == 137
    assert trial.said == ["  restarts: 0 of 3 made; not restarted, it was asked to stop"]
    stopped = Trial(monkeypatch, Outcome(143, run=run))
    assert (stopped.run(3), stopped.said) == (143, [])


def test_another_machine_may_know_better(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    """Of NaN on the first machine the second one sees only that its peer is gone; what the first has written counts."""
    lost = failed(exit_code=1, kind="lost_peer", cause="lost contact")
    failed(run, exit_code=71, kind="nonfinite")
    first = Trial(monkeypatch, Outcome(1, lost.failure, run))
    assert first.run(3, node=1) == 1
    assert "not restarted, the same step would be NaN" in first.said[-1]
    assert harness.failure(run)["exit_code"] == 71, "the first machine's word is left alone"
    failed(run)
    second = Trial(monkeypatch, Outcome(1, lost.failure, run), Outcome(0, run=run))
    assert second.run(3, node=1) == 0


def test_a_signal_ends_the_pause(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with its own code; meanwhile `lockstep stop` finds this process."""
    seen: list[int] = []
    monkeypatch.setattr(restarting, "PAUSE_SECONDS", 60.0)  # however late a busy machine is, that is longer

    def interrupt() -> None:
        while not (found := owner.read(run)):
            time.sleep(0.005)
        seen.append(found.pid)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    began = time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with signals.listening(), pytest.raises(Stopped) as stopped:
        restarting.keep_running(lambda _: failed(run), most=3, node=0, say=lambda _: None)
    assert time.monotonic() - began < 30
    assert stopped.value.exit_code == ExitCode.TERMINATED
    assert seen == [os.getpid()]


def test_failures_are_kept_in_order(run: Path) -> None:
    for code in (137, 139):
        failed(run, exit_code=code)
        set_aside(RunDir(run))
    set_aside(RunDir(run))  # nothing to keep
    kept = sorted(RunDir(run).failures.iterdir())
    assert [path.name for path in kept] == ["001.json", "002.json"]
    assert [json.loads(path.read_text())["exit_code"] for path in kept] == [137, 139]


def test_the_round_decides_which_faults_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "kill@step=7,round=0;hang@step=9,round=1"
    for number, kinds in (("0/2", ["kill"]), ("1/2", ["hang"]), ("2/2", [])):
        monkeypatch.setenv(rounds.NUMBER, number)
        assert [fault.kind for fault in faults.plan(text).faults] == kinds
    monkeypatch.delenv(rounds.NUMBER)
    monkeypatch.setenv(rounds.ELASTIC_NUMBER, "1")
    monkeypatch.setenv(rounds.ELASTIC_MOST, "2")
    assert [fault.kind for fault in faults.plan(text).faults] == ["hang"]
    assert not rounds.current().is_last


def test_what_a_round_leaves_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under torchrun, too: the run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(between_rounds.tempfile, "tempdir", None)
    monkeypatch.setenv(rounds.ELASTIC_NUMBER, "0")
    monkeypatch.setenv(rounds.ELASTIC_MOST, "2")
    between_rounds._folder.cache_clear()
    try:
        between_rounds.keep_run(Path("runs/mine"))
        assert between_rounds.kept_run() is None, "the first round begins a run"
        monkeypatch.setenv(rounds.ELASTIC_NUMBER, "1")
        assert between_rounds.kept_run() == Path("runs/mine")
    finally:
        between_rounds._folder.cache_clear()


def start(run: Path, *, fault: str, pause: float = 0.1) -> harness.Job:
    command = (*LAUNCHER, "2", str(run), "restarts=2", f"pause={pause}")
    return harness.start(command, cwd=ROOT, LOCKSTEP_FAULT=fault, STUB_OPTIONS="steps=20")


def test_real_processes_are_started_again(tmp_path: Path) -> None:
    """A worker is killed, and crashes in the next round; the third is done. Nobody is left of any round."""
    ended = start(tmp_path / "run", fault="kill@rank=1,step=7,round=0;kill@rank=1,step=3,round=1,signal=11").finish(30)
    assert ended.code == 0, ended.out
    ended.check_clean()
    lines = [line for line in ended.out.splitlines() if line.startswith("[RESTART]")]
    assert ["1 of 2 in 0.1 s" in lines[0], "2 of 2 in 0.1 s" in lines[1], len(lines)] == [True, True, 2]
    assert "SIGKILL" in lines[0]
    assert "SIGSEGV" in lines[1]
    output = (tmp_path / "run/workers/n0-GPU1/output.txt").read_text()
    assert output.count("Step [0] rank 1") == 3, "the log goes on"


def test_a_stop_ends_real_processes_between_rounds(tmp_path: Path) -> None:
    job = start(tmp_path / "run", fault="kill@rank=1,step=7,round=0", pause=60)
    job.wait_for("[RESTART]")
    job.send(signal.SIGUSR1)
    ended = job.finish(30)  # less than the pause
    assert ended.code == 75, ended.out
    ended.check_clean()


def test_a_crash_after_a_stop_is_not_answered(tmp_path: Path) -> None:
    """It was asked to stop, goes on for some steps, and crashes in one of them."""
    command = (*LAUNCHER, "2", str(tmp_path / "run"), "restarts=2", "pause=0.1")
    options = {"LOCKSTEP_FAULT": "exit@rank=1,step=150,code=9", "STUB_OPTIONS": "steps=500,lag=300"}
    job = harness.start(command, cwd=ROOT, **options)
    job.wait_for("[GPU1] Step [1]")
    job.send(signal.SIGTERM)
    ended = job.finish(30)
    assert (ended.code, "[RESTART]" in ended.out) == (9, False), ended.out
    assert "restarts: 0 of 2 made; not restarted, it was asked to stop" in ended.out


def test_a_stop_while_the_last_are_cleared_away_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crashed(self: Any, procs: object) -> Outcome:
        self.team.inbox.received.append(signal.SIGTERM)
        return failed()

    monkeypatch.setattr(supervise._Supervisor, "run", crashed)
    work = tmp_path / "work"
    work.mkdir()
    procs = stub_procs(1, tmp_path, work)
    assert supervise.supervise(procs, supervise.Watch(), work, lambda _: None).stop


def test_a_stop_that_a_helper_no_longer_hears_is_told(tmp_path: Path) -> None:
    """One that has done its work lets no Ctrl-C disturb its end; who has sent it still means what comes next."""
    deaf = "import os, signal; signal.signal(2, signal.SIG_IGN); os.kill(os.getppid(), 2); import time; time.sleep(0.3)"
    work = tmp_path / "work"
    work.mkdir()
    proc = supervise.Proc(tag="", slots=(0,), command=(sys.executable, "-c", deaf), environ=dict(os.environ))
    told = supervise.supervise([proc], supervise.Watch(show="all"), work, lambda _: None)
    assert (told.exit_code, told.stop) == (0, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_at_any_moment_is_final(tmp_path: Path, number: signal.Signals) -> None:
    """Between the failure and the next round: while workers are ended, in the pause, or right after it."""

    def one(trial: int) -> None:
        job = start(tmp_path / str(trial), fault="kill@rank=1,step=2", pause=0.5)
        job.wait_for("[GPU1] Step [1]")
        time.sleep(trial * 0.07)
        job.send(number)
        ended = job.finish(30)
        assert ended.code in (137, {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 75}[number]), ended.out
        after = ended.out.count("[RESTART]")
        assert after <= 2
        assert ended.seconds < 6, "no further round was begun"
        ended.check_clean()

    harness.many(30, one)
