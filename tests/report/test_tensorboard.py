"""TensorBoard files, read back by TensorBoard itself."""

from __future__ import annotations

import io
import math
import resource
import sys
from pathlib import Path

import pytest

from lockstep.report.tensorboard import TensorboardSink
from tests.counting import calls


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in sorted(accumulator.Tags()["scalars"])
    }


def test_tensorboard_reads_what_was_written(tmp_path: Path, record) -> None:
    sink = TensorboardSink(tmp_path / "tb")
    sink.event("start", {"run": "x"})
    for step in range(6):
        sink.write(record(step, loss=8.0 - step, mfu=0.25, memory_bytes=1 << 30, loss_scale=4.0))
    sink.event("eval", {"step": 4, "early": 1.0})
    sink.event("eval", {"step": 6, "val_loss": 2.5})
    assert read_back(tmp_path / "tb")["train/loss"][-1] == (5, 3.0)  # readable before it is closed
    sink.close()

    again = TensorboardSink(tmp_path / "tb")  # resumed after four steps: the rest is written anew
    again.event("resume", {"step": 4})
    again.write(record(4, loss=math.nan))
    again.close()
    found = read_back(tmp_path / "tb")
    assert [value for _, value in found["train/loss"][:4]] == [8.0, 7.0, 6.0, 5.0]
    assert [step for step, _ in found["train/loss"]] == [0, 1, 2, 3, 4]
    assert math.isnan(found["train/loss"][4][1])
    assert found["train/tokens_per_second"][0] == (0, pytest.approx(8192 / 0.05))
    assert found["train/lr"][0][1] == pytest.approx(1e-5)
    assert found["train/memory_gib"][0] == (0, 1.0)
    assert found["eval/val_loss"] == []  # of step 6, voided
    assert found["eval/early"] == [(3, 1.0)]
    assert set(found) == {
        "train/loss", "train/grad_norm", "train/lr", "train/tokens_per_second", "train/mfu", "train/memory_gib",
        "train/loss_scale", "eval/val_loss", "eval/early",
    }  # fmt: skip


def test_a_clock_that_was_set_back_draws_nothing_twice(tmp_path: Path, record, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TensorboardSink(tmp_path)
    for step in range(4):
        first.write(record(step, loss=8.0 - step))
    first.close()
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    again = TensorboardSink(tmp_path)
    again.event("resume", {"step": 2})
    again.write(record(2, loss=1.0))
    again.close()
    assert read_back(tmp_path)["train/loss"] == [(0, 8.0), (1, 7.0), (2, 1.0)]


def test_a_run_that_was_over_is_drawn_once(tmp_path: Path) -> None:
    """Who goes on from the end measures again, and has the same point; control: a tag that is new is drawn."""
    sink = TensorboardSink(tmp_path)
    sink.event("eval", {"step": 6, "val_loss": 2.5})
    sink.close()
    for _ in range(2):
        again = TensorboardSink(tmp_path)
        again.event("resume", {"step": 6})
        again.event("eval", {"step": 6, "val_loss": 2.5, "val_accuracy": 0.5})
        again.event("eval", {"step": 7, "val_loss": 2.0})
        again.close()
    found = read_back(tmp_path)
    assert found["eval/val_loss"] == [(5, 2.5), (6, 2.0)]
    assert found["eval/val_accuracy"] == [(5, 0.5)]


def test_evaluations_are_read_back_too(tmp_path: Path) -> None:
    sink = TensorboardSink(tmp_path)
    sink.event("eval", {"step": 6, "val_loss": 2.5, "val_accuracy": 0.5, "note": "text", "flag": True})
    sink.close()
    assert read_back(tmp_path) == {"eval/val_accuracy": [(5, 0.5)], "eval/val_loss": [(5, 2.5)]}


def test_what_an_objective_watches_has_its_tags(tmp_path: Path, record) -> None:
    """Contract 4.3: train/acc_action and test/acc_action; what is no validation keeps its name."""
    sink = TensorboardSink(tmp_path, validation="test/")
    sink.write(record(0, measures={"loss_action": 1.5, "acc_action": 0.25}))
    sink.event("eval", {"step": 1, "val_loss_action": 1.25, "val_acc_action": 0.5, "other": 3})
    sink.close()
    found = read_back(tmp_path)
    assert found["train/loss_action"] == [(0, 1.5)]
    assert found["train/acc_action"] == [(0, 0.25)]
    assert found["test/loss_action"] == [(0, 1.25)]
    assert found["test/acc_action"] == [(0, 0.5)]
    assert found["eval/other"] == [(0, 3.0)]
    assert not any(tag.startswith("eval/val") for tag in found)


def test_neither_tensorflow_nor_torchs_writer_is_imported(tmp_path: Path, record) -> None:
    sink = TensorboardSink(tmp_path)
    sink.write(record(0))
    sink.close()
    assert not {"tensorflow", "torch.utils.tensorboard"} & sys.modules.keys()


def test_without_the_package_there_is_one_notice(
    tmp_path: Path, record, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    sink = TensorboardSink(tmp_path / "tb")
    sink.write(record(0))
    sink.event("eval", {"step": 1, "val_loss": 1.0})
    sink.event("resume", {"step": 1})
    sink.close()
    (notice,) = screen.getvalue().splitlines()
    assert "pip install tensorboard" in notice
    assert not (tmp_path / "tb").exists()


def test_a_full_disk_is_one_warning(tmp_path: Path, record, screen: io.StringIO) -> None:
    sink = TensorboardSink(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        for step in range(4_000):
            sink.write(record(step))
        sink.event("eval", {"step": 1, "val_loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.close()
    (warning,) = screen.getvalue().splitlines()
    assert "Training goes on without it" in warning
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 300_000
    assert len(read_back(tmp_path)["train/loss"]) > 1_000


def test_a_step_is_cheap(tmp_path: Path, record) -> None:
    """A few calls and one record for all its scalars, however many steps were before."""
    sink, step = TensorboardSink(tmp_path), record(0, mfu=0.4, memory_bytes=1 << 30)
    sink.write(step)
    counted = [calls(lambda: sink.write(step)) for _ in range(300)]
    assert set(counted) == {counted[0]}
    assert counted[0] < 70
    sink.close()
