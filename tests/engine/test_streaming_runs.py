"""Training on a stream: the same bits as ever, nobody left behind, whatever becomes of the process that adds to it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from lockstep.data import cache
from lockstep.data.stream import chunks_folder
from lockstep.engine import feed, streaming, supply
from lockstep.engine.feed import Feed
from lockstep.errors import DataError, LockstepError, NotFoundError, Stopped
from lockstep.runtime.group import Group
from lockstep.runtime.signals import StopRequest
from tests.conftest import Outcome
from tests.engine.streams import content, write_text
from tests.gates.test_resume import EVERY_STEP, on_rank
from tests.gates.training import Recorder, run
from tests.ranks.conftest import ranks
from tests.ranks.pool import Pool

__all__ = ["ranks"]

STEPS = 12
STORIES = 30

SAYING = """import json, os, sys
job = json.load(sys.stdin)
with open(job["status"], "w") as file:
    json.dump({{"pid": os.getpid(), **{said}}}, file)
sys.exit({code})
"""
ERROR = {"what": "the hub is gone", "where": "hub", "hint": "wait", "code": 66}
GONE = SAYING.format(said={"error": ERROR, "warnings": ["a chunk is damaged"]}, code=66)  # as supply.py tells it
KILLED = "import os; os.kill(os.getpid(), 9)"
LATER = """import os, time
while not os.path.exists({signal!r}):
    time.sleep(0.02)
from lockstep.engine.supply import main
main()
"""


@pytest.fixture
def settings(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """24 rows a step, from a text of a few hundred rows: a head of sixty and some ten chunks."""
    for name, characters in (("HEAD", 4_000), ("FIRST", 1_000), ("LARGEST", 2_000)):
        monkeypatch.setattr(streaming, f"{name}_CHARACTERS", characters)
    write_text(in_dir, STORIES)
    monkeypatch.setenv("DATASET_CACHE_DIR", str(in_dir / "cache"))  # also of ranks
    return {
        **EVERY_STEP,
        "data.dataset_name": "text",
        "data.data_path": str(in_dir / "stories.jsonl"),
        "data.streaming": True,
        "data.tokenizer_name": "bytes",
        "training.context_length": 64,
        "training.batch_size": 12,
        "training.grad_accum_nums": 2,
        "training.max_steps": STEPS,
    }


def base(folder: Path) -> Path:
    (meta,) = folder.glob("cache/*/meta.json")
    return meta.parent


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(in_dir: Path, settings: dict[str, Any]) -> None:
    """Over the end of the text, with other numbers of threads, and once more after all chunks were deleted."""
    before = children()
    few = {**settings, "data.max_train_samples": 26, "training.checkpoint_dir": "files"}
    parts, recorder = run(in_dir / "whole", few)
    assert children() == before
    whole, made = recorder.trace, content(base(in_dir))
    assert len(whole) == STEPS
    assert len({name.split("/")[0] for name in made}) > 2, "the run must go through several chunks"
    assert not list(in_dir.rglob("*.tmp-*"))
    assert parts.rows < (STEPS - 4) * parts.batch_rows, "and over some of them again"
    saved = [torch.load(f"files/step_{step}.pt", weights_only=False)["epoch"] for step in (1, STEPS)]
    assert saved == [0, STEPS * parts.batch_rows // parts.rows], "the end was not known when it began"
    shutil.rmtree(chunks_folder(base(in_dir)))
    for step in (4, 10):
        point = in_dir / "whole" / "checkpoints" / f"step_{step:08d}"
        changed = {**few, "training.save_interval": 0, "data.num_workers": step // 4}
        assert run(in_dir / f"from-{step}", changed, point=point)[1].trace == whole[step:], f"resumed after {step}"
    assert content(base(in_dir)) == made


def waiting(monkeypatch: pytest.MonkeyPatch, action: Callable[[Feed], object]) -> list[Feed]:
    """Do something as soon as a run waits for rows, the child standing still. The feeds that waited."""
    waited: list[Feed] = []
    wait = Feed._wait

    def paused(self: Feed) -> None:
        if not waited:
            waited.append(self)
            action(self)
        wait(self)

    monkeypatch.setattr(Feed, "_wait", paused)
    return waited


def stopped_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child ever gets anywhere."""
    start = feed.Child._start

    def stopped(self: feed.Child) -> Any:
        process = start(self)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(feed.Child, "_start", stopped)


