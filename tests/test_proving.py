"""`lockstep resume RUN --prove`: the same bits for every family, else the first difference; the run is untouched."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lockstep import proving, rundir
from lockstep.config.load import load, to_dict
from lockstep.engine.checkpoint import MODEL
from lockstep.errors import ExitCode
from lockstep.report.jsonl import read_events
from lockstep.rundir import RunDir
from lockstep.runtime import env, owner
from tests.conftest import Outcome
from tests.gates.training import FEW_WORDS

Cli = Callable[..., Outcome]

pytestmark = pytest.mark.usefixtures("shared_cache")

SHORT = ("--device", "cpu", "system.threads=1", "training.eval_batches=1", "training.eval_interval=0",
         "model.dropout=0.1")  # fmt: skip
TEXT = (*SHORT, f"data.data_path={FEW_WORDS}", "training.context_length=32", "training.batch_size=2",
        "report.sample_prompt=", "data.num_workers=0")  # fmt: skip
OF_FAMILY = {
    "llama": TEXT,
    "mlm": (*TEXT, "training.epochs=3"),
    "llada": (*TEXT, "training.grad_accum_nums=2"),
    "ad": (*SHORT, "training.gen_episodes=0", "training.batch_size=4", "data.num_workers=0",
           "data.train_source_timesteps=60", "training.context_length=40"),
}  # fmt: skip


def train(lockstep: Cli, name: str, *words: str, family: str = "llama", steps: int = 4) -> Path:
    given = (*OF_FAMILY[family], "--max-steps", str(steps), "training.save_interval=2", *words)
    ended = lockstep("train", family, "tiny", *given, "--name", name)
    assert ended.code == 0, ended.text
    return Path("runs", name)


def contents(run: Path) -> dict[str, tuple[int, str]]:
    """Every file of a run: when it was written, and what is in it."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def points(run: Path) -> list[tuple[str, int]]:
    """What TensorBoard would draw: (tag, step) of every point."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tb"))
    read.Reload()
    return [(tag, point.step) for tag in read.Tags()["scalars"] for point in read.Scalars(tag)]


def figures(run: Path) -> list[tuple[Any, ...]]:
    """Every line with figures of a step that counts."""
    events = read_events(run / "events.jsonl")
    told = ("step", "eval", "epoch", "walk", "save")
    return [(event["kind"], event["step"], event.get("epoch")) for event in events if event["kind"] in told]


@pytest.mark.parametrize(
    ("asked", "compiled", "expected"),
    [("auto", True, "on"), ("auto", False, "off"), ("auto", None, "auto"), ("off", True, "off")],
)
def test_a_proof_is_compiled_as_the_run_was(tmp_path: Path, asked: str, compiled: bool | None, expected: str) -> None:
    """What `auto` had measured is not measured again."""
    tree = to_dict(load("llama", preset="tiny", flags=[("model.compile", asked)]).config)
    about = {"config": tree, "world": 1, "threads": 0, "compiled": compiled}
    task = proving.Task(RunDir(tmp_path), tmp_path / "step_00000002", 2, None, 0, about)
    written = json.loads(proving.write_settings(task, tmp_path).read_text())
    assert written["model"]["compile"] == expected


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.slow if family in ("mlm", "llada") else ()) for family in OF_FAMILY],
)
def test_steps_made_again_have_the_same_bits_and_are_told_once(family: str, in_dir: Path, lockstep: Cli) -> None:
    """Of every family, with dropout on: a proof touches nothing, and a run that goes on doubles nothing."""
    run = train(lockstep, "run", "training.eval_interval=1", "report.results_dir=results", family=family, steps=3)
    before, around = contents(run), sorted(path.name for path in Path("runs").iterdir())
    proven = lockstep("resume", "run", "--prove")
    assert proven.code == 0, proven.text
    assert "steps 2 to 2 again, from step_00000002" in proven.out
    assert "1 of 1 steps on record, equal bits" in proven.out
    assert proven.out.splitlines()[-1] == "Proven: the same bits"
    assert contents(run) == before
    assert sorted(path.name for path in Path("runs").iterdir()) == around

    lines, drawn = figures(run), points(run)
    history = {path.name: path.read_bytes() for path in sorted(Path("results").glob("*.json"))}
    assert [entry for entry in lines if entry[0] == "step"] == [("step", step, None) for step in range(3)]
    assert len(set(lines)) == len(lines)
    shutil.rmtree(run / "checkpoints" / "step_00000003")
    for attempt in ("from before the last step", "from the end"):
        assert lockstep("resume", "run").code == 0, attempt
        assert sorted(figures(run)) == sorted(lines), attempt
        assert sorted(points(run)) == sorted(drawn), attempt
        assert {path.name: path.read_bytes() for path in sorted(Path("results").glob("*.json"))} == history, attempt
    assert lockstep("resume", "run", "--prove").code == 0, "also of a run that was interrupted"


def test_from_the_beginning_and_to_a_checkpoint_that_is_named(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule is that of the whole run, although the proof ends before. What is left of another ends nothing."""
    monkeypatch.setenv(env.UNTIL, "1")
    run = train(lockstep, "run", "training.warmup_steps=3")
    first = lockstep("resume", str(run / "checkpoints" / "step_00000002"), "--prove")
    assert first.code == 0, first.text
    assert "step_00000002\n  steps 0 to 1 again, from the beginning" in first.out
    assert "2 of 2 steps on record, equal bits" in first.out
    whole = lockstep("resume", "run", "--prove", "--steps", "3")
    assert whole.code == 0, whole.text
    assert "steps 0 to 3 again, from the beginning" in whole.out, "no checkpoint lies three steps before"
    refused = lockstep("resume", "run", "--prove", "--steps", "9")
    assert refused.code == ExitCode.USAGE
    assert "the checkpoint has only 4 behind it" in refused.err


