"""How runs end: every failing start with its own words and code, nothing hidden, nothing good overwritten."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import checkpoint, endings, milestones, state
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.errors import DataError, ExitCode, LockstepError, Stopped
from lockstep.report.jsonl import read_events
from lockstep.rundir import RunDir
from lockstep.runtime import env
from tests.conftest import Outcome
from tests.gates.training import run

Cli = Callable[..., Outcome]
TINY = ("train", "llama", "tiny", "--device", "cpu", "--max-steps", "2", "training.eval_batches=1", "system.threads=1")

pytestmark = pytest.mark.usefixtures("shared_cache")

FAILING_STARTS = [  # settings, exit code, what the user must read
    (("data.dataset_name=wikitext",), 66, "wikitext"),
    (("--data-path", "missing.txt"), 66, "missing.txt"),
    (("--data-path", "empty.txt"), 65, "too few"),
    (("--data-path", "short.txt"), 65, "too few"),
    (("data.tokenizer_name=no/such/tokenizer",), 66, "no/such/tokenizer"),
    (("model.attention_backend=cudnn",), 2, "attention_backend"),
    (("--checkpoint", "nowhere.pt"), 66, "nowhere.pt"),
    (("--checkpoint", "junk.pt"), 65, "refused"),
    (("--resume", "runs/nothing"), 66, "runs/nothing"),
    (("data.cache_dir=/proc/cache",), 73, "/proc/cache"),
    (("training.checkpoint_dir=/proc/checkpoints",), 73, "training.checkpoint_dir"),
    (("--out", "/proc/out"), 73, "/proc/out"),
    (
        ("model.model_path=meta-llama/Llama-3.1-8B", "model.num_layers=32", "data.tokenizer_name=builtin"),
        1,
        "does not fit",
    ),
]


@pytest.mark.parametrize(("settings", "code", "words"), FAILING_STARTS, ids=lambda value: str(value)[:40])
def test_a_failing_start_says_why(
    settings: tuple[str, ...], code: int, words: str, in_dir: Path, lockstep: Cli
) -> None:
    """With all sinks on, as users run it."""
    (in_dir / "empty.txt").write_text("")
    (in_dir / "short.txt").write_text("too short\n\nreally")
    (in_dir / "junk.pt").write_bytes(b"not a checkpoint")
    failed = lockstep(*TINY, *settings)
    assert failed.code == code, failed.text
    assert words in failed.err
    assert "Traceback" not in failed.text
    assert "fault of lockstep" not in failed.text
    assert not (in_dir / "runs" / "latest").exists(), "a run that never started is not the latest"


def test_a_broken_sink_does_not_hide_the_error(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("the sink broke")

    monkeypatch.setattr("lockstep.report.tensorboard.TensorboardSink.event", broken)
    failed = lockstep(*TINY, "--data-path", "missing.txt")
    assert failed.code == 66
    assert "missing.txt" in failed.err


def test_a_failing_last_save_does_not_hide_the_error(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = milestones.capture, list[Any]()

    def dying_gpu(*given: Any) -> State:
        calls.append(given)
        if len(calls) == 1:  # to know how large a checkpoint will be
            return real(*given)
        raise RuntimeError("CUDA error: the card is gone")

    monkeypatch.setattr(milestones, "capture", dying_gpu)
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_loss@step=1")
    failed = lockstep(*TINY, "--name", "a")
    assert failed.code == ExitCode.NON_FINITE
    assert json.loads((in_dir / "runs" / "a" / "failure.json").read_text())["exit_code"] == 71
    assert "the card is gone" in failed.out


def test_a_failure_at_step_0_leaves_a_checkpoint(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_grad@step=0")
    assert lockstep(*TINY, "--name", "a", "training.checkpoint_dir=.checkpoints").code == ExitCode.NON_FINITE
    assert (in_dir / "runs" / "a" / "checkpoints" / "step_00000000").is_dir()
    assert [path.name for path in (in_dir / ".checkpoints").iterdir()] == ["nan_grad_step_0.pt"]
    monkeypatch.delenv("LOCKSTEP_FAULT")
    assert lockstep("resume", "runs/a").code == 0
    assert not (in_dir / "runs" / "a" / "failure.json").exists(), "made good"


def test_out_of_memory_says_how_much_and_the_advice_can_be_followed(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 7, 8, of a process alone: the numbers, and a command that goes on from what was saved."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "oom@step=1")
    failed = lockstep(*TINY, "--name", "a")
    record = json.loads((in_dir / "runs" / "a" / "failure.json").read_text())
    assert (failed.code, record["kind"], record["exit_code"]) == (1, "memory", 1)
    assert record["requested_bytes"] is None, "a bare MemoryError does not say"
    assert 0 < record["estimated_bytes"] < record["peak_bytes"] < record["limit_bytes"]
    assert record["trace"][-1] == "MemoryError", "where it was, not only that it was"
    assert f"try: {record['next']}" in failed.err
    assert len(failed.err.splitlines()) <= 5
    command, _, words = record["next"].partition(" (")
    assert command == "lockstep resume runs/a --gradient-checkpointing", "no number changes: no leave is needed"
    assert "by the estimate" in words
    monkeypatch.delenv("LOCKSTEP_FAULT")
    assert lockstep(*command.split()[1:]).code == 0
    refused = lockstep("resume", "runs/a", "--training.batch-size", "1")
    assert refused.code == 2, "the control: without leave another batch is another run"


def test_an_exception_ends_with_what_to_do_next(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 9, of a process alone."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "raise@step=1")
    failed = lockstep(*TINY, "--name", "a")
    record = json.loads((in_dir / "runs" / "a" / "failure.json").read_text())
    assert record["next"] == "lockstep resume runs/a"
    assert f"  try: {record['next']}" in failed.err.splitlines()
    assert len(failed.err.splitlines()) <= 5
    assert "requested_bytes" not in record, "no shortage of memory"


def test_a_full_disk_is_not_written_to_again(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 21: how much is free and needed; from what was saved before one can go on."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    real, saves = checkpoint.save_file, []

    def save_file(tensors: Any, path: Path) -> None:
        saves.append(path)
        (real if len(saves) <= 2 else full)(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    failed = lockstep(*TINY, "--name", "a", "training.save_interval=1")
    assert failed.code == ExitCode.IO, failed.text
    assert re.search(r"MiB free, [1-9][\d.]* MiB needed\)", failed.err), failed.err
    assert failed.err.splitlines()[-1].endswith("resume runs/a")
    assert len(saves) == 3, "no second try"
    monkeypatch.setattr(checkpoint, "save_file", real)
    assert lockstep("resume", "runs/a").code == 0


def test_an_error_after_the_update_saves_nothing(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are then of step 2, the counts of step 1: no state that may be gone on from."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "flip_weight@step=1,tensor=nope,bit=3")
    failed = lockstep(*TINY, "--name", "a")
    assert failed.code == 2
    assert not list((in_dir / "runs" / "a" / "checkpoints").glob("step_*"))


def test_a_refused_resume_leaves_a_good_run_as_it_was(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep(*TINY, "--name", "a").code == 0
    before = (in_dir / "runs" / "a" / "events.jsonl").read_bytes()
    refused = lockstep(*TINY, "--resume", "runs/a", "--lr", "1e-4")
    assert refused.code == 2
    assert "training.learning_rate" in refused.err
    assert (in_dir / "runs" / "a" / "events.jsonl").read_bytes() == before
    assert not (in_dir / "runs" / "a" / "failure.json").exists()
    again = lockstep("resume", "runs/a")
    assert again.code == 0
    assert "nan" not in again.out
    assert "weights: random" not in again.out


def test_other_folders_are_not_checkpoints(in_dir: Path, lockstep: Cli) -> None:
    flags = (*TINY[:-2], "training.save_interval=1", "--name", "a")
    assert lockstep(*flags).code == 0
    folder = in_dir / "runs" / "a" / "checkpoints"
    shutil.copytree(folder / "step_00000001", folder / "step_best")
    shutil.copytree(folder / "step_00000001", folder / "step_00000001_backup")
    assert [path.name for path in Checkpointer(folder).found()] == ["step_00000001", "step_00000002"]
    Checkpointer(folder, keep_last=2).save(3, checkpoint.load(folder / "step_00000002"))
    assert (folder / "step_best").is_dir()
    assert (folder / "step_00000001_backup").is_dir()
    assert [path.name for path in Checkpointer(folder).found()] == ["step_00000002", "step_00000003"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    tensor = {"w": torch.ones(3)}
    saver = Checkpointer(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        saver.save(step, State(tensor, tensor, {"step": step}))
    (tmp_path / "step_00000003" / "model.safetensors").write_bytes(b"")
    saver.save(4, State(tensor, tensor, {"step": 4}))
    assert [path.name for path in saver.found() if checkpoint.is_good(path)] == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize(
    "manifest",
    [
        '{"format": 1, "files": {}}',
        "[]",
        "{",
        '{"format": 1, "files": {"%s": {"bytes": 1, "sha256": ""}}}' % ("x" * 300),
    ],
)
def test_an_odd_manifest_is_passed_over(manifest: str, tmp_path: Path) -> None:
    tensor = {"w": torch.ones(3)}
    saver = Checkpointer(tmp_path)
    for step in (1, 2):
        saver.save(step, State(tensor, tensor, {"step": step}))
    (tmp_path / "step_00000002" / "manifest.json").write_text(manifest)
    newest = saver.latest()
    assert newest is not None
    assert newest.name == "step_00000001"


def test_the_tokenizer_survives_a_cleared_cache(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rm -rf .cache` is a documented command; given during a run it must not cost the run its tokenizer."""
    import lockstep.engine.loop as loop

    save = loop.save

    def clear_then_save(*args: Any, **options: Any) -> None:
        shutil.rmtree(in_dir / "mine", ignore_errors=True)
        save(*args, **options)

    monkeypatch.setattr(loop, "save", clear_then_save)
    assert lockstep(*TINY, "--name", "a", "data.cache_dir=mine").code == 0
    assert not (in_dir / "mine").exists()
    assert lockstep("sample", "runs/a", "The", "--tokens", "3").code == 0


