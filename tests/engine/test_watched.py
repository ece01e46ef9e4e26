"""What is told of every step of an agent's training: the documented tags, in TensorBoard and in events.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.report.jsonl import read_events
from tests.conftest import Outcome
from tests.report.test_tensorboard import read_back

Cli = Callable[..., Outcome]
QUICK = ("--device", "cpu", "system.threads=1", "--max-steps", "4", "training.eval_interval=2", "--name", "one",
         "training.gen_episodes=0", "training.grad_accum_nums=2")  # fmt: skip
DOCUMENTED = {
    "train/loss", "train/loss_action", "train/lr", "train/acc_action", "train/loss_token_type", "train/acc_token_type",
    "test/loss_action", "test/acc_action", "test/loss_token_type", "test/acc_token_type",
}  # fmt: skip


def test_the_documented_tags_are_there(in_dir: Path, lockstep: Cli) -> None:
    """Contract 4.3 and 132."""
    more = ("model.compressed=true", "model.region=20", "model.summary_tokens=2")
    done = lockstep("train", "ad", "tiny", *more, *QUICK)
    assert done.code == 0, done.text
    found = read_back(in_dir / "runs" / "one" / "tb")
    assert set(found) >= DOCUMENTED
    assert not {tag for tag in found if tag.startswith("eval/val")}
    assert {tag for tag in found if tag.startswith(("train/loss_", "train/acc_", "test/"))} == (
        DOCUMENTED - {"train/loss", "train/lr"} | {"test/loss"}
    )
    events = read_events(in_dir / "runs" / "one" / "events.jsonl")
    steps = [event for event in events if event["kind"] == "step"]
    assert [len(found[tag]) for tag in sorted(DOCUMENTED)] == [2] * 4 + [4] * 6
    for name in ("loss_action", "acc_action", "loss_token_type", "acc_token_type"):
        assert [value for _, value in found[f"train/{name}"]] == pytest.approx([step[name] for step in steps])
    for step in steps:
        assert step["loss"] == pytest.approx(step["loss_action"] + step["loss_token_type"], rel=1e-5)
        assert 0 <= step["acc_action"] <= 1
        assert (step["acc_action"] * 2 * 8 * 80) == pytest.approx(round(step["acc_action"] * 2 * 8 * 80), abs=1e-3)
    last = [event for event in events if event["kind"] == "eval"][-1]
    assert found["test/acc_action"][-1][1] == pytest.approx(last["val_acc_action"])
    assert last["val_loss"] == last["val_loss_action"]


def test_an_agent_that_says_actions_only_is_told_of_actions_only(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep("train", "ad", "tiny", *QUICK, "report.tensorboard=false").code == 0
    steps = [event for event in read_events(in_dir / "runs" / "one" / "events.jsonl") if event["kind"] == "step"]
    assert all(step["loss"] == pytest.approx(step["loss_action"], rel=1e-5) for step in steps)
    assert not any("loss_token_type" in step for step in steps)