def test_a_run_that_began_elsewhere_is_proven_from_there(in_dir: Path, lockstep: Cli) -> None:
    older = train(lockstep, "older") / "checkpoints" / "step_00000002"
    train(lockstep, "younger", "training.save_interval=0", "--resume", str(older))
    before = contents(Path("runs"))
    proven = lockstep("resume", "younger", "--prove")
    assert proven.code == 0, proven.text
    assert contents(Path("runs")) == before
    assert "steps 2 to 3 again, from step_00000002" in proven.out
    too_many = lockstep("resume", "younger", "--prove", "--steps", "3")
    assert too_many.code == ExitCode.USAGE
    assert "--steps 2" in too_many.err
    older.rename(older.with_name("gone"))
    lost = lockstep("resume", "younger", "--prove")
    assert lost.code == ExitCode.NOT_FOUND
    assert "began at step 2 from a state that is gone" in lost.err


def test_a_bit_that_flipped_is_found(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a weight that changed on its own after step 2 shows in the loss of step 3 and in the state."""
    with monkeypatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", "flip_weight@rank=0,step=2,tensor=norm.weight,index=5,bit=21")
        train(lockstep, "run")
    refuted = lockstep("resume", "run", "--prove")
    assert refuted.code == ExitCode.FAILED, refuted.text
    assert "first difference at step 3: loss 0x" in refuted.out
    assert " tensors differ, first weights " in refuted.out
    assert refuted.out.splitlines()[-1] == "Not proven: other bits, first in step 3"


def test_what_does_not_belong_together_is_found(in_dir: Path, lockstep: Cli) -> None:
    """Negative controls: one weight of a checkpoint changed and its manifest made to fit; one digit of the record."""
    run = train(lockstep, "run")
    other = shutil.copytree(run, Path("runs", "other"))
    target = run / "checkpoints" / "step_00000004"
    weights = load_file(target / MODEL)
    weights["norm.weight"][5] += 1e-6
    save_file(weights, target / MODEL)
    (target / rundir.MANIFEST).unlink()
    rundir.seal(target)
    refuted = lockstep("resume", "run", "--prove")
    assert refuted.code == ExitCode.FAILED, refuted.text
    assert "2 of 2 steps on record, equal bits" in refuted.out
    assert "1 of 63 tensors differ, first weights norm.weight, 1 of 64 elements, the first at 5: 0x" in refuted.out
    assert refuted.out.splitlines()[-1] == "Not proven: other bits, first in the state after step 3"

    events = [json.loads(line) for line in (other / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["kind"] == "step" and event["step"] == 3:
            event["loss_hex"] = (event["loss"] + 1e-9).hex()
    (other / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    refuted = lockstep("resume", "other", "--prove")
    assert refuted.code == ExitCode.FAILED
    assert "63 tensors equal" in refuted.out
    assert refuted.out.splitlines()[-1] == "Not proven: other bits, first in step 3"


def test_a_proof_that_fails_leaves_what_it_speaks_of(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle of a NaN, not the checkpoints of the run."""
    run = train(lockstep, "run")
    before = contents(run)
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_loss@step=3")
    failed = lockstep("resume", "run", "--prove")
    assert failed.code == ExitCode.NON_FINITE, failed.text
    (bundle,) = re.findall(r"try: lockstep replay ([^;\s]+)", failed.err)
    assert list(Path(bundle).iterdir())
    (scratch,) = Path("runs").glob(".prove-*")
    assert f"left for you to look at and to remove: {scratch.resolve()}" in failed.out
    assert contents(run) == before
    assert owner.read(scratch) is None, "the next proof leaves it too"


def test_what_a_killed_proof_has_left_goes_with_the_next_one(in_dir: Path) -> None:
    """Only that: not what a proof works in, here or on another machine, and nothing without an owner."""
    run = in_dir / "runs" / "run"
    folders = {name: run.with_name(f".prove-{name}") for name in ("killed", "working", "elsewhere", "nobodys")}
    for folder in (run, *folders.values()):
        (folder / "again").mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        for name in ("killed", "elsewhere"):
            owner.write(folders[name], [], pid=process.pid)
        process.kill()
    away = json.loads((folders["elsewhere"] / owner.FILE).read_text()) | {"host": "another"}
    rundir.write_json(folders["elsewhere"] / owner.FILE, away)
    owner.write(folders["working"], [])
    with proving._scratch(run) as scratch:
        assert {path.name for path in run.parent.iterdir()} == {
            "run", ".prove-working", ".prove-elsewhere", ".prove-nobodys", scratch.name
        }  # fmt: skip
        told = owner.read(scratch)
        assert told is not None
        assert told.is_alive()
    assert not scratch.exists()


def test_a_run_that_is_running_is_not_proven(in_dir: Path, lockstep: Cli) -> None:
    """It may remove the checkpoints meanwhile. Control: with the process gone the run is looked into."""
    run = in_dir / "runs" / "run"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with subprocess.Popen(["sleep", "60"]) as process:
        owner.write(run, [], pid=process.pid)
        refused = lockstep("resume", "run", "--prove")
        process.kill()
    assert refused.code == ExitCode.USAGE
    assert f"process {process.pid} still trains this run" in refused.err
    assert "lockstep stop" in refused.err
    assert "still trains" not in lockstep("resume", "run", "--prove").err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--steps", "2"), "is for a proof"),
        (("--prove", "--lr", "1e-3"), "a proof has the settings of the run"),
        (("--prove", "--steps", "0"), "expected a whole number"),
    ],
)
def test_what_a_proof_cannot_do(words: tuple[str, ...], told: str, in_dir: Path, lockstep: Cli) -> None:
    refused = lockstep("resume", "run", *words)
    assert refused.code == ExitCode.USAGE
    assert told in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp", "replicas"])
