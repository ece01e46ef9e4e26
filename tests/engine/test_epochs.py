"""Runs in epochs: how many steps they have, what happens when an epoch ends, and that going on changes nothing."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.load import from_dict, load, load_run, to_dict
from lockstep.engine import loop
from lockstep.engine.epochs import Epochs
from lockstep.engine.progress import Progress
from lockstep.engine.train import go_on_from_the_end
from lockstep.errors import LockstepError
from lockstep.rundir import RunDir, write_json
from tests.gates.training import FEW_DOCUMENTS, Recorder, run

ROWS = 3  # of a batch
MLM: dict[str, Any] = {
    "data.data_path": FEW_DOCUMENTS, "training.context_length": 32, "training.batch_size": ROWS,
    "training.eval_batches": 1, "training.eval_interval": 0, "training.save_interval": 0, "data.num_workers": 0,
    "system.threads": 1,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("shared_cache")


def told(recorder: Recorder, kind: str) -> list[dict[str, Any]]:
    return [dict(fields) for each, fields in recorder.events if each == kind]


def epochs_of(rows: int, batch_rows: int, asked: str, limit: int = 10**7) -> Epochs:
    return Epochs(Fraction(asked), rows, batch_rows, limit)


# ------------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(
    ("rows", "batch_rows", "asked", "ends"),
    [
        (12, 4, "2", {3: 1, 6: 2}),
        (10, 4, "5", {3: 1, 5: 2, 8: 3, 10: 4, 13: 5}),  # a batch straddles two epochs
        (12, 4, "2.5", {3: 1, 6: 2, 8: 2}),  # half of the third
        (12, 4, "0.1", {1: 0}),
        (3, 8, "5", {1: 2, 2: 5}),  # a batch is longer than the table
        (7, 7, "1", {1: 1}),
    ],
)
def test_an_epoch_ends_with_the_step_that_takes_its_last_row(
    rows: int, batch_rows: int, asked: str, ends: dict[int, int]
) -> None:
    epochs = epochs_of(rows, batch_rows, asked)
    steps = max(ends)
    assert epochs.steps == steps == max(1, math.ceil(Fraction(asked) * rows / batch_rows))
    assert {done: epochs.finished_after(done) for done in range(1, steps + 1) if epochs.ends(done)} == ends


def test_decimal_fractions_are_taken_at_their_word() -> None:
    assert epochs_of(10, 1, "0.3").steps == 3, "not 4, which 0.3 as a binary fraction would be"


def test_a_limit_ends_the_run_in_the_middle() -> None:
    epochs = epochs_of(10, 4, "5", limit=4)
    assert [done for done in range(1, 5) if epochs.ends(done)] == [3, 4]
    assert epochs.finished_after(4) == 1


def config_of(*given: tuple[str, str]) -> Any:
    return load("mlm", preset="tiny", flags=given)


def test_who_decides_the_number_of_steps(tmp_path: Path) -> None:
    """A preset's max_steps gives way to epochs, one that was given limits them; read again it is all the same."""
    assert config_of().config.training.max_steps == 20, "no epochs: steps"
    free, capped = config_of(("epochs", "3")), config_of(("epochs", "3"), ("max_steps", "7"))
    assert (free.config.training.epochs, free.config.training.max_steps) == (3, 10_000_000)
    assert (capped.config.training.epochs, capped.config.training.max_steps) == (3, 7)
    for loaded in (free, capped):
        saved = {"family": "mlm", "preset": "tiny", "config": to_dict(loaded.config)}
        write_json(RunDir(tmp_path).config, saved)
        assert load_run(tmp_path).config == loaded.config == from_dict(to_dict(loaded.config))


def test_warm_up_in_steps_beats_a_share_of_a_lower_layer_only() -> None:
    steps = config_of(("warmup_ratio", "0.2"))
    assert steps.config.training.warmup_ratio == 0.2
    again: Any = load("mlm", preset="tiny", flags=[("warmup_ratio", "0.2")], overrides={"training.warmup_steps": 3})
    assert (again.config.training.warmup_ratio, again.config.training.warmup_steps) == (0, 3)
    assert any("warmup_steps 3 decides" in notice for notice in again.notices)