def test_a_prompt_that_cannot_be_read_does_not_undo_the_training(in_dir: Path, lockstep: Cli) -> None:
    flags = ("data.dataset_name=synthetic", "data.tokenizer_name=auto", "report.sample_prompt=ZZZ")
    done = lockstep(*TINY, *flags, "--name", "a")
    assert done.code == 0, done.text
    assert "No sample" in done.out
    assert read_events(in_dir / "runs" / "a" / "events.jsonl")[-1]["kind"] == "end"


def test_from_fp32_to_fp16_with_leave(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep(*TINY, "--name", "a").code == 0
    flags = ("--resume", "runs/a", "--checkpoint.allow-mismatch", "true", "--precision", "fp16", "training.max_steps=3")
    changed = lockstep(*TINY, *flags)
    assert changed.code == 0, changed.text
    assert "no loss scale" in changed.out


def test_foreign_folders_beside_the_runs_are_no_trouble(in_dir: Path, lockstep: Cli) -> None:
    for number, text in enumerate(("[]", "{", '{"family": "llama", "created": "x"}')):
        (in_dir / "runs" / f"odd{number}").mkdir(parents=True)
        (in_dir / "runs" / f"odd{number}" / "config.json").write_text(text)
    assert lockstep(*TINY, "--resume", "auto").code == 0


DAMAGES: list[Callable[[dict[str, Any]], None]] = [
    lambda run: run.update(format=2),
    lambda run: run.pop("progress"),
    lambda run: run.pop("applied_steps"),
    lambda run: run["progress"].update(extra=1),
    lambda run: run["progress"].update(step=-3),
    lambda run: run["progress"].update(step="x"),
    lambda run: run["progress"].update(step=7),
    lambda run: run.update(loss_scale={"scale": "x"}),
    lambda run: run["about"].pop("identity"),
    lambda run: run["about"].update(data_key="another"),
    lambda run: run.update(about=[]),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_a_state_that_does_not_add_up_is_refused(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    settings = {"training.max_steps": 2, "training.eval_interval": 0}
    run(tmp_path / "a", settings)
    folder = tmp_path / "a" / "checkpoints" / "step_00000002"
    good = checkpoint.load(folder)
    values = json.loads(json.dumps(good.run))
    damage(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", lambda *_: State(good.model, good.optimizer, values))
        with pytest.raises(LockstepError):
            run(tmp_path / "b", settings, point=folder)


def test_moments_of_another_shape_are_refused(tmp_path: Path) -> None:
    settings = {"training.max_steps": 2, "training.eval_interval": 0}
    parts, _ = run(tmp_path / "a", settings)
    good = checkpoint.load(tmp_path / "a" / "checkpoints" / "step_00000002")
    name = "exp_avg.tok_embed.weight"
    with pytest.raises(DataError, match="moments are of another model"):
        state.restore(parts.stepper, State(good.model, {**good.optimizer, name: torch.zeros(1)}, good.run))


def test_a_documented_file_of_another_program_can_be_gone_on_from(in_dir: Path, lockstep: Cli) -> None:
    flags = (*TINY, "training.checkpoint_dir=.checkpoints", "--precision", "fp16", "training.save_interval=1")
    assert lockstep(*flags, "training.context_length=8").code == 0
    path = in_dir / ".checkpoints" / "step_1.pt"
    content = torch.load(path, weights_only=True)
    assert {"scale", "growth_tracker"} <= content["scaler_state_dict"].keys(), "contract 1.3: when AMP"
    del content["lockstep"]
    torch.save(content, path)
    resumed = lockstep(*flags, "training.context_length=8", "--name", "b", "--checkpoint", ".checkpoints/step_1.pt")
    assert resumed.code == 0, resumed.text
    assert "begin at zero" in resumed.out
    steps = [event["step"] for event in read_events(in_dir / "runs" / "b" / "events.jsonl") if event["kind"] == "step"]
    assert steps == [1]


@pytest.mark.parametrize("content", [torch.ones(2), {}, [1], {"optimizer_state_dict": {"state": []}, "global_step": 1}])
def test_other_pt_files_are_refused(content: Any, in_dir: Path, lockstep: Cli) -> None:
    torch.save(content, in_dir / "odd.pt")
    refused = lockstep(*TINY, "--checkpoint", "odd.pt")
    assert refused.code == ExitCode.DATA, refused.text
    assert "odd.pt" in refused.err


def test_a_file_of_another_model_is_refused_for_what_it_is(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep(*TINY, "training.checkpoint_dir=.checkpoints").code == 0
    other = (*TINY, "model.num_layers=3", "--checkpoint", ".checkpoints/step_2.pt", "--name", "b")
    refused = lockstep(*other)
    assert refused.code == 2, refused.text
    assert "model.num_layers" in refused.err
    forced = lockstep(*other[:-1], "c", "--checkpoint.allow-mismatch", "true")
    assert forced.code == ExitCode.DATA
    assert "are of another model" in forced.err


def test_a_missing_file_is_said_before_anything_is_made(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep(*TINY, "--checkpoint", "nowhere.pt", "--name", "a").code == ExitCode.NOT_FOUND
    assert not (in_dir / "runs").exists()


def test_resume_takes_a_run_by_its_name(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep(*TINY, "--name", "a").code == 0
    for name in ("a", "latest"):
        again = lockstep(*TINY, "--resume", name)
        assert again.code == 0, again.text
        assert "Nothing left to do" in again.out


def test_a_batch_beyond_all_memory_is_refused(in_dir: Path, lockstep: Cli) -> None:
    refused = lockstep(*TINY, "training.batch_size=1000000")
    assert refused.code == 1
    assert "training.batch_size" in refused.err


def test_commands_to_copy_are_quoted(in_dir: Path, lockstep: Cli) -> None:
    done = lockstep(*TINY, "--out", "my runs", "--name", "a", "report.sample_prompt=it's")
    assert "sample 'my runs/a' 'it'\"'\"'s'" in done.out


def test_another_workers_failure_is_not_called_a_lost_contact() -> None:
    """One whose error says why has not merely gone away."""
    told = LockstepError("GPU 1 ends step 3 with other bits")
    told.secondary = True
    gone = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
    unused: Any = None  # these two errors ask for no plan, run or place
    said = [endings.explain(error, unused, run=unused, place=unused) for error in (told, gone)]
    assert [str(each) for each in said] == [
        "another worker failed: GPU 1 ends step 3 with other bits",
        f"lost contact with another worker ({gone})",
    ]
    assert all(isinstance(each, LockstepError) and each.secondary for each in said)


@pytest.mark.parametrize("proof", [False, True])
def test_a_stop_says_how_to_go_on_and_a_proof_has_nothing_to(tmp_path: Path, proof: bool) -> None:
    """Its folder is gone when the user reads it."""
    stopped = Stopped("stopped by SIGTERM")
    with env.changed(env.UNTIL, f"9:{tmp_path if proof else 'another'}"):
        endings.point_to_resuming(stopped, RunDir(tmp_path))
    assert (f"resume {tmp_path}" in str(stopped)) is not proof
    assert (str(tmp_path) in str(stopped)) is not proof


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(OSError(errno.EIO, "broken"), "io"), (OSError(errno.ENOSPC, "full"), "disk_full"), (None, "disk_full")],
)
def test_only_want_of_room_is_a_full_disk(cause: OSError | None, kind: str) -> None:
    """The one is answered by a restart, the other is not. Without the system's word it was our own count."""
    error = LockstepError("saving failed", exit_code=ExitCode.IO)
    error.__cause__ = cause
    assert endings.describe(error, env.detect(), step=1)["kind"] == kind
