"""Every setting that masked-LM has of its own, or reads in its own way, changes what happens (items 23 and 98)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.catalog import catalog
from tests.gates.training import FEW_DOCUMENTS, run
from tests.test_keys_act import ELSEWHERE, NUMBERS, named_tests

BASE: dict[str, Any] = {
    "data.data_path": FEW_DOCUMENTS, "training.max_steps": 4, "training.context_length": 32, "training.batch_size": 2,
    "training.learning_rate": 0.01, "training.warmup_steps": 1, "training.max_grad_norm": 0.5,
    "training.weight_decay": 0.1, "training.eval_interval": 0, "training.save_interval": 0, "training.eval_batches": 1,
    "data.num_workers": 0, "debug.digest_interval": 1, "system.threads": 1,
}  # fmt: skip

# Setting -> a value with which the weights after four steps are others.
OF_MLM: dict[str, Any] = {
    "model.model_path": "lockstep/mlm-small",
    "model.architecture": "modern",
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 100,
    "model.vocab_size": 600,
    "model.init_std": 0.01,
    "model.dropout": 0.3,
    "objective.mask_probability": 0.4,
    "objective.last_mask_probability": 0.5,
    "objective.masked_share": 0.2,
    "objective.random_share": 0.0,
    "objective.whole_words": True,
    "training.epochs": 0.1,
    "training.warmup_ratio": 0.8,
    "training.max_grad_norm": 0,
    "training.weight_decay": 0.5,
    "training.precision": "bf16",
    "training.context_length": 16,
    "data.documents": "padded",
    "data.min_words": 8,
    "data.tokenizer_name": "word",
    "system.seed": 7,
}
OF_MLM_ELSEWHERE: dict[str, str] = {}  # setting -> the test that shows what it does

pytestmark = pytest.mark.usefixtures("shared_cache")


def test_no_setting_of_masked_lm_is_forgotten() -> None:
    shared = NUMBERS.keys() | ELSEWHERE.keys()
    settings = {setting.key for setting in catalog("mlm").settings.values()}
    assert settings - shared - OF_MLM.keys() - OF_MLM_ELSEWHERE.keys() == set(), "neither probed nor named"
    assert (OF_MLM.keys() | OF_MLM_ELSEWHERE.keys()) - settings == set(), "probed, and not there"
    assert set(OF_MLM_ELSEWHERE.values()) <= set(named_tests())


@pytest.fixture(scope="module")
def base_digest(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        return run(tmp_path_factory.mktemp("base"), BASE, family="mlm")[1].records[-1].digest


@pytest.mark.parametrize("key", OF_MLM)
def test_it_changes_the_numbers(key: str, base_digest: str, tmp_path: Path) -> None:
    assert run(tmp_path, {**BASE, key: OF_MLM[key]}, family="mlm")[1].records[-1].digest not in ("", base_digest)


def test_the_same_settings_give_the_same_numbers(base_digest: str, tmp_path: Path) -> None:
    cosmetic = {"data.num_workers": 1, "report.log_interval": 3, "report.results_dir": str(tmp_path / "results")}
    assert run(tmp_path, {**BASE, **cosmetic}, family="mlm")[1].records[-1].digest == base_digest
    assert (tmp_path / "results" / "mlm_model.pth").is_file()
