"""A full disk: seen before the first step, before a save, or in the midst of one; what was saved stays whole."""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import rundir
from lockstep.contracts import StepRecord
from lockstep.engine import checkpoint, endings, legacy
from lockstep.engine.checkpoint import Checkpointer
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


def disk(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int], *, total: int = 1 << 60) -> None:
    """What checkpoints are told of the disk."""
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(total=total, free=free()))


def test_the_size_that_is_checked_is_what_is_written(tmp_path: Path) -> None:
    parts, _ = run(tmp_path, SMALL)
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step_00000004").iterdir())
    assert written <= parts.checkpointer.need_bytes <= written + checkpoint.REST_BYTES


def test_a_disk_that_cannot_hold_one_checkpoint_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, free = watching(lambda _: None), [0]
    disk(monkeypatch, lambda: free[0])
    with pytest.raises(LockstepError) as caught:
        run(tmp_path, EVERY, recorder=recorder)
    assert (caught.value.exit_code, caught.value.where) == (ExitCode.IO, str(tmp_path / "checkpoints"))
    said = (
        r"saving a checkpoint failed: No space left on device \(0\.0 MiB free, [\d.]+ MiB needed\); there is none yet"
    )
    assert re.fullmatch(said, caught.value.what), caught.value.what
    assert recorder.records == []
    assert list(tmp_path.glob("checkpoints/*")) == []
    free[0] = recorder.parts.checkpointer.need_bytes if recorder.parts else 0
    parts, _ = run(tmp_path, EVERY)
    assert parts.progress.step == 8, "control: what is free is enough for one"


def test_a_file_system_that_does_not_say_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, lambda: 0, total=0)
    parts, _ = run(tmp_path, SMALL)
    assert checkpoint.is_good(tmp_path / f"checkpoints/step_{parts.progress.step:08d}")


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


def full_from(first: int, until: int, monkeypatch: pytest.MonkeyPatch, *, seen: bool) -> Watching:
    """A disk that is full after step `first` and no more after step `until`.

    `seen`: when a save looks at it; else it fills up while the save is written.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = [1 << 60]
    disk(monkeypatch, lambda: free[0])

    def then(record: StepRecord) -> None:
        parts = recorder.parts
        assert parts
        while parts.saver.begun > parts.saver.ended:
            time.sleep(0.001)  # for a save from before
        full = first <= record.step < until
        free[0] = 0 if full and seen else 1 << 60
        resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_SMALL if full and not seen else hard, hard))

    recorder = watching(then)
    return recorder


@pytest.fixture
def afterwards_unlimited() -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.usefixtures("afterwards_unlimited")
@pytest.mark.parametrize("seen", [True, False], ids=["seen before", "in the midst"])
@pytest.mark.parametrize("policy", ["stop", "retry"])
def test_a_full_disk_stops_or_is_tried_again(
    policy: str, *, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 21. Saved after 2 steps, full after 4 and 6, room again after 8."""
    staged: list[str] = []
    stage = rundir.stage
    monkeypatch.setattr(rundir, "stage", lambda final: (staged.append(final.name), stage(final))[1])
    recorder = full_from(2, 6, monkeypatch, seen=seen)
    settings, cause = {**EVERY, "checkpoint.on_full": policy}, "No space left" if seen else "File too large"
    if policy == "stop":
        with pytest.raises(LockstepError, match=cause) as caught:
            run(tmp_path, settings, recorder=recorder)
        assert caught.value.exit_code == ExitCode.IO
        assert caught.value.where.endswith("step_00000004")
        assert caught.value.what.endswith("; the last good one is step_00000002")
        assert recorder.of("save") == [2]
    else:
        run(tmp_path, settings, recorder=recorder)
        assert recorder.of("save") == [2, 8]
        assert caplog.text.count("Training goes on without this checkpoint") == 2
        assert cause in caplog.text
    if seen:
        assert staged == [f"step_{step:08d}" for step in recorder.of("save")], "nothing of the others was ever begun"
    assert checkpoint.is_good(tmp_path / "checkpoints/step_00000002")
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))


@pytest.mark.usefixtures("afterwards_unlimited")
def test_the_last_save_must_fit_whatever_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = full_from(2, 100, monkeypatch, seen=True)
    with pytest.raises(LockstepError, match="No space left") as caught:
        run(tmp_path, {**EVERY, "checkpoint.on_full": "retry"}, recorder=recorder)
    assert caught.value.exit_code == ExitCode.IO
    assert len(recorder.records) == 8, "everything else was done"
    assert recorder.of("save") == [2]
    assert caplog.text.count("Training goes on without this checkpoint") == 2


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
