"""Runs that end early, and what is said of validations at the end."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.engine.parts import Parts
from lockstep.engine.present import best_val_loss
from lockstep.engine.progress import Progress
from lockstep.report.jsonl import read_events
from tests.conftest import Outcome
from tests.gates.training import FEW_DOCUMENTS

Cli = Callable[..., Outcome]
QUICK = ("--device", "cpu", "report.sample_prompt=", "report.tensorboard=false", "training.eval_batches=1")

pytestmark = pytest.mark.usefixtures("shared_cache")


def events(kind: str, run: str) -> list[dict[str, Any]]:
    return [event for event in read_events(Path("runs") / run / "events.jsonl") if event["kind"] == kind]


def test_early_stopping_is_off_by_default_and_says_so_when_on(in_dir: Path, lockstep: Cli) -> None:
    """Item 69: a loss that cannot improve by min_delta stops the run after `patience` steps, not without it."""
    stuck = ("train", "llama", "tiny", *QUICK, "--max-steps", "12", "training.min_delta=100.0", "--name")
    assert lockstep(*stuck, "whole").code == 0
    assert len(events("step", "whole")) == 12
    early = lockstep(*stuck, "early", "training.patience=4")
    assert early.code == 0
    assert "Early stopping triggered" in early.out
    assert len(events("step", "early")) == 5

    again = lockstep("resume", "early")
    assert again.code == 0
    assert "Nothing left to do: early stopping ended it after 5 steps" in again.out
    assert len(events("step", "early")) == 5, "it has ended, and trains no step more"
    more = re.search(r"more: lockstep (resume .*)", again.out)
    assert more
    assert lockstep(*shlex.split(more[1])).code == 0
    assert len(events("step", "early")) == 12


def test_a_smaller_min_delta_is_another_way_on(in_dir: Path, lockstep: Cli) -> None:
    stuck = ("training.patience=4", "training.min_delta=100.0", "--name", "stuck")
    assert lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "12", *stuck).code == 0
    assert len(events("step", "stuck")) == 5
    assert lockstep("resume", "stuck", "training.min_delta=0", "--checkpoint.allow-mismatch", "true").code == 0
    assert len(events("step", "stuck")) > 5


def test_a_run_that_is_over_for_two_reasons_says_the_way_past_both(in_dir: Path, lockstep: Cli) -> None:
    """Stale at the very last step: each way alone would end at the other's."""
    both = ("training.patience=5", "training.min_delta=100.0", "--name", "both")
    assert lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "6", *both).code == 0
    again = lockstep("resume", "both")
    assert "Nothing left to do: all 6 steps are done\n" in again.out
    more = re.search(r"more: lockstep (resume .*)", again.out)
    assert more
    assert lockstep(*shlex.split(more[1])).code == 0
    assert len(events("step", "both")) == 12


def test_a_proof_goes_to_its_end(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint that was stale already: earlier versions went on a step each time they were asked."""
    stuck = ("training.patience=3", "training.min_delta=100.0", "--name", "on")
    assert lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "12", *stuck).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Parts, "has_ended", property(lambda self: self.is_over(self.progress.step)))
        assert lockstep("resume", "on").code == 0
    assert len(events("step", "on")) == 5
    proof = lockstep("resume", "on", "--prove")
    assert proof.code == 0, proof.text
    assert "Proven" in proof.out


def test_files_of_an_epoch_that_ends_early_and_is_then_ended(in_dir: Path, lockstep: Cli) -> None:
    """LLaDA's, of an epoch that is no better than the first: of half of it, as the last; then of all of it."""
    made = lockstep(
        "train", "llada", "tiny", *QUICK, "training.epochs=4", "training.patience=7", "training.min_delta=100.0",
        "report.results_dir=saved", f"data.data_path={FEW_DOCUMENTS}", "training.context_length=32", "--name", "short",
        "training.batch_size=8", "training.eval_interval=0", "training.learning_rate=1.0", "training.warmup_ratio=0.3",
    )  # fmt: skip
    assert made.code == 0, made.text
    assert [event["step"] for event in events("eval", "short")] == [6, 8], "in the middle of the second epoch"

    def told() -> dict[str, Any]:
        return json.loads(Path("saved/stats_epoch_2.json").read_text(encoding="utf-8"))

    half = told()
    more = re.search(r"more: lockstep (resume .*)", lockstep("resume", "short").out)
    assert more
    assert lockstep(*shlex.split(more[1])).code == 0
    whole = told()
    assert whole["train_losses"][0] == half["train_losses"][0]
    assert whole["train_losses"][1] != half["train_losses"][1]
    assert min(half["val_losses"][1], whole["val_losses"][1]) > half["val_losses"][0], "neither is the best"


def test_the_best_validation_loss_is_of_all_validations(in_dir: Path, lockstep: Cli) -> None:
    """LLaDA's guide has that line; here the rate rises until the loss does, and the best is not the last."""
    rising = ("training.eval_interval=1", "training.warmup_steps=6", "training.learning_rate=1.0")
    made = lockstep("train", "llada", "tiny", *QUICK, "--max-steps", "6", *rising, "--name", "rising")
    assert made.code == 0, made.text
    losses = [event["val_loss"] for event in events("eval", "rising")]
    assert min(losses) < losses[-1]
    line = f"Best validation loss: {min(losses):.4f}\n"
    assert line in made.out
    assert line in lockstep("resume", "rising").out, "kept in the checkpoint"


def test_the_best_validation_loss_may_be_of_an_epoch_that_another_program_has_trained() -> None:
    for known in (Progress(val_losses=[2.0, None], best_val_loss=3.0), Progress(val_losses=[3.0], best_val_loss=2.0)):
        assert best_val_loss(cast("Parts", SimpleNamespace(progress=known))) == 2.0
    assert best_val_loss(cast("Parts", SimpleNamespace(progress=Progress(val_losses=[None])))) is None
