"""What a checkpoint belongs to: another configuration is refused before anything is loaded, other bits are told of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import identity, load
from lockstep.engine import build, checkpoint, resume
from lockstep.report.jsonl import read_events
from lockstep.rundir import RunDir
from tests.conftest import Outcome
from tests.gates.training import FEW_WORDS

Cli = Callable[..., Outcome]
QUICK = ("--device", "cpu", "report.sample_prompt=", "report.tensorboard=false", "training.eval_batches=1",
         "system.threads=1", "model.num_layers=1", "--max-steps", "2", f"data.data_path={FEW_WORDS}")  # fmt: skip
OTHERS = (
    "model.hidden_size=32", "model.num_layers=3", "model.num_attention_heads=8", "model.num_key_value_heads=1",
    "model.intermediate_size=48", "model.vocab_size=400", "model.init_std=0.5", "model.dropout=0.3",
    "model.tie_word_embeddings=true", "training.learning_rate=1e-4", "training.weight_decay=0.3",
    "training.warmup_steps=1", "training.batch_size=3", "training.context_length=16", "training.max_grad_norm=0.5",
    "training.adam_beta2=0.9", "training.max_steps=9", "system.seed=7", "data.documents=masked",
    "data.validation_fraction=0.3",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.mark.slow
def test_another_configuration_is_refused_before_anything_is_loaded(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 27, each of 20: model, vocabulary, data, numbers. The difference is shown, the run is not touched."""
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "a").code == 0
    before = {path: path.stat().st_mtime_ns for path in (in_dir / "runs" / "a").rglob("*")}

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded")

    for module, name in ((build, "assemble"), (checkpoint, "load"), (checkpoint, "Stored")):
        monkeypatch.setattr(module, name, never)
    assert len(OTHERS) == 20
    for other in OTHERS:
        said = lockstep("train", "llama", "tiny", *QUICK, "--resume", "runs/a", other)
        key = other.partition("=")[0]
        assert (said.code, said.err.count("error: ")) == (2, 1), f"{other}: {said.text}"
        assert f"    {key}: " in said.err, said.err
        assert "allow-mismatch" in said.err
    assert {path: path.stat().st_mtime_ns for path in (in_dir / "runs" / "a").rglob("*")} == before


