"""Whatever else goes wrong around a bad step - disk, memory, rows, secrets - there is a report; and life after it."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import checkpoint, endings
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.step import Stepper
from lockstep.errors import ConfigError, ExitCode, LockstepError
from lockstep.launch import failure
from lockstep.runtime import env
from tests.conftest import Outcome

Cli = Callable[..., Outcome]
QUICK = (
    "--device", "cpu", "--max-steps", "4", "training.eval_batches=1", "training.eval_interval=0", "system.threads=1",
    "training.save_interval=0", "training.checkpoint_dir=.checkpoints", "training.context_length=16",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("shared_cache")


def small(fault: str, monkeypatch: pytest.MonkeyPatch, lockstep: Cli, *words: str) -> Outcome:
    monkeypatch.setenv("LOCKSTEP_FAULT", fault)
    return lockstep("train", "llama", "tiny", *QUICK, "--name", "bad", *words)


def test_a_disk_that_is_full(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither checkpoint nor bundle can be written: the report, the exit code and the cause are there nonetheless."""
    assert lockstep("prepare", "llama", "tiny", "training.context_length=16").code == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        told = small("nan_act@step=1,module=norm", monkeypatch, lockstep, "debug.enabled=true")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told.code == 71
    assert "First bad value: norm (forward, fill" in told.out
    assert "EXITING DUE TO NaN" in told.out
    assert told.out.count("saving the state failed too") == 1
    assert "the bundle failed too" in told.out
    assert "Replay:" not in told.out
    assert "lockstep replay" not in told.err
    assert len(told.err.splitlines()) <= 5
    assert not list(in_dir.rglob("*.tmp-*"))
    failure = json.loads((in_dir / "runs" / "bad" / "failure.json").read_text())
    assert (failure["module"], failure["bundle"]) == ("norm", "")


