"""Room for checkpoints: reserved, looked at before a byte is written, and what happens where there is none."""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import rundir
from lockstep.contracts import StepRecord
from lockstep.engine import checkpoint, endings, legacy, milestones, room
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.room import Room
from lockstep.errors import ExitCode, LockstepError
from lockstep.runtime.marks import NoMarks
from tests.engine.test_saving import SMALL, Watching, watching
from tests.gates.training import run

pytestmark = pytest.mark.usefixtures("shared_cache")

MIB = 1 << 20
TOO_SMALL = 20_000  # bytes: less than a file of tensors of the smallest model
EVERY: dict[str, Any] = {
    **SMALL,
    "training.max_steps": 8,
    "debug.digest_interval": 0,
}  # saves after 2, 4, 6 and 8 steps


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process may become larger, as with `ulimit -f`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_disk(folder: Path) -> Path:
    """The folder, if its files are kept on a disk."""
    probe = Room(folder)
    probe.take([1])
    if not probe.is_held:
        pytest.skip(f"NO ROOM CAN BE SET ASIDE IN {folder}: what a reserve holds is not shown")
    probe.give_up()
    return folder


def own_files(folder: Path) -> list[os.stat_result]:
    """What this process has open in a folder that has no name there."""
    found: list[os.stat_result] = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the list itself is open while it is read
        try:
            target, about = os.readlink(f"/proc/self/fd/{number}"), os.stat(f"/proc/self/fd/{number}")  # noqa: PTH115, PTH116 - links that lead nowhere
        except OSError:
            continue
        if target.startswith(str(folder)) and target.endswith("(deleted)"):
            found.append(about)
    return found


def test_room_is_taken_on_the_disk_without_a_name(tmp_path: Path) -> None:
    held = Room(on_disk(tmp_path))
    held.take([MIB, 3 * MIB])
    assert held.is_held
    assert sorted(about.st_blocks * 512 for about in own_files(tmp_path)) == [MIB, 3 * MIB]
    assert list(tmp_path.iterdir()) == [], "nothing to sweep, however this process ends"
    before = {about.st_ino for about in own_files(tmp_path)}
    held.take([3 * MIB, MIB])
    held.take([3 * MIB, MIB + 1000])
    assert {about.st_ino for about in own_files(tmp_path)} == before, "it is there already, for a line more too"
    held.take([5 * MIB])
    assert [about.st_blocks * 512 for about in own_files(tmp_path)] == [5 * MIB]
    held.close()
    assert own_files(tmp_path) == []


def test_in_memory_nothing_is_set_aside() -> None:
    """It would take the memory that training needs."""
    place = Path("/dev/shm")
    held = Room(place)
    held.take([64 * MIB if (room.free_bytes(place) or 0) > 64 * MIB else 1])
    assert not held.is_held
    with pytest.raises(OSError, match="No space left") as caught:
        held.take([1 << 60])
    assert caught.value.errno == errno.ENOSPC


def test_free_space_counts_where_a_disk_sets_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_allocate", lambda *_: False)
    monkeypatch.setattr(room, "free_bytes", lambda _: 10 * MIB)
    held = Room(tmp_path)
    held.take([4 * MIB, 5 * MIB])
    assert not held.is_held
    assert own_files(tmp_path) == []
    for sizes, in_all in (([6 * MIB, 5 * MIB], 0), ([MIB], 11 * MIB)):  # alone, and with all ranks
        with pytest.raises(OSError, match="No space left"):
            held.take(sizes, in_all=in_all)
    monkeypatch.setattr(room, "free_bytes", lambda _: None)  # a file system that does not say
    held.take([1 << 60])


