"""Runs that train additions: only these are saved; the weights are read again, and others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine import checkpoint, inference
from lockstep.engine.state import digest
from lockstep.errors import ConfigError, DataError
from lockstep.models import hf, lora
from tests.conftest import Outcome
from tests.gates.training import run

pytestmark = pytest.mark.usefixtures("shared_cache")

SETTINGS: dict[str, Any] = {
    "training.max_steps": 4, "training.save_interval": 2, "training.eval_interval": 0, "training.context_length": 32,
    "training.batch_size": 2, "training.warmup_steps": 0, "data.num_workers": 0, "training.learning_rate": 1e-2,
}  # fmt: skip
MIDDLE, LAST = "checkpoints/step_00000002", "checkpoints/step_00000004"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """A folder with weights, in LLaDA's own form."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        run(folder / "run", {**SETTINGS, "training.max_steps": 1}, family="llada")
    return inference.export_run(folder / "run" / "checkpoints" / "step_00000001", folder / "weights", "bf16")


@pytest.fixture(scope="module")
def through(base: Path, tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> tuple[Path, Any]:
    """A run of additions to it, and its steps."""
    folder = tmp_path_factory.mktemp("additions") / "through"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        return folder, run(folder, with_base(base), family="llada")


def with_base(folder: Path, **changed: Any) -> dict[str, Any]:
    model = {"model.model_path": str(folder), "model.init": "pretrained", "model.lora_rank": 4}
    return {**SETTINGS, **model, "training.precision": "bf16", **changed}


def test_only_additions_are_saved_and_a_resume_is_exact(base: Path, through: tuple[Path, Any], tmp_path: Path) -> None:
    folder, (parts, recorder) = through
    saved = checkpoint.load(folder / LAST)
    assert all(name.endswith(lora.ADDITIONS) for name in saved.model)
    assert {name.split(".", 1)[1] for name in saved.optimizer} == set(saved.model)
    assert any(float(tensor.abs().max()) > 0 for name, tensor in saved.model.items() if name.endswith("lora_b"))
    again, trace = run(tmp_path / "again", with_base(base), family="llada", point=folder / MIDDLE)
    assert trace.trace == recorder.trace[2:]
    assert digest(again.stepper.model) == digest(parts.stepper.model)


def test_other_weights_than_those_trained_on_are_refused(base: Path, through: tuple[Path, Any], tmp_path: Path) -> None:
    """One number of one frozen matrix is enough: on resume, and for whoever samples or exports."""
    weights = load_file(base / hf.WEIGHTS_FILE)
    name = "model.transformer.blocks.1.up_proj.weight"
    kept = weights[name].clone()
    folder, _ = through
    changed = kept.clone()
    changed[3, 5] += 1
    try:
        save_file({**weights, name: changed}, base / hf.WEIGHTS_FILE)
        with pytest.raises(DataError, match="frozen weights have changed"):
            run(tmp_path / "resumed", with_base(base), family="llada", point=folder / MIDDLE)
        with pytest.raises(DataError, match="frozen weights have changed"):
            inference.load_run(folder / LAST, device="cpu")
    finally:
        save_file({**weights, name: kept}, base / hf.WEIGHTS_FILE)
    assert isinstance(inference.load_run(folder / LAST, device="cpu").model, torch.nn.Module)


def test_all_weights_and_additions_are_no_state_of_each_other(through: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = through
    settings = {**SETTINGS, "checkpoint.allow_mismatch": True}
    with pytest.raises(ConfigError, match="holds additions only"):
        run(tmp_path / "full", settings, family="llada", point=folder / MIDDLE)
    run(tmp_path / "whole", {**SETTINGS, "training.max_steps": 1}, family="llada")
    point = tmp_path / "whole" / "checkpoints" / "step_00000001"
    with pytest.raises(ConfigError, match="holds all weights"):
        run(tmp_path / "added", {**settings, "model.lora_rank": 4}, family="llada", point=point)


def test_export_merges_and_the_adapter_is_the_difference(
    base: Path, through: tuple[Path, Any], tmp_path: Path, lockstep: Callable[..., Outcome]
) -> None:
    folder, _ = through
    for form in ("hf", "peft"):
        outcome = lockstep("export", str(folder / LAST), str(tmp_path / form), "--to", form)
        assert outcome.code == 0, outcome.text
    merged, before = load_file(tmp_path / "hf" / hf.WEIGHTS_FILE), load_file(base / hf.WEIGHTS_FILE)
    adapter = load_file(tmp_path / "peft" / lora.ADAPTER_WEIGHTS)
    path = "model.transformer.blocks.0.q_proj"
    low, high = (adapter[f"base_model.model.{path}.lora_{part}.weight"] for part in "AB")
    expected = before[f"{path}.weight"].float() + 2 * high @ low
    assert float((merged[f"{path}.weight"] - expected).abs().max()) < 1e-6
    assert set(merged) == set(before)
    assert torch.equal(merged["model.transformer.wte.weight"], before["model.transformer.wte.weight"].float())


def test_a_run_without_additions_has_no_adapter(tmp_path: Path) -> None:
    run(tmp_path / "full", {**SETTINGS, "training.max_steps": 1}, family="llada")
    with pytest.raises(ConfigError, match="no adapter"):
        inference.export_adapter(tmp_path / "full" / "checkpoints" / "step_00000001", tmp_path / "peft")
