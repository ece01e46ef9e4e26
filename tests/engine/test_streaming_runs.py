"""Training on a stream: the same bits as ever, nobody left behind, whatever becomes of the process that adds to it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.data.stream import chunks_folder
from lockstep.engine import feed, streaming, supply
from lockstep.engine.feed import Feed
from lockstep.engine.supply import Beats
from lockstep.errors import DataError, LockstepError, NotFoundError, Stopped
from lockstep.runtime.group import Group
from lockstep.runtime.signals import StopRequest
from tests.engine.streams import content, write_text
from tests.gates.test_resume import EVERY_STEP, on_rank
from tests.gates.training import run
from tests.ranks.conftest import ranks
from tests.ranks.pool import Pool

__all__ = ["ranks"]

STEPS = 12
STORIES = 30

GONE = (
    "from lockstep.engine import supply; from lockstep.errors import NotFoundError\n"
    "def gone(*_): raise NotFoundError('the hub is gone', where='hub', hint='wait')\n"
    "supply.Maker = gone; supply.main()"
)


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
    (lock,) = folder.glob("cache/*.stream.lock")
    return lock.with_name(lock.name.removesuffix(".stream.lock"))


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(in_dir: Path, settings: dict[str, Any]) -> None:
    """From every step; with other numbers of threads; and once more after all chunks were deleted."""
    before = children()
    parts, recorder = run(in_dir / "whole", settings)
    assert children() == before
    whole, made = recorder.trace, content(base(in_dir))
    assert len(whole) == STEPS
    assert len({name.split("/")[0] for name in made}) > 3, "the run must go through several chunks"
    assert not list(in_dir.rglob("*.tmp-*"))
    for step in range(1, STEPS, 3):
        point = in_dir / "whole" / "checkpoints" / f"step_{step:08d}"
        changed = {**settings, "training.save_interval": 0, "data.num_workers": step % 3}
        if step == 4:
            shutil.rmtree(chunks_folder(base(in_dir)))
        assert run(in_dir / f"from-{step}", changed, point=point)[1].trace == whole[step:], f"resumed after {step}"
    assert content(base(in_dir)) == made
    assert parts.rows > 1 << 60, "the end of the stream was not known when it began"


def test_a_run_that_goes_over_the_whole_text_goes_over_it_again(in_dir: Path, settings: dict[str, Any]) -> None:
    few = {**settings, "data.max_train_samples": 14, "training.max_steps": 9, "data.num_workers": 2}
    _, recorder = run(in_dir / "whole", few)
    point = in_dir / "whole" / "checkpoints" / "step_00000006"
    parts, resumed = run(in_dir / "again", {**few, "training.save_interval": 0}, point=point)
    assert parts.rows < 9 * parts.batch_rows, "more than one epoch"
    assert resumed.trace == recorder.trace[6:]


def waiting(monkeypatch: pytest.MonkeyPatch, action: Callable[[Feed], object], seconds: float = 1.0) -> list[Feed]:
    """Do something as soon as a run waits for rows, the child standing still. The feeds that waited."""
    waited: list[Feed] = []
    wait = Feed._wait

    def paused(self: Feed, position: int) -> None:
        if not waited:
            waited.append(self)
            action(self)
        wait(self, position)

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
    assert not children()


def test_a_child_that_stands_still_is_named(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: after a long silence an error, not a hang."""
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
    assert not children()


def test_a_killed_child_is_replaced(in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(waited: Feed) -> None:
        assert waited.child
        killed.append(waited.child.pid)
        os.kill(waited.child.pid, signal.SIGKILL)

    waiting(monkeypatch, kill)
    _, recorder = run(in_dir / "run", {**settings, "training.max_steps": 4})
    assert killed
    assert len(recorder.records) == 4


def test_a_child_that_always_dies_is_given_up(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "COMMAND", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(LockstepError, match="ended by SIGKILL 4 times in a row"):
        run(in_dir / "run", settings)


def test_an_error_of_the_child_ends_the_run_with_its_code(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the hub is gone; what was done so far is kept by whoever is alone (endings.py)."""
    monkeypatch.setattr(feed, "COMMAND", GONE)
    with pytest.raises(LockstepError, match="the hub is gone") as caught:
        run(in_dir / "run", settings)
    assert caught.value.exit_code == NotFoundError.exit_code
    assert caught.value.between_steps
    assert caught.value.hint == "wait"
    assert not children()


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


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
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
    assert second[1:4] == (66, "the hub is gone", True)
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


def test_a_node_waits_until_every_node_has_the_rows(
    in_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a node has its rows and another one has not, it waits here, seen and asked to stop, not in an exchange."""
    run(in_dir / "there", {**settings, "training.max_steps": 6})
    two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in two.items():
        monkeypatch.setenv(name, value)
    assert feed.env.detect().nodes == 2
    stop, other = StopRequest(), in_dir / "run" / "stream" / "n1.json"
    stop.patient = True
    looked: list[int] = []

    def sleep(_: float) -> None:
        (at_hand,) = waited
        assert at_hand.table.is_ready(at_hand._step * 24 + 23), "its own rows are there"
        looked.append(at_hand._step)
        if len(looked) == 5:
            Beats(other).beat(rows=96)
        if len(looked) == 10:
            stop.receive(signal.SIGTERM, None)

    waited = waiting(monkeypatch, lambda _: None)
    monkeypatch.setattr(feed.time, "sleep", sleep)
    with pytest.raises(Stopped):
        run(in_dir / "run", settings, stop=stop)
    assert looked == [2] * 5 + [4] * 5