def test_several_workers_prove_by_as_many(mode: str, in_dir: Path, lockstep: Cli) -> None:
    """Replicas are each the whole run: one of them is enough."""
    train(lockstep, "run", "--gpus", "2", "--mode", mode)
    proven = lockstep("resume", "run", "--prove")
    assert proven.code == 0, proven.text
    assert f": CPU (1 thread), {'1 worker' if mode == 'replicas' else '2 workers'}" in proven.out
    assert "2 of 2 steps on record, equal bits" in proven.out


def test_settings_that_were_changed_on_the_way(in_dir: Path, lockstep: Cli) -> None:
    """Their steps are proven with the settings they were made with; steps of others are not accused."""
    train(lockstep, "a")
    insisting = ("--checkpoint.allow-mismatch", "true", "--lr", "1e-3")
    assert lockstep("resume", "a", "--max-steps", "6", *insisting).code == 0
    across = lockstep("resume", "a", "--prove")
    assert across.code == 0, across.text
    assert "steps 4 to 5 again, from step_00000004" in across.out
    before = lockstep("resume", "a", "--prove", "--steps", "4")
    assert before.code == ExitCode.USAGE
    assert "changed after step 4" in before.err
    assert "  try: --steps 2\n" in before.err
    shutil.rmtree("runs/a/checkpoints/step_00000004")
    assert "a run with another checkpoint" in lockstep("resume", "a", "--prove").err
    older = lockstep(
        "resume", str(Path("runs/a/checkpoints/step_00000006")), "--max-steps", "8", *insisting, "--name", "b"
    )
    assert older.code == 0, older.text
    forked = lockstep("resume", "b", "--prove", "--steps", "2")
    assert forked.code == 0, forked.text


def goes_on_alone(lockstep: Cli, *words: str) -> Path:
    """A run of several workers whose last two steps are made by one."""
    run = train(lockstep, "a", "--batch-size", "1", *words)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    assert lockstep("resume", "a", "--gpus", "1").code == 0
    return run


def test_other_workers_on_the_way(in_dir: Path, lockstep: Cli) -> None:
    """Whose sums have other bits: their steps are not accused, and which steps can be proven is said."""
    goes_on_alone(lockstep, "--gpus", "3")
    across = lockstep("resume", "a", "--prove", "--steps", "4")
    assert across.code == ExitCode.USAGE, across.text
    assert "settings or workers of the run were changed after step 2" in across.err
    assert "  try: --steps 2\n" in across.err
    assert lockstep("resume", "a", "--prove", "--steps", "2").code == 0


def test_canonical_sums_of_other_workers_are_proven_from_the_beginning(in_dir: Path, lockstep: Cli) -> None:
    goes_on_alone(lockstep, "--gpus", "2", "--canonical", "training.grad_accum_nums=4")
    proven = lockstep("resume", "a", "--prove", "--steps", "4")
    assert proven.code == 0, proven.text
    assert "4 of 4 steps on record, equal bits" in proven.out
