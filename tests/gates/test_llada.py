"""Masked diffusion through the whole house: it learns, its first loss is foreseen, its rate and gradients behave."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch
from lockstep.data.loader import Loader
from lockstep.engine import epochs, inference
from lockstep.engine.first_loss import expected
from lockstep.engine.parts import Parts
from lockstep.engine.schedule import learning_rates
from lockstep.errors import ConfigError
from lockstep.runtime.group import Group
from lockstep.runtime.reduce import Alone
from tests.gates.training import FEW_ANSWERS, FEW_WORDS, flags, run

pytestmark = pytest.mark.usefixtures("shared_cache")
QUICK: dict[str, Any] = {"training.eval_interval": 0, "training.save_interval": 0, "data.num_workers": 0}


def batch_of(parts: Parts) -> list[Batch]:
    """What a step of two rows is made of."""
    with Loader(parts.table, parts.stepper.objective, seed=1, micro_rows=2, micro_batches=1, steps=9) as loader:
        return next(loader)


class Few:
    """A table that is only counted."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


@pytest.mark.parametrize(("rows", "passes", "steps"), [(40, 5, 50), (4000, 5, 5000)])
def test_the_rate_warms_up_for_a_tenth_and_falls_to_the_end(rows: int, passes: int, steps: int) -> None:
    """Item 116: over the real number of steps, whatever max_steps would allow."""
    asked = {"training.epochs": passes, "training.warmup_ratio": 0.1, "training.min_lr_ratio": 0.0,
             "training.max_steps": 1 << 20, "training.learning_rate": 1e-5}  # fmt: skip
    config = load("llada", preset="tiny", flags=flags(asked)).config
    counted, _, _ = epochs.count(config, Few(rows), world=1)  # pyright: ignore[reportArgumentType] - of a table only rows
    assert counted.training.max_steps == steps
    rates = learning_rates(counted.training).tolist()
    peak = rates.index(max(rates))
    assert peak == pytest.approx(steps / 10, abs=1)
    assert max(rates) == pytest.approx(1e-5)
    assert all(one < other for one, other in pairwise(rates[: peak + 1]))
    assert all(one >= other for one, other in pairwise(rates[peak:])), "never rises after the peak"
    assert rates[-1] < 0.01 * max(rates)
    middle = peak + (steps - peak) // 2
    assert rates[middle] == pytest.approx(0.5e-5, rel=0.05), "half way down a cosine"


def test_it_learns(tmp_path: Path) -> None:
    """Item 160: a nat and a half below where it began, on text it has not seen; and the first loss was foreseen."""
    settings = {"training.max_steps": 40, "training.batch_size": 8, "training.learning_rate": 1e-2,
                "training.eval_batches": 4, "data.max_train_samples": 300}  # fmt: skip
    parts, recorder = run(tmp_path, {**QUICK, **settings}, family="llada")
    first = next(fields for kind, fields in recorder.events if kind == "first_loss")
    assert parts.val_loss is not None
    assert parts.val_loss < math.log(257) - 1.5
    assert first["loss"] == pytest.approx(first["expected"], abs=0.1)
    assert abs(first["expected"] - math.log(512)) > 0.3, "control: the forbidden ids and the weights do matter"
    assert {f"loss_t_{bucket}" for bucket in range(10)} < parts.measures.keys()


def test_what_a_causal_model_knows_is_kept(tmp_path: Path) -> None:
    """Autoregressive to diffusion: a LLaMA whose vocabulary is full becomes a LLaDA, and learns faster than nothing."""
    small = {**QUICK, "data.max_train_samples": 300, "training.batch_size": 8, "training.learning_rate": 5e-3,
             "model.vocab_size": 257}  # fmt: skip
    run(tmp_path / "llama", {**small, "training.max_steps": 50, "training.save_interval": 50})
    weights = inference.export_run(tmp_path / "llama" / "checkpoints" / "step_00000050", tmp_path / "weights")
    begun = {"model.model_path": weights, "model.init": "pretrained", "data.tokenizer_name": "null"}
    other = {**small, "training.max_steps": 8, "model.vocab_size": 258, "training.eval_batches": 4,
             "objective.eval_draws": 4, "training.learning_rate": 1e-3}  # fmt: skip
    losses = {
        name: run(tmp_path / name, {**other, **change}, family="llada")[0].val_loss or math.nan
        for name, change in {"from it": begun, "from nothing": {}}.items()
    }
    assert losses["from it"] < losses["from nothing"] - 1, losses
    with pytest.raises(ConfigError, match="1 more is for the mask"):
        run(tmp_path / "full", {**other, **begun, "model.vocab_size": 257}, family="llada")


def test_answers_are_learnt(tmp_path: Path) -> None:
    """The same for answers: the bound of each falls far below that of untrained weights."""
    settings = {"data.data_path": FEW_ANSWERS, "data.documents": "answers", "training.max_steps": 60,
                "training.batch_size": 8, "training.learning_rate": 1e-2, "data.validation_fraction": 0.3}  # fmt: skip
    parts, recorder = run(tmp_path, {**QUICK, **settings}, family="llada")
    first = next(fields for kind, fields in recorder.events if kind == "first_loss")
    assert first["loss"] == pytest.approx(first["expected"], abs=0.15)
    assert parts.val_loss is not None
    assert parts.val_loss < math.log(257) - 2


def test_gradients_are_cleared_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 113: the same batch again has the same gradient norm; with the fault of seed D it grows."""
    one = {**QUICK, "data.data_path": FEW_WORDS, "training.max_steps": 2, "training.learning_rate": 1e-12,
           "training.max_grad_norm": 0}  # fmt: skip
    parts, _ = run(tmp_path, one, family="llada")
    stepper, batches = parts.stepper, batch_of(parts)

    def norms() -> list[float]:
        return [stepper.launch(step, batches).read().grad_norm for step in range(4)]

    first = norms()
    assert first == pytest.approx([first[0]] * 4, rel=1e-4)
    monkeypatch.setattr(Alone, "zero", lambda _self: None)
    grown = norms()
    assert grown[-1] > 2.4 * grown[0] > 0, "5 instead of 2 times the first"


def test_what_is_foreseen_counts_weights_and_possible_ids(tmp_path: Path) -> None:
    """The loss of random weights is known however little is hidden; without the weights it is not."""
    one = {**QUICK, "training.max_steps": 1, "training.batch_size": 2}
    parts, recorder = run(tmp_path, one, family="llada")
    first = next(fields for kind, fields in recorder.events if kind == "first_loss")
    assert first["loss"] == pytest.approx(first["expected"], abs=0.1)
    shape: Any = parts.stepper.model.shape
    batches = batch_of(parts)
    total = sum(float(batch.tensors["token_weights"].sum()) for batch in batches) / batches[0].weights["loss"]
    plain = math.log(257) + shape.hidden_size * 0.02**2 / 2
    assert expected(parts.config, shape, batches, parts.stepper.objective, Group()) == pytest.approx(plain * total)
    bare = [batch._replace(tensors={"inputs": torch.zeros(1)}) for batch in batches]
    assert expected(parts.config, shape, bare, parts.stepper.objective, Group()) == pytest.approx(plain)
