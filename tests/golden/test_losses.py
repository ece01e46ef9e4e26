"""Golden losses: a change that should not alter the numbers must not. One that should rewrites golden.json and says so.

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

from tests.gates.training import losses, run

pytestmark = pytest.mark.usefixtures("shared_cache")

GOLDEN = Path(__file__).parent / "golden.json"
SETTINGS: dict[str, Any] = {
    "data.dataset_name": "synthetic",
    "data.tokenizer_name": "auto",
    "model.vocab_size": 16,
    "training.max_steps": 12,
    "training.grad_accum_nums": 2,
    "training.weight_decay": 0.1,
    "model.dropout": 0.1,
    "system.threads": 1,
}


def measured(folder: Path, **changes: Any) -> dict[str, Any]:
    parts, recorder = run(folder, {**SETTINGS, **changes})
    return {
        "loss": losses(recorder.records),
        "grad_norm": [record.grad_norm for record in recorder.records],
        "val_loss": parts.val_loss,
    }


def matches(values: dict[str, Any], golden: dict[str, Any]) -> bool:
    return all(values[key] == pytest.approx(golden[key], rel=1e-4) for key in golden)


def test_losses_are_the_golden_ones(tmp_path: Path) -> None:
    values = measured(tmp_path)
    if os.environ.get("LOCKSTEP_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(values, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert len(golden["loss"]) == 12
    assert matches(values, golden)


@pytest.mark.parametrize(
    "change",
    [{"system.seed": 43}, {"training.learning_rate": 2.9e-3}, {"training.warmup_steps": 3}, {"model.init_std": 0.021}],
    ids=lambda change: next(iter(change)),
)
def test_a_small_change_of_the_numbers_is_seen(change: dict[str, Any], tmp_path: Path) -> None:
    assert not matches(measured(tmp_path, **change), json.loads(GOLDEN.read_text()))