def test_what_others_hold_is_not_asked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 4 MiB each, where one has taken its share of 10 already: 6 are left."""
    held = Room(on_disk(tmp_path))
    monkeypatch.setattr(room, "free_bytes", lambda _: 6 * MIB)
    held.take([4 * MIB], in_all=8 * MIB)
    assert held.is_held
    held.close()


def test_a_limit_of_the_process_is_one_for_each_file(tmp_path: Path) -> None:
    held = Room(tmp_path)
    with limited(2 * MIB):
        held.take([2 * MIB, 2 * MIB, 2 * MIB])
        with pytest.raises(OSError, match="File too large"):
            held.take([2 * MIB + 1])
    held.close()


def test_a_quota_speaks_through_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space does not show it; what the disk answers when it is asked does."""

    def over(*_: Any) -> int:
        room.ctypes.set_errno(errno.EDQUOT)
        return -1

    monkeypatch.setattr(room.ctypes, "CDLL", lambda *_, **__: type("C", (), {"fallocate": over, "fstatfs": over})())
    held = Room(tmp_path)
    with pytest.raises(OSError, match="quota") as caught:
        held.take([1])
    assert caught.value.errno == errno.EDQUOT
    assert own_files(tmp_path) == []


def test_what_is_reserved_is_what_is_written(tmp_path: Path) -> None:
    parts, _ = run(tmp_path, SMALL)
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step_00000004").iterdir())
    assert written <= parts.checkpointer.need_bytes <= written + room.REST_BYTES + 100_000
    sizes = parts.checkpointer._sizes(milestones.capture(parts.stepper, parts.progress, parts.about))
    for file, size in zip(checkpoint.KINDS, sizes, strict=False):
        assert (tmp_path / "checkpoints/step_00000004" / file).stat().st_size <= size


@pytest.mark.parametrize("checked", [True, False], ids=["ours", "unchecked"])
def test_without_room_for_one_checkpoint_nothing_begins(
    checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked:  # negative control: steps are made that nothing can keep
        monkeypatch.setattr(Room, "take", lambda *_, **__: None)
    recorder = watching(lambda _: None)
    with limited(TOO_SMALL), pytest.raises(LockstepError) as caught:
        run(tmp_path, EVERY, recorder=recorder)
    assert caught.value.exit_code == ExitCode.IO
    assert bool(recorder.records) is not checked
    assert list(tmp_path.glob("checkpoints/*")) == []
    if checked:
        assert caught.value.where == str(tmp_path / "checkpoints")
        assert "File too large" in caught.value.what
        assert " MiB free, " in caught.value.what
        assert " MiB needed)" in caught.value.what


def test_a_documented_file_that_does_not_fit_says_why(tmp_path: Path) -> None:
    """torch itself says `enforce fail ... unexpected pos`."""
    content = {"model_state_dict": {"a": torch.zeros(MIB)}}
    with limited(TOO_SMALL), pytest.raises(LockstepError) as caught:
        legacy.publish(tmp_path / "step_2.pt", content, link=NoMarks())
    assert (caught.value.exit_code, caught.value.where) == (ExitCode.IO, str(tmp_path / "step_2.pt"))
    said = r"saving a checkpoint failed: File too large \([\d.]+ MiB free, 4\.0 MiB needed\)"
    assert re.fullmatch(said, caught.value.what), caught.value.what
    assert endings._is_no_room(caught.value)
    assert list(tmp_path.iterdir()) == []


def full_from(first: int, until: int) -> Watching:
    """A disk that is full after step `first` and no more after step `until`."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def then(record: StepRecord) -> None:
        parts = recorder.parts
        assert parts
        while parts.saver.begun > parts.saver.ended:
            time.sleep(0.001)  # for a save from before
        size = TOO_SMALL if first <= record.step < until else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    recorder = watching(then)
    return recorder


@pytest.fixture
def afterwards_unlimited() -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.usefixtures("afterwards_unlimited")
@pytest.mark.parametrize("policy", ["stop", "retry"])
def test_a_full_disk_stops_or_is_tried_again(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 21. Saved after 2 steps, full after 4 and 6, room again after 8."""
    staged: list[str] = []
    stage = rundir.stage
    monkeypatch.setattr(rundir, "stage", lambda final: (staged.append(final.name), stage(final))[1])
    recorder = full_from(2, 6)
    settings = {**EVERY, "checkpoint.on_full": policy}
    if policy == "stop":
        with pytest.raises(LockstepError, match="File too large") as caught:
            run(tmp_path, settings, recorder=recorder)
        assert caught.value.exit_code == ExitCode.IO
        assert caught.value.where.endswith("step_00000004")
        assert caught.value.what.endswith("; the last good one is step_00000002")
        assert recorder.of("save") == [2]
    else:
        run(tmp_path, settings, recorder=recorder)
        assert recorder.of("save") == [2, 8]
        assert caplog.text.count("Training goes on without this checkpoint") == 2
    assert staged == [f"step_{step:08d}" for step in recorder.of("save")], "nothing of the others was ever begun"
    assert checkpoint.is_good(tmp_path / "checkpoints/step_00000002")
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))