@pytest.mark.parametrize("what", ["find_place", "run_again"])
def test_looking_that_fails_costs_the_place_only(
    what: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory to run the step once more, say: report and bundle are there, and the bundle can be replayed."""
    from lockstep.engine import autopsy

    def fails(*_: Any) -> Any:
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(autopsy, what, fails)
        told = small("nan_act@step=1,module=norm", monkeypatch, lockstep)
    assert told.code == 71
    assert "NaN LOSS DETECTED" in told.out
    note = "the place could not be found" if what == "find_place" else "the step could not be run again"
    assert f"Note: {note}: RuntimeError: no more memory" in told.out
    assert ("Gradients with NaN" in told.out) == (what == "find_place")
    assert "First bad value" not in told.out
    assert "hardware-suspect" not in told.text, "nothing is known of that"
    again = lockstep("replay", "bad")
    assert again.code == 1, "nobody knows whether it is the same place"
    assert "as it was: not finite, first in norm (forward, fill)" in again.out


def test_rows_that_nobody_knows(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.engine import autopsy

    def gone(*_: Any) -> Any:
        raise OSError("the stream is gone")

    for name in ("row_ids", "texts"):
        monkeypatch.setattr(autopsy, name, gone)
    told = small("nan_act@step=1,module=norm", monkeypatch, lockstep)
    assert told.code == 71
    assert "Rows: not known" in told.out
    assert "First bad value: norm" in told.out


def test_secrets_are_not_kept(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.engine import autopsy

    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 34)
    token = "hf_" + "q" * 34
    monkeypatch.setattr(autopsy, "texts", lambda *_: ("a row that says hf_" + "s" * 34,))
    (in_dir / "mine.json").write_text(json.dumps({"data": {"hf_token": token}}))
    told = small("nan_grad@step=1", monkeypatch, lockstep, "debug.enabled=true", "--config", "mine.json")
    assert told.code == 71
    kept = [path for path in [*in_dir.glob("runs/**/*"), *in_dir.glob(".checkpoints/**/*")] if path.is_file()]
    assert {"bundle.json", "nan_grad_step_1.pt", "nan_debug_step_1.pkl", "failure.json"} <= {path.name for path in kept}
    assert any(b"a row that says ***" in path.read_bytes() for path in kept)
    for path in kept:
        content = path.read_bytes()
        assert token.encode() not in content, path
        assert b"hf_" + b"s" * 34 not in content, path


def test_a_run_goes_on_after_a_nan(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the weights before the step, as if it had not happened; the last failure is the one to replay."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "")
    flags = (*QUICK, "debug.digest_interval=4")
    assert lockstep("train", "llama", "tiny", *flags, "--name", "well").code == 0
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_act@step=1,module=norm")
    assert lockstep("train", "llama", "tiny", *flags, "--name", "bad").code == 71
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_loss@step=2")
    assert lockstep("resume", "bad").code == 71
    assert "first in loss" in lockstep("replay", "bad").out
    monkeypatch.setenv("LOCKSTEP_FAULT", "")
    assert lockstep("resume", "bad").code == 0
    assert not (in_dir / "runs" / "bad" / "failure.json").exists()
    last = [
        [json.loads(line) for line in (in_dir / "runs" / name / "events.jsonl").read_text().splitlines()]
        for name in ("well", "bad")
    ]
    digests = [[each["digest"] for each in events if each.get("digest")][-1] for events in last]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["nan_weight", "inf_weight"])
def test_a_run_goes_on_from_before_a_weight_was_bad(
    kind: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the bad weight is saved with is evidence; the state before it is what is left to go on from."""
    flags = (*QUICK, "training.save_interval=1", "debug.digest_interval=4")
    assert lockstep("train", "llama", "tiny", *flags, "--name", "well").code == 0
    monkeypatch.setenv("LOCKSTEP_FAULT", f"{kind}@step=2,tensor=layers.1.mlp.w2.weight,index=3")
    assert lockstep("train", "llama", "tiny", *flags, "--name", "bad").code == 71
    checkpointer = Checkpointer(in_dir / "runs/bad/checkpoints")
    assert [path.name for path in checkpointer.found()] == ["step_00000001", "step_00000002", "step_00000003"]
    assert checkpointer.latest() == checkpointer.folder / "step_00000002"
    assert "step_00000003: its weights are not finite" in caplog.text
    shown = lockstep("status", "bad").out
    for line in (
        "saved: runs/bad/checkpoints/step_00000002",
        "why: lockstep replay runs/bad",
        "go on: lockstep resume",
    ):
        assert f"  {line}" in shown, shown
    assert lockstep("replay", "bad").code == 0
    monkeypatch.setenv("LOCKSTEP_FAULT", "")
    told = lockstep("resume", "bad")
    assert told.code == 0, told.text
    runs = [(in_dir / "runs" / name / "events.jsonl").read_text().splitlines() for name in ("well", "bad")]
    digests = [[each["digest"] for each in map(json.loads, lines) if each.get("digest")][-1] for lines in runs]
    assert digests[0] == digests[1]
    assert Checkpointer(checkpointer.folder).latest() == checkpointer.folder / "step_00000004"


@pytest.mark.slow
def test_a_bad_first_step_and_a_bad_validation(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bad from the beginning is met in the rehearsal already, and told by step 0."""
    from lockstep.models.llama import Llama

    forward = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, *args, **named: forward(self, *args, **named) / 0)
    told = small("", monkeypatch, lockstep)
    assert told.code == 71
    failure = json.loads((in_dir / "runs" / "bad" / "failure.json").read_text())
    assert (failure["step"], failure["module"]) == (0, "model")
    assert lockstep("replay", "bad").code == 0


@pytest.mark.parametrize("bad", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_only_the_validation_is_bad(bad: bool, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was trained on it: the run goes on, and says so."""
    from lockstep.models.llama import Llama

    forward = Llama.forward

    def in_training(self: Llama, *args: Any, **named: Any) -> Any:
        made = forward(self, *args, **named)
        return (made[0] * float("nan"), *made[1:]) if isinstance(made, tuple) and bad else made

    monkeypatch.setattr(Llama, "forward", in_training)
    told = small("", monkeypatch, lockstep)
    assert told.code == 0, told.text
    assert ("Validation loss is nan at step 4" in told.out) == bad


def test_a_process_alone_waits_for_the_save_on_its_way(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes; where the disk was at fault no other save is tried, and this one is all there is."""
    real_save, real_launch = checkpoint.save_file, Stepper.launch

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        real_save(*arguments)

    def fails(stepper: Stepper, step: int, *arguments: Any) -> Any:
        if step == 2:
            raise LockstepError("a disk is gone", exit_code=ExitCode.IO)
        return real_launch(stepper, step, *arguments)

    monkeypatch.setattr(endings, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "save_file", slow)
    monkeypatch.setattr(Stepper, "launch", fails)
    told = lockstep("train", "llama", "tiny", *QUICK, "--name", "bad", "training.save_interval=2")
    assert told.code == ExitCode.IO, told.text
    assert [path.name for path in Checkpointer(in_dir / "runs/bad/checkpoints").found()] == ["step_00000002"]


def test_weights_that_are_not_finite_are_refused_by_name(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody begins a run with them, exports them or lets them speak; the run itself goes on from before."""
    fault = "nan_weight@step=1,tensor=norm.weight,index=0"
    assert small(fault, monkeypatch, lockstep, "training.save_interval=1").code == 71
    monkeypatch.delenv("LOCKSTEP_FAULT")
    spoilt = in_dir / "runs" / "bad" / "checkpoints" / "step_00000002"
    assert not checkpoint.is_good(spoilt)
    for words in (
        ("resume", str(spoilt), "--name", "b"),
        ("train", "llama", "tiny", *QUICK, "--checkpoint", str(spoilt), "--name", "b"),
        ("sample", str(spoilt), "The"),
        ("export", str(spoilt), "--to", "hf", "b"),
    ):
        refused = lockstep(*words)
        assert refused.code == ExitCode.DATA
        assert "its weights are not finite" in refused.err
    assert not (in_dir / "runs" / "b").exists()
    assert not (in_dir / "b").exists()
    assert lockstep("sample", "bad", "The").code == 0
    assert lockstep("resume", "bad").code == 0


@pytest.mark.parametrize("step", [2, 5])
def test_nothing_is_forgotten_for_later_checkpoints_that_were_passed_over(tmp_path: Path, step: int) -> None:
    """Neither before the run has come to where they lie, nor behind it, between others: 4 was saved at a stop."""
    tensor = {"w": torch.ones(3)}
    for done in (1, 3, 4):
        Checkpointer(tmp_path, keep_last=3).save(done, State(tensor, tensor, {"step": done}))
    for done in (3, 4):  # one bit: sizes are as the manifest says
        path = tmp_path / f"step_{done:08d}" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    saver, newest = Checkpointer(tmp_path, keep_last=2), tmp_path / "step_00000001"
    assert saver.latest() == newest
    saver.go_on(1)
    saver.save(step, State(tensor, tensor, {"step": step}))
    assert checkpoint.is_good(newest)
    assert saver.latest() == tmp_path / f"step_{step:08d}"
    saver.save(6, State(tensor, tensor, {"step": 6}))
    assert [path.name for path in saver.found() if checkpoint.is_good(path)] == [f"step_{step:08d}", "step_00000006"]
    assert not newest.exists()
    saver.save(7, State(tensor, tensor, {"step": 7}))
    assert [path.name for path in saver.found()] == ["step_00000006", "step_00000007"], "damaged ones go too"


def test_a_run_keeps_what_it_went_on_from_beside_a_damaged_one_that_it_passes(in_dir: Path, lockstep: Cli) -> None:
    settings = ("training.max_steps=6", "training.save_interval=1", "checkpoint.keep_last=6")
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "a", *settings).code == 0
    folder = in_dir / "runs" / "a" / "checkpoints"
    for step in (1, 2, 5, 6):
        shutil.rmtree(folder / f"step_{step:08d}")
    model = folder / "step_00000004" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\1")
    went_on = lockstep("resume", "a", "--training.save-interval", "3", "--checkpoint.keep-last", "2")
    assert went_on.code == 0, went_on.text
    good = [path.name for path in Checkpointer(folder).found() if checkpoint.is_good(path)]
    assert good == ["step_00000003", "step_00000006"]


def test_the_last_block_has_all_of_our_own_cause_and_the_first_line_of_others() -> None:
    ours = ConfigError("belongs to another configuration:\n    max_steps: 60 in the checkpoint, 40 now", hint="none")
    place = failure.Place(0, "GPU0", 0, -1, "start")
    said = {}
    for error in (ours, RuntimeError("CUDA error: broken\nFor debugging consider\na page of it")):
        own = endings.describe(error, env.detect(), step=None)
        record = failure.build(place, exit_code=2, kind="error", cause=own["cause"], own=own, run=None)
        said[type(error)] = failure.block(record, nodes=1)
    assert said[ConfigError][1:] == [
        "  rank 0, start: belongs to another configuration: max_steps: 60 in the checkpoint, 40 now",
        "  try: none",
    ]
    assert said[RuntimeError][1] == "  rank 0, start: RuntimeError: CUDA error: broken"