def test_steps_warm_up_and_schedule_follow_the_rows(tmp_path: Path) -> None:
    parts, recorder = run(tmp_path, {**MLM, "training.epochs": 2, "training.warmup_ratio": 0.5}, family="mlm")
    rows, steps = parts.rows, math.ceil(2 * parts.rows / ROWS)
    assert rows % ROWS, "the case must have a batch that straddles two epochs"
    assert len(recorder.records) == parts.config.training.max_steps == steps
    assert parts.config.training.warmup_steps == round(0.5 * steps)
    rates = [record.lr for record in recorder.records]
    assert max(rates) == rates[round(0.5 * steps)]
    assert parts.about["config"]["training"]["max_steps"] == 10_000_000, "what is kept knows epochs only"


# ------------------------------------------------------------------------------------------------- what an epoch leaves


def test_an_epoch_is_validated_saved_and_told(tmp_path: Path) -> None:
    parts, recorder = run(tmp_path, {**MLM, "training.epochs": 2.5}, family="mlm")
    ends = [math.ceil(share * parts.rows / ROWS) for share in (1, 2, 2.5)]
    events = told(recorder, "epoch")
    assert [event["step"] for event in events] == ends
    assert [(event["epoch"], event["epochs"]) for event in events] == [(1, 3), (2, 3), (3, 3)]
    assert [event["whole"] for event in events] == [True, True, False]
    assert [event["step"] for event in told(recorder, "eval")] == ends
    assert [event["step"] for event in told(recorder, "save")] == ends
    assert [event["val_loss"] for event in events] == [event["val_loss"] for event in told(recorder, "eval")]
    assert all(event["seconds"] > 0 for event in events)
    weights = {batch.step: batch.weight for batch in drawn(parts)}
    for (before, after), event in zip(pairwise([0, *ends]), events, strict=True):
        some = [(record.loss, weights[record.step]) for record in recorder.records[before:after]]
        mean = sum(loss * weight for loss, weight in some) / sum(weight for _, weight in some)
        assert event["train_loss"] == pytest.approx(mean, rel=1e-12)
        assert event["train_loss"] != pytest.approx(sum(loss for loss, _ in some) / len(some), rel=1e-9)
    assert parts.progress.train_losses == [event["train_loss"] for event in events]


def drawn(parts: Any) -> list[Any]:
    """How many targets each step had, by making the batches once more."""
    from lockstep.data.loader import Loader

    steps = parts.config.training.max_steps
    with Loader(
        parts.table, parts.stepper.objective, seed=42, micro_rows=ROWS, micro_batches=1, steps=steps, workers=0
    ) as loader:
        return [
            SimpleNamespace(step=step, weight=sum(batch.weights["loss"] for batch in next(loader)))
            for step in range(steps)
        ]


def test_where_nothing_is_predicted_no_loss_is_told(tmp_path: Path) -> None:
    """Not 0, the best of all: rows so short that no token is chosen."""
    parts, recorder = run(tmp_path, {**MLM, "training.epochs": 1, "objective.mask_probability": 1e-9}, family="mlm")
    assert not any(parts.council.agreed.weights.values()), "the case must be one"
    assert (parts.progress.train_losses, parts.progress.val_losses) == ([None], [None])
    assert parts.progress.best_loss is None
    assert not told(recorder, "first_loss")


def test_families_that_count_in_steps_have_no_epochs(tmp_path: Path) -> None:
    few = {
        "training.max_steps": 3,
        "training.context_length": 8,
        "training.batch_size": 1,
        "data.data_path": FEW_DOCUMENTS,
    }
    parts, recorder = run(tmp_path, few)
    assert parts.epochs is None
    assert not told(recorder, "epoch")
    assert parts.progress.train_losses == []


