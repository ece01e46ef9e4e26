"""lockstep status and stop, against real processes that play a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import status
from lockstep.engine import folder
from lockstep.errors import LockstepError
from lockstep.report.standing import read, tail_events
from lockstep.rundir import RunDir
from lockstep.runtime import owner
from tests.run_player import heartbeat, make, playing

START = {"kind": "start", "step": 0}
STEP = {"kind": "step", "step": 6, "loss": 2.5, "tokens": 10, "seconds": 0.1}


@pytest.fixture
def runs(in_dir: Path) -> Path:
    return in_dir / "runs"


def own(root: Path, **changed: Any) -> None:
    """Say that this process runs it, with some of the record changed."""
    owner.write(root, ["lockstep", "train"])
    path = root / owner.FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changed), encoding="utf-8")


def end(code: int) -> dict[str, Any]:
    return {"kind": "end", "step": 7, "exit_code": code}


# ------------------------------------------------------------------------------------------------ status


def test_a_running_run(runs: Path) -> None:
    with playing(runs / "mine") as child:
        folder = heartbeat(runs / "mine", "n0-GPU0", pid=1, section="forward", step=5, age=0.2)
        heartbeat(runs / "mine", "n0-GPU10", pid=2, section="communication", step=5, age=1.2)
        heartbeat(runs / "mine", "n0-GPU2", pid=3, section="data", step=4, age=1.2)
        facts = {"gpu_utilisation": 97, "gpu_memory_used_bytes": 21 << 30, "gpu_temperature_c": 61}
        (folder / "gpu.jsonl").write_text(json.dumps({"time": time.time(), **facts}) + "\n")
        first, second, third, empty, heads, *workers = status.status(runs / "mine").splitlines()
    assert first == "mine  running"
    assert second == "  step 5/100, loss 2.6000, 2,000 tokens/s, ETA 0:47"
    assert third == f"  process {child.pid} on {socket.gethostname()}"
    assert empty == ""
    assert heads.split() == ["worker", "section", "step", "last", "sign", "busy", "memory", "temperature"]
    assert [line.split()[0] for line in workers] == ["GPU0", "GPU2", "GPU10"]
    assert workers[0].split()[1:3] == ["forward", "5"]
    assert workers[0].endswith("97 %  21.0 GiB  61 °C")
    assert "%" not in workers[1]


def test_workers_of_an_earlier_attempt_are_not_listed(runs: Path) -> None:
    """Three have trained, two go on: what the third did last is told no more. Without a launcher nothing is."""
    root = make(runs / "mine", START, STEP)
    for number in range(3):
        heartbeat(root, f"n0-GPU{number}", section="forward", step=4, age=0)
    folder.tidy(RunDir(root))
    assert "forward" not in status.status(root)
    for number in range(2):
        heartbeat(root, f"n0-GPU{number}", section="data", step=6, age=0)
    assert [(worker.name, worker.section) for worker in read(root).workers] == [
        ("n0-GPU0", "data"),
        ("n0-GPU1", "data"),
    ]


def test_a_heartbeat_grows_older_while_nobody_writes_it(runs: Path) -> None:
    root = make(runs / "mine", START)
    own(root)
    heartbeat(root, "n0-GPU0", section="data", step=1, age=2, time=time.time() - 100)
    (worker,) = read(root).workers
    assert worker.age_seconds is not None
    assert 101 < worker.age_seconds < 120


@pytest.mark.parametrize(
    ("events", "life", "code"),
    [
        ([START, STEP, end(0)], "done", 0),
        ([START, STEP, end(143)], "stopped", 143),
        ([START, STEP, end(130)], "stopped", 130),
        ([START, STEP, end(75)], "stopped", 75),
        ([START, STEP, {"kind": "fault", "exit_code": 71, "cause": "NaN"}], "failed", 71),
        ([START, STEP], "dead", None),
        ([START, STEP, end(143), START, {"kind": "resume", "step": 7}], "dead", None),
        ([], "dead", None),
    ],
)
def test_how_a_run_ended(runs: Path, events: list[dict[str, Any]], life: str, code: int | None) -> None:
    root = make(runs / "mine", *events)
    own(root, identity="another boot:1")
    state = read(root)
    assert (state.life, state.exit_code) == (life, code)
    own(root)
    assert read(root).life == "running", "the same files, and its process is there"


def test_a_worker_that_was_killed_leaves_its_word_to_the_launcher(runs: Path) -> None:
    root = make(runs / "mine", START, STEP)
    own(root, identity="another boot:1")
    failure = {"exit_code": 137, "cause": "killed by SIGKILL\nmore", "gpu": "GPU1"}
    (root / "failure.json").write_text(json.dumps(failure))
    text = status.status(runs / "mine")
    assert text.startswith("mine  failed (exit 137)\n  step 7/100")
    assert "cause: GPU1: killed by SIGKILL\n" in text
    assert "nothing was saved" in text


def test_a_torn_file_is_no_reason_to_fail(runs: Path) -> None:
    root = make(runs / "mine", START, STEP)
    with (root / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "st\n[1]\n\xff\n{"kind": 3}\n{"step": 1}\n')
    for name in ("owner.json", "failure.json", "config.json"):
        (root / name).write_text("[" * 100_000 if name == "owner.json" else '{"a')
    heartbeat(root, "n0-GPU0")
    (root / "workers" / "n0-GPU0" / "heartbeat").write_text("")
    assert status.status(runs / "mine").startswith("mine  dead")


def test_the_end_of_a_long_record_is_enough(runs: Path) -> None:
    steps = [STEP | {"step": at, "text": "x" * 500} for at in range(1000)]
    root = make(runs / "mine", START, *steps, end(0) | {"step": 1000})
    assert len(tail_events(root / "events.jsonl")) < 400
    assert read(root).finished_steps == 1000


def test_the_list_has_running_ones_first_and_newest_first(runs: Path) -> None:
    for at, name in enumerate(("old", "alive", "new")):
        root = make(runs / name, START, STEP, *([] if name == "alive" else [end(0)]))
        os.utime(root / "config.json", (at, at))
    own(runs / "alive")
    heads, *rows = status.status().splitlines()
    assert heads.split() == ["run", "state", "step"]
    assert [row.split()[:2] for row in rows] == [["alive", "running"], ["new", "done"], ["old", "done"]]


def test_no_run_at_all(in_dir: Path) -> None:
    assert "lockstep train llama demo" in status.status()


def test_what_was_refused_is_counted_and_not_listed(runs: Path) -> None:
    """A path mistyped ten times is no ten runs; one that has made steps is a run whatever ended it."""
    for number in range(status.SHOWN_RUNS + 5):
        make(runs / f"typo-{number}", START, end(66) | {"step": 0})
    only = status.status()
    assert only.splitlines() == [
        f"no run in {runs.name}/ yet", "(25 refused before the first step)", "  try: lockstep train llama demo",
    ]  # fmt: skip
    make(runs / "begun", START, STEP, end(66) | {"step": 7})
    make(runs / "failed", START, end(1) | {"step": 0})
    _, *rows, last = status.status().splitlines()
    assert sorted(row.split()[0] for row in rows) == ["begun", "failed"]
    assert last == "(25 refused before the first step)"


# ------------------------------------------------------------------------------------------------ stop


def test_stop_ends_it_and_says_where_it_was_saved(runs: Path) -> None:
    with playing(runs / "mine") as child:
        text = status.stop(runs / "mine", timeout=30)[0]
        assert child.wait(timeout=5) == 143
    assert text.startswith("mine: stopped (exit 143), step 5/100")
    assert f"saved: {runs}/mine/checkpoints/step_00000005" in text
    assert f"lockstep resume {runs}/mine" in text
    again = status.stop(runs / "mine")[0]
    assert again.startswith("mine is not running: stopped (exit 143)")


def test_a_run_that_does_not_listen(runs: Path) -> None:
    with playing(runs / "mine", "deaf") as child:
        with pytest.raises(LockstepError, match=r"has not ended after 0\.3 s") as caught:
            status.stop(runs / "mine", timeout=0.3)
        assert "--timeout" in caught.value.hint
        assert child.poll() is None


def test_without_pidfd_it_works_too(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with playing(runs / "mine") as child:
        reaper = threading.Thread(target=child.wait)
        reaper.start()
        assert status.stop(runs / "mine", timeout=30)[0].startswith("mine: stopped")
        reaper.join()


@pytest.mark.parametrize("marks", ["identity", "process_started", "started"])
def test_a_recycled_pid_is_never_signalled(runs: Path, marks: str) -> None:
    """The record names a process that is there, but is not the one that wrote it."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        root = make(runs / "mine", START, STEP)
        long_ago = {"identity": "", "started": time.time() - 1000}
        others: dict[str, dict[str, Any]] = {
            "identity": {"identity": owner._identity(os.getpid()) + "0"},
            "process_started": {"identity": "", "process_started": time.time() - 1000},
            "started": long_ago,
        }
        own(root, pid=stranger.pid, **others[marks])
        assert status.stop(runs / "mine")[0].startswith("mine is not running: dead")
        record = owner.read(root)
        assert record
        assert record.terminate(0.1), "gone, as far as the run is concerned"
        time.sleep(0.1)
        assert stranger.poll() is None
        owner.write(root, ["x"], pid=stranger.pid)
        assert read(root).life == "running", "the control: the same process with its own marks"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_that_only_waits_to_be_collected_is_gone(runs: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    root = make(runs / "mine", START)
    owner.write(root, ["x"], pid=child.pid)
    assert read(root).life == "running"
    assert child.stdin
    child.stdin.close()
    end_of_wait = time.monotonic() + 10
    while read(root).is_running and time.monotonic() < end_of_wait:
        time.sleep(0.02)
    assert read(root).life == "dead"
    child.wait()


def test_another_machine_is_named(runs: Path) -> None:
    root = make(runs / "mine", START, STEP)
    own(root, host="node-17")
    assert "running on node-17" in status.status(runs / "mine")
    with pytest.raises(LockstepError, match="node-17") as caught:
        status.stop(runs / "mine")[0]
    assert caught.value.hint == f"ssh node-17 kill -TERM {os.getpid()}"
    make(root, START, STEP, end(0))
    assert status.stop(runs / "mine")[0].startswith("mine is not running: done"), (
        "its own word that it has ended is enough"
    )


def test_the_record_holds_no_secret(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_owner")
    root = make(runs / "mine")
    owner.write(root, ["lockstep", "train", "--hf-token", "hf_canary_owner"])
    assert "hf_canary" not in (root / owner.FILE).read_text()
    record = owner.read(root)
    assert record
    assert record.command == "lockstep train --hf-token ***"
