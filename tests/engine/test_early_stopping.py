"""Runs that end early, and what is said of validations at the end."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.report.jsonl import read_events
from tests.conftest import Outcome

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