def test_the_history_survives_a_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    settings = {**MLM, "training.epochs": 3, "training.save_interval": 1, "checkpoint.keep_last": 100}
    parts, _ = run(tmp_path / "whole", settings, family="mlm")
    first = math.ceil(parts.rows / ROWS)
    for step in (1, first - 1, first, first + 1):
        point = tmp_path / "whole" / "checkpoints" / f"step_{step:08d}"
        again, heard = run(tmp_path / f"from-{step}", settings, family="mlm", point=point)
        assert again.progress == parts.progress, f"resumed after {step}"
        assert len(told(heard, "epoch")) == (3 if step < first else 2)


def test_an_epoch_that_an_error_left_open_is_closed_by_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**MLM, "training.epochs": 2}
    parts, _ = run(tmp_path / "whole", settings, family="mlm")
    first = math.ceil(parts.rows / ROWS)

    def disk_full(*_: object) -> None:
        raise LockstepError("no space")

    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", disk_full)
        with pytest.raises(LockstepError, match="no space"):
            run(tmp_path / "cut", settings, family="mlm", recorder=recorder)
    assert recorder.parts is not None
    assert recorder.parts.progress.step == first
    loop.save(recorder.parts, "error")  # what the end of a run does (endings.py)
    point = tmp_path / "cut" / "checkpoints" / f"step_{first:08d}"
    again, heard = run(tmp_path / "again", settings, family="mlm", point=point)
    assert [event["epoch"] for event in told(heard, "epoch")] == [1, 2]
    assert again.progress == parts.progress


@pytest.mark.parametrize("epochs", [0.5, 2, 2.5])
def test_the_last_epoch_that_an_error_left_open_is_closed_by_a_resume_that_has_nothing_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: float
) -> None:
    settings = {**MLM, "training.epochs": epochs}
    parts, _ = run(tmp_path / "whole", settings, family="mlm")
    recorder, validate = Recorder(), loop.validate

    def fail_at_the_end(parts: Any) -> None:
        if parts.is_over(parts.progress.step):
            raise LockstepError("no space")
        validate(parts)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", fail_at_the_end)
        with pytest.raises(LockstepError, match="no space"):
            run(tmp_path / "cut", settings, family="mlm", recorder=recorder)
    assert recorder.parts is not None
    loop.save(recorder.parts, "error")  # what the end of a run does (endings.py)
    point = tmp_path / "cut" / "checkpoints" / f"step_{parts.progress.step:08d}"
    again, _ = run(tmp_path / "again", settings, family="mlm", point=point)
    for _ in range(2):  # the second time there is nothing to close
        go_on_from_the_end(again)
        assert again.progress == parts.progress


def test_a_run_that_is_made_longer_forgets_the_end_it_had(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows", {**MLM, "training.epochs": 0.1}, family="mlm")[0].rows
    cut = math.ceil(rows / ROWS) + 1
    settings = {**MLM, "training.epochs": 2, "training.schedule": "constant", "training.warmup_steps": 0}
    parts, _ = run(tmp_path / "whole", settings, family="mlm")
    capped, _ = run(tmp_path / "capped", {**settings, "training.max_steps": cut}, family="mlm")
    assert len(capped.progress.train_losses) == 2, "of the epoch that was cut off, too"
    point = tmp_path / "capped" / "checkpoints" / f"step_{cut:08d}"
    longer = {**settings, "checkpoint.allow_mismatch": True}
    assert run(tmp_path / "longer", longer, family="mlm", point=point)[0].progress == parts.progress


def test_counts_of_an_older_checkpoint_can_be_read() -> None:
    old = {
        "step": 3, "tokens": 12, "skipped": 0, "overflow_run": 0, "smoothed_loss": 2.0, "best_loss": 2.0,
        "stale_steps": 0,
    }  # fmt: skip
    progress = Progress.from_state_dict(old)
    assert (progress.step, progress.train_losses, progress.epoch_targets) == (3, [], 0)
    progress.note(1.0, 4, overflow=False, min_delta=0, targets=2)
    progress.close_epochs(1, None)
    assert progress.train_losses == [1.0]
    assert Progress.from_state_dict(progress.state_dict()) == progress
    assert progress.state_dict()["train_losses"] is not progress.train_losses