@pytest.mark.usefixtures("afterwards_unlimited")
def test_the_last_save_must_fit_whatever_the_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = full_from(2, 100)
    with pytest.raises(LockstepError, match="File too large") as caught:
        run(tmp_path, {**EVERY, "checkpoint.on_full": "retry"}, recorder=recorder)
    assert caught.value.exit_code == ExitCode.IO
    assert len(recorder.records) == 8, "everything else was done"
    assert recorder.of("save") == [2]
    assert caplog.text.count("Training goes on without this checkpoint") == 2
    assert caplog.text.count("No room for the next checkpoint") <= 1


def test_that_there_is_none_for_the_next_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 0)
    held = Room(tmp_path)
    held.lasting = True
    for _ in range(3):
        held.take_again([MIB])
    assert caplog.text.count("No room for the next checkpoint") == 1


def test_room_is_held_between_saves_and_not_after_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = on_disk(tmp_path) / "checkpoints"
    held: list[bool] = []
    meanwhile, write = list[int](), checkpoint.save_file

    def noted(tensors: dict[str, torch.Tensor], path: Path) -> None:
        meanwhile.append(len(own_files(folder)))
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", noted)

    def then(_: StepRecord) -> None:
        parts = recorder.parts
        assert parts
        while parts.saver.begun > parts.saver.ended:
            time.sleep(0.001)  # it is given up while a save goes on
        held.append(len(own_files(folder)) == 3)

    recorder = watching(then)
    run(tmp_path, {**EVERY, "training.max_steps": 4}, recorder=recorder)
    assert held == [True] * 4
    assert meanwhile == [0] * 4, "it is given up to what it was held for"
    assert own_files(folder) == []
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "other", SMALL, recorder=watching(lambda _: 1 / 0))
    assert own_files(tmp_path) == [], "nor after an error"


def test_room_for_fewer_checkpoints_than_are_kept_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = State({"a": torch.zeros(MIB)}, {"b": torch.zeros(MIB)}, {"step": 0})
    monkeypatch.setattr(room, "_allocate", lambda *_: False)
    for free_mib, saves, said in ((19, 9, True), (19, 2, False), (28, 9, False), (28, 1, False)):
        monkeypatch.setattr(room, "free_bytes", free_of(free_mib))
        caplog.clear()
        Checkpointer(tmp_path, keep_last=2).reserve(state, saves=saves)
        listed = f"3 checkpoints of 9.0 MiB (2 kept, one on its way) in {tmp_path}"
        assert caplog.messages == [f"Room for 19.0 MiB more, and 27.0 are to come: {listed}"] * said


def free_of(mib: int) -> Callable[[Path], int]:
    return lambda _: mib * MIB


