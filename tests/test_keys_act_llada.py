"""Every setting that masked diffusion has of its own, or reads in its own way, changes what happens (item 23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.catalog import catalog
from tests.gates.training import FEW_ANSWERS, FEW_DOCUMENTS, run
from tests.test_keys_act import ELSEWHERE, NUMBERS, named_tests

BASE: dict[str, Any] = {
    "data.data_path": FEW_DOCUMENTS, "training.max_steps": 4, "training.context_length": 32, "training.batch_size": 2,
    "training.learning_rate": 0.01, "training.warmup_steps": 1, "training.eval_interval": 0,
    "training.save_interval": 0, "training.eval_batches": 1, "data.num_workers": 0, "debug.digest_interval": 1,
    "system.threads": 1, "objective.random_length_probability": 0.0,
}  # fmt: skip

# Setting -> a value with which the weights after four steps are others.
OF_LLADA: dict[str, Any] = {
    "model.model_path": "lockstep/llada-demo",
    "model.num_layers": 1,
    "model.vocab_size": 300,
    "model.lora_rank": 4,
    "objective.eps": 0.2,
    "objective.random_length_probability": 1.0,
    "objective.mask_token_id": 400,
    "training.epochs": 0.1,
    "training.warmup_ratio": 0.8,
    "training.context_length": 16,
    "training.optimizer_states": "bf16",
    "data.documents": "joined",
    "system.seed": 7,
}
OF_LLADA_ELSEWHERE: dict[str, str] = {  # setting -> the test that shows what it does
    "objective.eval_draws": "test_draws_hide_anew_and_are_stratified_together",
    "model.lora_alpha": "test_settings_of_adapters_change_them",
    "model.lora_targets": "test_settings_of_adapters_change_them",
}

pytestmark = pytest.mark.usefixtures("shared_cache")


def test_no_setting_of_masked_diffusion_is_forgotten() -> None:
    shared = NUMBERS.keys() | ELSEWHERE.keys()
    settings = {setting.key for setting in catalog("llada").settings.values()}
    assert settings - shared - OF_LLADA.keys() - OF_LLADA_ELSEWHERE.keys() == set(), "neither probed nor named"
    assert (OF_LLADA.keys() | OF_LLADA_ELSEWHERE.keys()) - settings == set(), "probed, and not there"
    assert set(OF_LLADA_ELSEWHERE.values()) <= set(named_tests())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> tuple[str, float]:
    """The digest of the weights, and the validation loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        parts, recorder = run(tmp_path_factory.mktemp("base"), BASE, family="llada")
        assert parts.val_loss is not None
        return recorder.records[-1].digest, parts.val_loss


@pytest.mark.parametrize("key", OF_LLADA)
def test_it_changes_the_numbers(key: str, base: tuple[str, float], tmp_path: Path) -> None:
    digest = run(tmp_path, {**BASE, key: OF_LLADA[key]}, family="llada")[1].records[-1].digest
    assert digest not in ("", base[0])


def test_settings_of_adapters_change_them(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"model.lora_alpha": 3.0}, {"model.lora_targets": "q,v"}]
    digests = [
        run(tmp_path / str(at), {**BASE, "model.lora_rank": 4, **change}, family="llada")[1].records[-1].digest
        for at, change in enumerate(changes)
    ]
    assert len(set(digests)) == 3


def test_draws_change_the_measure_and_nothing_else(base: tuple[str, float], tmp_path: Path) -> None:
    parts, recorder = run(tmp_path, {**BASE, "objective.eval_draws": 8, "data.num_workers": 1}, family="llada")
    assert recorder.records[-1].digest == base[0]
    assert parts.val_loss is not None
    assert parts.val_loss != base[1]


def test_answers_are_rows_of_their_own(base: tuple[str, float], tmp_path: Path) -> None:
    changes = {"data.documents": "answers", "data.data_path": FEW_ANSWERS}
    parts, recorder = run(tmp_path, {**BASE, **changes}, family="llada")
    assert recorder.records[-1].digest not in ("", base[0])
    assert parts.stepper.objective.columns.keys() == {"tokens", "lengths"}