HERE: dict[str, Any] = {
    "family": "llama", "identity": identity(load("llama", preset="tiny").config),
    "data_key": "k", "device_name": "NVIDIA H200", "attention": "flex", "compiled": False,
    "cpu_kernels": "AVX2", "versions": {"torch": "2.13.0", "cuda": "13.0", "cudnn": "91002", "python": "3.12.1"},
    "config": {"system": {"deterministic": True}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device_name": "NVIDIA H100"}, "saved with device_name NVIDIA H100, now NVIDIA H200"),
        ({"device_name": "CPU (4 threads)"}, "saved with device_name CPU (4 threads), now NVIDIA H200"),
        ({"attention": "cudnn"}, "saved with attention cudnn, now flex"),
        ({"compiled": True}, "saved with compiled True, now False"),
        ({"cpu_kernels": "AVX512"}, "saved with cpu_kernels AVX512, now AVX2"),
        ({"versions": {**HERE["versions"], "torch": "2.11.0"}}, "saved with torch 2.11.0, now 2.13.0"),
        ({"versions": {**HERE["versions"], "cuda": ""}}, "saved with cuda none, now 13.0"),
        ({"versions": {**HERE["versions"], "python": "3.11.0"}}, ""),
        ({}, ""),
    ],
)
def test_what_decides_the_bits_is_told_in_one_line(
    change: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    resume.check_belongs(HERE | change, HERE, checkpoint=Path("c"), allow=False)
    wanted = [f"The bits may differ from here on: {told}"] if told else []
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == wanted


def crew(system: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {**HERE, "config": {"system": {**HERE["config"]["system"], **system}}, **about}


@pytest.mark.parametrize(
    ("was", "expected"),
    [
        (crew({"mode": "ddp"}, world=2), []),
        (HERE, []),  # of an older program, which says neither
        (
            crew({"mode": "fsdp"}, world=4),
            ["system.mode: fsdp in the checkpoint, ddp now", "world: 4 in the checkpoint, 2 now"],
        ),
    ],
)
def test_another_crew_is_told_where_the_checkpoint_says_who_it_was(
    was: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "read_about", lambda _: was)
    now = crew({"mode": "ddp"}, world=2)
    assert resume.other_crew(resume.ResumePoint(Path("step_00000001"), None), now) == expected


def test_a_run_carries_its_label_and_another_thread_count_is_told(in_dir: Path, lockstep: Cli) -> None:
    """Banner, first event, checkpoint and `status` say the same; a resume with another count names both."""
    label = "bit-reproducible on this kind of CPU with 1 thread"
    first = lockstep("train", "llama", "tiny", *QUICK, "--name", "a")
    assert label in first.out
    folder = in_dir / "runs" / "a"
    assert [event["determinism"] for event in read_events(folder / "events.jsonl") if event["kind"] == "start"] == [
        label
    ]
    about = resume.read_about(folder / "checkpoints" / "step_00000002")
    assert (about["determinism"], about["threads"], bool(about["attention"])) == (label, 1, True)
    assert f"  {label}\n" in lockstep("status", "a").out
    again = lockstep("resume", "a", "system.threads=2", "--checkpoint.allow-mismatch", "true", "--max-steps", "3")
    assert again.code == 0, again.text
    assert "saved with device_name CPU (1 thread), now CPU (2 threads)" in again.text


def test_other_settings_that_were_insisted_on_are_those_of_the_run_from_then_on(in_dir: Path, lockstep: Cli) -> None:
    """A longer run that is interrupted goes on as it was asked to: `resume` alone, and from an older checkpoint too."""
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "a", "training.save_interval=1").code == 0
    done = lockstep("resume", "a")
    assert "more: lockstep resume runs/a --max-steps 4 --checkpoint.allow-mismatch true" in done.out
    longer = lockstep("resume", "a", "--max-steps", "4", "--checkpoint.allow-mismatch", "true", "--lr", "1e-3")
    assert longer.code == 0, longer.text
    again = lockstep("resume", "a")
    assert again.code == 0, again.text
    assert "Nothing left to do: all 4 steps are done" in again.out
    checkpoints = in_dir / "runs" / "a" / "checkpoints"
    middle = lockstep("resume", str(checkpoints / "step_00000003"), "--name", "b")
    assert middle.code == 0, middle.text
    newest = resume.read_about(in_dir / "runs" / "b" / "checkpoints" / "step_00000004")
    assert (newest["identity"]["training.max_steps"], newest["identity"]["training.learning_rate"]) == (4, 1e-3)
    assert lockstep("resume", "a", "--max-steps", "5").code == 2, "others are refused as before"
    broken = checkpoints / "step_00000004" / "run.json"
    broken.write_bytes(broken.read_bytes().replace(b'"training.max_steps": 4', b'"training.max_steps": 9'))
    passed_over = lockstep("resume", "a")
    assert passed_over.code == 0, passed_over.text
    assert "Checkpoint passed over" in passed_over.text
    assert "Step [3/4]" in passed_over.out


@pytest.mark.parametrize("place", [("--name", "b"), ("--out", "other", "--name", "b")])
def test_another_name_or_folder_is_a_run_of_its_own(in_dir: Path, lockstep: Cli, place: tuple[str, ...]) -> None:
    """It begins where the other stands, of which nothing is touched."""
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "a").code == 0
    before = {path: path.stat().st_mtime_ns for path in (in_dir / "runs" / "a").rglob("*")}
    flags = ("--max-steps", "3", "--checkpoint.allow-mismatch", "true")
    forked = lockstep("resume", "a", *flags, *place)
    assert forked.code == 0, forked.text
    assert {path: path.stat().st_mtime_ns for path in (in_dir / "runs" / "a").rglob("*")} == before
    folder = in_dir / ("other" if "--out" in place else "runs") / "b"
    assert [event["step"] for event in read_events(folder / "events.jsonl") if event["kind"] == "step"] == [2]
    assert lockstep("resume", str(folder)).code == 0
    copied = lockstep("resume", "a", "--name", "c")
    assert "Nothing left to do" in copied.out
    assert resume.has_saved(RunDir(in_dir / "runs" / "c")), "it can be sampled from"
    same = lockstep("resume", "a", "--name", "a")
    assert "run folder   runs/a\n" in same.out


def test_nobody_can_insist_on_another_family_or_on_fewer_steps_than_are_done(in_dir: Path, lockstep: Cli) -> None:
    """Refused before the run is touched, without the offer to insist; a fork of an older checkpoint may be short."""
    assert lockstep("train", "llama", "tiny", *QUICK, "--name", "a", "training.save_interval=1").code == 0
    before = {path: path.stat().st_mtime_ns for path in (in_dir / "runs" / "a").rglob("*")}
    insists = ("--checkpoint.allow-mismatch", "true")
    for words in (("--resume", "a"), ("--resume", "a", *insists), ("--resume", "auto", "--name", "a", *insists)):
        other = lockstep("train", "mlm", "tiny", *QUICK, *words)
        assert other.code == 2, other.text
        assert "error: runs/a: is of the family llama, and mlm was asked for\n" in other.err
        assert "try: lockstep resume runs/a goes on with it" in other.err
    for words in ((), insists):
        fewer = lockstep("resume", "a", "--max-steps", "1", *words)
        assert fewer.code == 2, fewer.text
        assert "training.max_steps 1, and 2 steps are done\n  try: --max-steps 2 or more" in fewer.err
    assert {path: path.stat().st_mtime_ns for path in (in_dir / "runs" / "a").rglob("*")} == before
    older = str(in_dir / "runs" / "a" / "checkpoints" / "step_00000001")
    forked = lockstep("resume", older, "--name", "b", "--max-steps", "1", *insists)
    assert "Nothing left to do: all 1 steps are done" in forked.out, forked.text
