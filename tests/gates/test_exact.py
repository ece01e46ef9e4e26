"""Exact resume, for every family x precision x accumulation x loader workers, always with dropout: faults.md 4.2."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.engine import checkpoint
from lockstep.engine.progress import Progress
from lockstep.errors import LockstepError
from lockstep.health.fingerprint import digest_model
from tests.faults import trainer
from tests.gates.training import FEW_ANSWERS, FEW_DOCUMENTS, FEW_WORDS, flags, run
from tests.launch import harness

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_cache")]

FAMILIES: dict[str, dict[str, Any]] = {  # tables of few rows: forty steps walk over each of them more than once
    "llama": {"data.data_path": FEW_WORDS, "model.dropout": 0.1},
    "mlm": {"data.data_path": FEW_DOCUMENTS, "model.dropout": 0.1, "training.epochs": 100,
            "objective.mask_probability": 0.3, "objective.last_mask_probability": 0.15},
    "llada": {"data.data_path": FEW_ANSWERS, "data.documents": "answers", "model.dropout": 0.1,
              "objective.random_length_probability": 0.4},
    "ad": {"data.train_source_timesteps": 60, "model.dropout": 0.1, "model.attention_dropout": 0.1,
           "model.dynamics": True, "training.gen_episodes": 0},
}  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATED = (1, 4)
WORKERS = (0, 2)
LATE_OVERFLOWS = "inf_grad@rank=0,step=2;inf_grad@rank=0,step=19"  # of fp16: the scaler has something to remember
Trace = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Cell:
    """One combination."""

    family: str
    precision: str
    accumulated: int = 4
    workers: int = 2

    def __str__(self) -> str:
        return f"{self.family}-{self.precision}-{self.accumulated}-parts-{self.workers}-workers"

    def settings(self, steps: int, every: int) -> dict[str, Any]:
        rows, length = (32, 40) if self.family == "ad" else (2, 16)
        return {
            **FAMILIES[self.family], "training.precision": self.precision, "training.batch_size": rows,
            "training.grad_accum_nums": self.accumulated, "training.context_length": length,
            "data.num_workers": self.workers, "training.max_steps": steps, "training.eval_interval": 0,
            "training.save_interval": every, "checkpoint.keep_last": 100, "debug.digest_interval": 1,
        }  # fmt: skip


class Bench:
    """Runs of one cell, in one folder."""

    def __init__(self, cell: Cell, folder: Path, *, steps: int, every: int, more: dict[str, Any] | None = None) -> None:
        self.cell, self.folder = cell, folder
        self.shared = {**cell.settings(steps, every), **(more or {})}
        if cell.family == "ad":  # collected by whoever comes first
            self.shared["data.data_path"] = folder / "histories"
        parts, recorder = run(folder / "whole", self.shared, family=cell.family)
        self.whole: Trace = recorder.trace
        assert [entry[0] for entry in self.whole] == list(range(steps))
        assert parts.rows < parts.batch_rows * steps, "the rows must come more than once"
        skipped = self.whole[-1][5]["skipped"]
        assert len({entry[4] for entry in self.whole}) >= steps - skipped, "the digest must move with the weights"
        if cell.precision == "fp16":
            assert skipped >= 2, "those asked for; a model may have some of its own"

    def after(self, step: int) -> Trace:
        """What a run makes that goes on from the checkpoint after `step` steps."""
        point = self.folder / "whole" / "checkpoints" / f"step_{step:08d}"
        quiet = {**self.shared, "training.save_interval": 0}
        return run(self.folder / f"after-{step}", quiet, family=self.cell.family, point=point)[1].trace


def overflow(cell: Cell, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Let gradients overflow where that is no failure."""
    if cell.precision == "fp16":
        monkeypatch.setenv("LOCKSTEP_FAULT", fault)


GRID = [Cell(*values) for values in itertools.product(FAMILIES, PRECISIONS, ACCUMULATED, WORKERS)]