def test_documented_files_are_foreseen_on_the_disk_where_they_will_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them, since all of them stay: `checkpoint.keep_last` says nothing of them."""
    state = State({"a": torch.zeros(MIB)}, {"b": torch.zeros(MIB)}, {"step": 0})
    monkeypatch.setattr(room, "_allocate", lambda *_: False)
    monkeypatch.setattr(room, "free_bytes", free_of(100))
    own = f"3 checkpoints of 9.0 MiB (2 kept, one on its way) in {tmp_path}"
    for place, room_for in ((tmp_path, 9), (Path("/proc"), 12)):  # nothing is written there, and it is never tmp_path's
        caplog.clear()
        for count in (room_for, room_for + 1):
            files = room.Coming(".pt file", count, 8 * MIB, 0, place)
            Checkpointer(tmp_path, keep_last=2).reserve(state, saves=count, beside=[files])
        theirs = f"{room_for + 1} .pt files of 8.0 MiB (all kept, unless checkpoint.keep_files is set) in {place}"
        need, listed = (107, f"{own}, {theirs}") if place == tmp_path else (104, theirs)
        assert caplog.messages == [f"Room for 100.0 MiB more, and {need}.0 are to come: {listed}"]


@pytest.mark.parametrize(
    ("family", "more", "count", "kept"),
    [
        ("llama", {}, 4, "all kept"),
        ("llama", {"checkpoint.keep_files": 1}, 2, "1 kept"),
        ("mlm", {"training.epochs": 4.5, "training.max_steps": 100}, 0, "all kept"),
    ],
)
def test_as_many_are_foreseen_as_are_written(
    family: str, more: dict[str, Any], count: int, kept: str, *,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "pt").mkdir()
    monkeypatch.setattr(room, "_allocate", lambda *_: False)
    monkeypatch.setattr(room, "free_bytes", free_of(10))
    recorder, settings = watching(lambda _: None), {**EVERY, "training.checkpoint_dir": tmp_path / "pt", **more}
    parts, _ = run(tmp_path, settings, family=family, recorder=recorder)
    (said,) = [line for line in caplog.messages if line.startswith("Room for")]
    count = count or len(recorder.of("export"))
    size = (tmp_path / f"pt/step_{parts.progress.step}.pt").stat().st_size
    assert f" {count} .pt files of {size / MIB:.1f} MiB ({kept}" in said


def test_of_documented_files_as_many_are_kept_as_are_wanted_and_only_its_own_go(tmp_path: Path) -> None:
    """Across a resume too; a file that another run has written under the same name is its own from then on."""
    folder = tmp_path / "pt"
    folder.mkdir()
    others = ["best.pt", "interrupted.pt", "nan_grad_step_0.pt", "step_0.pt", "step_50.pt"]
    for name in others:
        (folder / name).write_text("not ours")
    settings = {
        **SMALL,
        "training.save_interval": 1,
        "training.checkpoint_dir": str(folder),
        "checkpoint.keep_files": 2,
    }
    run(tmp_path, settings)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*others, "step_3.pt", "step_4.pt"])
    (folder / "step_3.pt").write_text("of another run")
    record, hostile = tmp_path / "files.json", {"best.pt": (folder / "best.pt").stat().st_mtime_ns}
    rundir.write_json(record, {**hostile, **rundir.read_json(record)})
    more = {**settings, "training.max_steps": 6, "checkpoint.allow_mismatch": True}
    run(tmp_path, more, point=tmp_path / "checkpoints/step_00000004")
    names = [*others, "step_3.pt", "step_5.pt", "step_6.pt"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    run(tmp_path / "other", {**settings, "checkpoint.keep_files": 0})
    assert len(list(folder.glob("step_[1-4].pt"))) == 4, "all of them, where nothing else is asked for"


def test_what_another_rank_failed_of_keeps_its_kind(tmp_path: Path) -> None:
    """A full disk is not answered by a restart, an input/output error is; whoever met it."""
    for number, no_room in ((errno.ENOSPC, True), (errno.EIO, False)):
        said = Checkpointer(tmp_path)._told(OSError(number, os.strerror(number)), tmp_path / "step_00000001")
        with pytest.raises(LockstepError, match="rank 1 on") as caught:
            checkpoint._raise_first([{}, said], 0)
        assert endings._is_no_room(caught.value) == no_room