def test_asked_to_stop_while_waiting_it_saves_and_stops(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    stopped_child(monkeypatch)
    stop = StopRequest()
    stop.patient = True
    waited = waiting(monkeypatch, lambda _: stop.receive(signal.SIGTERM, None))
    with pytest.raises(Stopped) as caught:
        run(in_dir / "run", {**settings, "training.save_interval": 0}, stop=stop)
    assert caught.value.exit_code == 143
    assert waited
    (saved,) = (in_dir / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{waited[0]._step:08d}" != "step_00000000"
    assert children() == before


def test_a_child_that_stands_still_is_named(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: after a long silence an error, not a hang."""
    before = children()
    monkeypatch.setattr(supply, "SILENCE_SECONDS", 0.5)
    found: list[int] = []

    def stop(waited: Feed) -> None:
        assert waited.child
        deadline = time.monotonic() + 30
        while not supply.read_beats(waited._status) and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(waited.child.pid)
        os.kill(waited.child.pid, signal.SIGSTOP)

    waiting(monkeypatch, stop)
    with pytest.raises(DataError, match="no sign of life") as caught:
        run(in_dir / "run", settings)
    assert f"process {found[0]} " in str(caught.value)
    assert children() == before


def test_a_child_that_always_dies_is_given_up(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "COMMAND", KILLED)
    monkeypatch.setattr(feed, "RESTARTS", 2)
    with pytest.raises(LockstepError, match="ended by SIGKILL 3 times in a row"):
        run(in_dir / "run", settings)


def test_an_error_of_the_child_is_raised_when_its_rows_are_needed(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the hub is gone: the head is trained on, then it is tried once more; its warnings come to the screen."""
    monkeypatch.setattr(feed, "COMMAND", GONE)
    start, begun = feed.Child._start, list[Any]()

    def started(self: feed.Child) -> Any:
        begun.append(start(self))
        begun[-1].wait()  # it has failed before the first step
        return begun[-1]

    monkeypatch.setattr(feed.Child, "_start", started)
    recorder = Recorder()
    with pytest.raises(LockstepError, match="the hub is gone") as caught:
        run(in_dir / "run", settings, recorder=recorder)
    assert caught.value.exit_code == NotFoundError.exit_code
    assert caught.value.between_steps
    assert caught.value.hint == "wait"
    assert len(recorder.records) == 2, "all rows of the head"
    assert len(begun) == 2
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line for line in told if "the hub is gone" in line] == [line for line in told if "starting again" in line]
    assert sum("starting again" in line for line in told) == 1
    assert told.count("a chunk is damaged") == 2, "of each child"


def test_a_child_that_fails_or_is_killed_is_replaced(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage while there are rows left, then SIGKILL: the run has lost nothing."""
    commands, started = [GONE, KILLED, feed.COMMAND], list[str]()
    start = feed.Child._start

    def next_one(self: feed.Child) -> Any:
        started.append(commands[len(started)])
        monkeypatch.setattr(feed, "COMMAND", started[-1])
        process = start(self)
        if len(started) < 3:
            process.wait()
        return process

    monkeypatch.setattr(feed.Child, "_start", next_one)
    monkeypatch.setattr(feed, "PAUSE_SECONDS", 0.0)
    _, recorder = run(in_dir / "run", {**settings, "training.max_steps": 4, "training.save_interval": 0})
    assert len(recorder.records) == 4
    assert started == commands


def test_a_run_out_of_rows_says_how_to_go_on(
    in_dir: Path, settings: dict[str, Any], lockstep: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "COMMAND", GONE)
    words = [f"{key}={str(value).lower()}" for key, value in settings.items()]
    ended = lockstep("train", "llama", "tiny", *words, "--device", "cpu", "--name", "x", "training.save_interval=0")
    assert ended.code == 66, ended.text
    assert re.search(r"try: wait, then \S*lockstep resume \S*runs/x", ended.text), ended.text
    assert [saved.name for saved in (in_dir / "runs/x/checkpoints").iterdir()] == ["step_00000002"]


def test_nobody_waits_for_chunks_that_are_gone_nor_clears_what_is_read(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All was there when the child looked, which is done and holds no lock: also one of two nodes ends."""
    two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in two.items():
        monkeypatch.setenv(name, value)
    assert feed.env.detect().nodes == 2
    monkeypatch.setattr(feed, "COMMAND", SAYING.format(said={"ready": 9, "done": True}, code=0))
    monkeypatch.setattr(feed, "GONE_SECONDS", 0.3)
    removed: list[list[str]] = []
    waiting(monkeypatch, lambda _: removed.append(cache.clean(in_dir / "cache")))
    with pytest.raises(DataError, match="have gone"):
        run(in_dir / "run", settings)
    assert removed == [[]]
    assert cache.clean(in_dir / "cache"), "but afterwards"


def test_waiting_is_a_sign_of_life(in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog sees a rank that waits for rows mark its section again and again."""
    from lockstep.runtime.marks import NoMarks

    stopped_child(monkeypatch)
    marks: list[str] = []
    monkeypatch.setattr(NoMarks, "enter", lambda _self, section, *_step: marks.append(section))
    stop = StopRequest()
    stop.patient = True
    counted: list[int] = []

    def sleep(_: float) -> None:
        counted.append(len(marks))
        if len(counted) == 5:
            stop.receive(signal.SIGTERM, None)

    monkeypatch.setattr(feed.time, "sleep", sleep)
    with pytest.raises(Stopped):
        run(in_dir / "run", settings, stop=stop)
    assert marks[counted[0] - 1 : counted[4]] == ["data"] * 5


# ------------------------------------------------------------------------------------------------------- several ranks


@pytest.mark.slow  # by default at the end of a stream: test_epochs.py
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_resume_to_the_same_bits(in_dir: Path, settings: dict[str, Any], world: int, ranks: Pool) -> None:
    """The stream is fetched by the first of them; and once more after all chunks were deleted."""
    one = {**settings, "training.batch_size": 12 // world, "training.max_steps": 6}
    run(in_dir / "head", {**one, "training.max_steps": 1})  # with the small chunks of this test
    first, *others = ranks(world, on_rank, in_dir / "whole", one, "llama", None)
    assert all(other == first for other in others)
    made = content(base(in_dir))
    again = {**one, "training.save_interval": 0, "data.num_workers": 2}
    shutil.rmtree(chunks_folder(base(in_dir)))
    point = in_dir / "whole" / "checkpoints" / "step_00000004"
    resumed, *_ = ranks(world, on_rank, in_dir / "resumed", again, "llama", point)
    assert resumed == first[4:]
    assert content(base(in_dir)) == made


def wait_in_vain(group: Group, folder: Path, settings: dict[str, Any], asked: int) -> tuple[str, int, list[str]]:
    """One rank of a run whose child never gets anywhere; one of them is asked to stop while it waits."""
    with pytest.MonkeyPatch.context() as patch:
        stopped_child(patch)
        stop = StopRequest()
        stop.patient = True
        if group.rank == asked:
            waiting(patch, lambda _: stop.receive(signal.SIGTERM, None))
        try:
            run(folder, settings, stop=stop, group=group)
        except LockstepError as error:
            saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
            return type(error).__name__, int(error.exit_code), saved
    raise AssertionError("it did not stop")


@pytest.mark.parametrize("asked", [0, 1])
def test_ranks_that_wait_stop_together_and_save(
    in_dir: Path, settings: dict[str, Any], asked: int, ranks: Pool
) -> None:
    run(in_dir / "head", {**settings, "training.max_steps": 1})
    few = {**settings, "training.save_interval": 0, "training.batch_size": 6}
    first, second = ranks(2, wait_in_vain, in_dir / "run", few, asked)
    assert first == second
    kind, code, (saved,) = first
    assert (kind, code) == ("Stopped", 143)
    assert saved != "step_00000000"


def test_a_failure_on_one_rank_is_heard_by_those_that_wait(in_dir: Path, settings: dict[str, Any], ranks: Pool) -> None:
    """One message: the rank whose child has failed tells it, the other ends because of it. Both have saved."""
    run(in_dir / "head", {**settings, "training.max_steps": 1})
    few = {**settings, "training.save_interval": 0, "training.batch_size": 6}
    first, second = ranks(2, fail, in_dir / "run", few)
    assert first[:4] == ("LockstepError", 66, "the hub is gone", False)
    assert second[2:4] == ("another worker waits for rows that do not come", True)
    assert first[4] == second[4] != "step_00000000"


def fail(group: Group, folder: Path, settings: dict[str, Any]) -> tuple[str, int, str, bool, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "COMMAND", GONE)
        try:
            run(folder, settings, group=group)
        except LockstepError as error:
            (saved,) = (folder / "checkpoints").iterdir()
            return type(error).__name__, int(error.exit_code), error.what, error.secondary, saved.name
    raise AssertionError("it did not fail")


def on_node(group: Group, folder: Path, settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """One of two machines with one rank each, that share nothing.

    The rows of the second come when the first has waited for them, three times seen to be alive.
    """
    own = folder / f"node{group.rank}"
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "DATASET_CACHE_DIR": str(own / "cache")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in alone.items():
            patch.setenv(name, value)
        assert feed.env.detect().nodes == 2
        if group.rank == 1:
            patch.setattr(feed, "COMMAND", LATER.format(signal=str(folder / "waited")))
        marks: list[str] = []

        def enter(section: str, _step: int = -1) -> None:
            marks.append(section)
            if marks.count("communication") == 3:
                (folder / "waited").touch()

        group.link = SimpleNamespace(enter=enter)  # pyright: ignore[reportAttributeAccessIssue]
        return run(own / "run", settings, group=group)[1].trace, marks


def test_nodes_that_share_nothing_wait_for_each_other(in_dir: Path, settings: dict[str, Any], ranks: Pool) -> None:
    """Who has its rows is not stuck in an exchange meanwhile: it shows signs of life and can be asked to stop."""
    small = {**settings, "training.batch_size": 6, "training.max_steps": 6, "training.save_interval": 0}
    run(in_dir / "head", {**small, "training.max_steps": 1, "training.batch_size": 12})
    for node in range(2):
        shutil.copytree(in_dir / "cache", in_dir / f"node{node}" / "cache")
        shutil.rmtree(chunks_folder(base(in_dir / f"node{node}")), ignore_errors=True)
    (first, waited), (second, late) = ranks(2, on_node, in_dir, small)
    assert len(first) == 6
    assert first == second
    assert waited.count("communication") >= 3, "rounds in which the other had none"
    assert late.count("data") >= 3
    assert content(base(in_dir / "node0")) == content(base(in_dir / "node1")) != {}
