"""Golden losses: a change that should not alter the numbers must not. One that should rewrites its file and says so.

The bits depend on the CPU and on torch, so the comparison allows rounding (1e-4 relative); a changed order of rows,
first weights, schedule, loss or update moves them far more (the negative controls show it).
Rewrite: LOCKSTEP_GOLDEN=write python -m pytest tests/golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.gates.training import FEW_DOCUMENTS, losses, run

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "data.dataset_name": "synthetic",
        "data.tokenizer_name": "auto",
        "model.vocab_size": 16,
        "training.max_steps": 12,
        "training.grad_accum_nums": 2,
        "training.weight_decay": 0.1,
        "model.dropout": 0.1,
        "system.threads": 1,
    },
    "mlm": {
        "data.data_path": FEW_DOCUMENTS,
        "training.context_length": 32,
        "training.epochs": 3,
        "training.grad_accum_nums": 2,
        "training.batch_size": 3,
        "training.weight_decay": 0.1,
        "model.dropout": 0.1,
        "objective.last_mask_probability": 0.3,
        "system.threads": 1,
    },
    "llada": {
        "data.data_path": FEW_DOCUMENTS,
        "training.context_length": 32,
        "training.epochs": 2,
        "training.grad_accum_nums": 2,
        "training.batch_size": 3,
        "training.weight_decay": 0.1,
        "objective.random_length_probability": 0.3,
        "system.threads": 1,
    },
    "ad": {
        "data.data_path": "histories",
        "data.n_stream": 2,
        "data.train_n_stream": 2,
        "data.total_source_timesteps": 200,
        "training.max_steps": 12,
        "training.grad_accum_nums": 2,
        "training.batch_size": 4,
        "training.weight_decay": 0.1,
        "training.gen_episodes": 0,
        "system.threads": 1,
    },
}
SMALL_CHANGES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"system.seed": 43},
        {"training.learning_rate": 2.9e-3},
        {"training.warmup_steps": 3},
        {"model.init_std": 0.021},
    ],
    "mlm": [{"objective.random_share": 0.11}, {"objective.mask_probability": 0.16}, {"model.dropout": 0.101}],
    "llada": [{"objective.eps": 2e-3}, {"objective.random_length_probability": 0.0}, {"system.seed": 43}],
    "ad": [{"model.attention_dropout": 0.101}, {"training.learning_rate": 2.9e-3}, {"data.alg_seed": 43}],
}


@pytest.fixture(autouse=True)
def _shared_histories(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ad` learns from is collected once."""
    monkeypatch.chdir(shared_cache)


def golden(family: str) -> Path:
    return Path(__file__).parent / f"{family}.json"


def measured(family: str, folder: Path, **changes: Any) -> dict[str, Any]:
    parts, recorder = run(folder, {**FAMILIES[family], **changes}, family=family)
    return {
        "loss": losses(recorder.records),
        "grad_norm": [record.grad_norm for record in recorder.records],
        "val_loss": parts.val_loss,
    }


def matches(values: dict[str, Any], golden: dict[str, Any]) -> bool:
    return all(values[key] == pytest.approx(golden[key], rel=1e-4) for key in golden)


@pytest.mark.parametrize(("family", "steps"), [("llama", 12), ("mlm", 10), ("llada", 14), ("ad", 12)])
def test_losses_are_the_golden_ones(family: str, steps: int, tmp_path: Path) -> None:
    values = measured(family, tmp_path)
    if os.environ.get("LOCKSTEP_GOLDEN") == "write":
        golden(family).write_text(json.dumps(values, indent=1) + "\n")
    kept = json.loads(golden(family).read_text())
    assert len(kept["loss"]) == steps
    assert matches(values, kept)


@pytest.mark.parametrize(
    ("family", "change"),
    [(family, change) for family, changes in SMALL_CHANGES.items() for change in changes],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_small_change_of_the_numbers_is_seen(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    assert not matches(measured(family, tmp_path, **change), json.loads(golden(family).read_text()))
