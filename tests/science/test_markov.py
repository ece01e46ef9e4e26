"""Science C3: on a source of known entropy the validation loss lands on the entropy, and the known bug does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.contracts import Batch, Draw, Rows
from lockstep.objectives.causal import Causal, expanded
from lockstep.sources import synthetic
from tests.gates.training import run

SETTINGS: dict[str, Any] = {
    "data.dataset_name": "synthetic",
    "data.tokenizer_name": "auto",
    "model.hidden_size": 96,
    "model.num_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 4,
    "model.intermediate_size": 256,
    "model.vocab_size": 16,
    "model.depth_scaled_init": True,
    "training.context_length": 64,
    "training.batch_size": 64,
    "training.learning_rate": 3e-3,
    "training.warmup_steps": 20,
    "training.eval_interval": 0,
    "training.eval_batches": 64,
    "training.save_interval": 0,
    "system.threads": 2,
}


def validation_loss(folder: Path, steps: int) -> float:
    parts, _ = run(folder, {**SETTINGS, "training.max_steps": steps, "data.cache_dir": folder / "cache"})
    assert parts.val_loss is not None
    return parts.val_loss


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_loss_lands_on_the_entropy_of_the_source(tmp_path: Path) -> None:
    assert synthetic.entropy(64) == pytest.approx(1.6379, abs=5e-5), "the chain of science C3, first letter unknown"
    entropy = synthetic.entropy()  # our rows hold 65 letters: every target has a letter before it
    assert entropy - 0.01 <= validation_loss(tmp_path, 600) <= entropy + 0.03


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ahead_labels_miss_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: labels shifted twice, as the seed's own trainer does."""
    right = Causal.collate

    def shifted_twice(self: Causal, rows: Rows, draw: Draw) -> Batch:
        batch = right(self, rows, draw)
        targets = expanded(batch)["targets"].roll(-1, dims=1)
        targets[:, -1] = -100
        return Batch({**expanded(batch), "targets": targets}, batch.weights, batch.rows, batch.tokens)

    monkeypatch.setattr(Causal, "collate", shifted_twice)
    assert validation_loss(tmp_path, 300) > synthetic.entropy() + 0.03