@pytest.mark.parametrize("cell", GRID, ids=str)
def test_twenty_and_twenty_are_forty(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(a) Loss, gradient norm, rate, digest of the weights and state of every step; (e) and so does a second resume."""
    overflow(cell, monkeypatch, LATE_OVERFLOWS)
    bench = Bench(cell, tmp_path, steps=40, every=20)
    first, second = bench.after(20), bench.after(20)
    assert first == bench.whole[20:]
    assert second == first


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_step_resumes(family: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(b) After each of the steps 1 to 20."""
    cell = Cell(family, precision)
    overflow(cell, monkeypatch, LATE_OVERFLOWS)
    bench = Bench(cell, tmp_path, steps=21, every=1)
    differing = [step for step in range(1, 21) if bench.after(step) != bench.whole[step:]]
    assert not differing


STEPS_OF_FIELDS = 8
EARLY_OVERFLOWS = "inf_grad@rank=0,step=2;inf_grad@rank=0,step=3"
OF_FIELDS = {"training.batch_size": 32, "training.min_delta": 1.0}  # an epoch is over soon; a loss as it was is stale
FRESH = {**dataclasses.asdict(Progress()), "scale": 65536.0, "growth_tracker": 0}
OTHER = {"format": 2, "optimizer_states": "bf16"}  # what it says of itself cannot be as at the beginning: it lies
Field = tuple[str, str]


def fields_of(state: checkpoint.State) -> Iterator[Field]:
    """Everything in a checkpoint: each tensor, each number; not `about`, which says what it belongs to."""
    yield from (("model", name) for name in state.model)
    yield from (("optimizer", name) for name in state.optimizer)
    yield from (("run", key) for key in state.run if key not in ("progress", "loss_scale", "about"))
    yield from ((part, key) for part in ("progress", "loss_scale") for key in state.run[part] or {})


def without(state: checkpoint.State, field: Field) -> checkpoint.State | None:
    """The state with one field as a fresh run would have it; None if that is what it holds."""
    part, name = field
    if part in ("model", "optimizer"):
        tensors = getattr(state, part)
        if not tensors[name].any():
            return None
        return dataclasses.replace(state, **{part: {**tensors, name: torch.zeros_like(tensors[name])}})
    values: dict[str, Any] = dict(state.run if part == "run" else state.run[part])
    fresh = OTHER.get(name, 0) if part == "run" else FRESH[name]
    if values[name] == fresh:
        return None
    values[name] = fresh
    return dataclasses.replace(state, run=values if part == "run" else {**state.run, part: values})


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_is_saved_for_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(d) Each tensor and each number dropped in turn: refused, or other bits. Before, between and after overflows."""
    cell = Cell(family, "fp16", accumulated=1, workers=0)
    overflow(cell, monkeypatch, EARLY_OVERFLOWS)
    bench = Bench(cell, tmp_path, steps=STEPS_OF_FIELDS, every=1, more=OF_FIELDS)
    found: set[Field] = set()
    unseen: set[Field] = set()
    for step in (STEPS_OF_FIELDS - 2, 3, 1):
        state = checkpoint.load(tmp_path / "whole" / "checkpoints" / f"step_{step:08d}")
        state = checkpoint.State({**state.model}, {**state.optimizer}, state.run)
        unseen |= set(fields_of(state)) - found
        assert bench.after(step) == bench.whole[step:]
        for field in sorted(unseen):
            if (damaged := without(state, field)) is None:
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint, "load", lambda *_where, damaged=damaged: damaged)
                try:
                    is_seen = bench.after(step) != bench.whole[step:]
                except LockstepError:
                    is_seen = True  # refused
            if is_seen:
                found.add(field)
        unseen -= found
    epochs = {("progress", "train_losses"), ("progress", "val_losses")}  # only a family in epochs has them
    assert unseen == (set() if family == "mlm" else epochs)
    assert len(found) > 50


def trained(cwd: Path) -> tuple[dict[int, tuple[str, str]], str]:
    """Loss and gradient norm of every step, and the weights in the end, to the bit."""
    root = trainer.run_folder(cwd)
    weights = load_file(sorted((root / "checkpoints").glob("step_*"))[-1] / checkpoint.MODEL)
    return trainer.losses(root), digest_model(weights.items())


def newest(checkpoints: Path) -> str:
    return max((path.name for path in checkpoints.glob("step_????????")), default="")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_killed_at_any_instant(family: str, precision: str, tmp_path: Path) -> None:
    """(c) SIGKILL of the real command instead of a clean stop, twice; it ends with the bits of one left alone."""
    settings = Cell(family, precision).settings(40, 4) | {"checkpoint.keep_last": 2, "report.tensorboard": False}
    if family == "ad":
        settings["data.data_path"] = tmp_path / "histories"
    words = [f"{key}={value}" for key, value in flags(settings)]
    train = [sys.executable, "-m", "lockstep", "train", family, "tiny", "--device", "cpu", "--name", "run", *words]
    resume = [sys.executable, "-m", "lockstep", "resume", "runs/run"]
    fault = (f"{LATE_OVERFLOWS};" if precision == "fp16" else "") + "hang@seconds=0.05"  # a pace that can be met
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    ended = harness.run(train, cwd=tmp_path / "whole", seconds=trainer.END_SECONDS, LOCKSTEP_FAULT=fault)
    assert ended.code == 0, ended.out
    chance = random.Random(f"{family} {precision}")
    saved = tmp_path / "killed" / "runs" / "run" / "checkpoints"
    for command in (train, resume):
        job, before = harness.start(command, cwd=tmp_path / "killed", LOCKSTEP_FAULT=fault), newest(saved)
        trainer.wait_until(lambda before=before: newest(saved) > before, job)
        time.sleep(chance.uniform(0, 0.5))
        job.send(signal.SIGKILL)
        killed = job.finish(30)
        assert killed.code == 137, f"{shlex.join(command)} was not met\n{killed.out}"
        killed.check_clean()
    ended = harness.run(resume, cwd=tmp_path / "killed", seconds=trainer.END_SECONDS, LOCKSTEP_FAULT=fault)
    assert ended.code == 0, ended.out
    whole, again = trained(tmp_path / "whole"), trained(tmp_path / "killed")
    assert list(whole[0]) == list(range(40))
    assert again == whole
