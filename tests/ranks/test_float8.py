"""Float8 layers on several ranks: a model in shards computes what a whole one does, and goes on with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.models import llama
from lockstep.runtime import precision
from lockstep.runtime.group import Group
from tests.gates.training import FEW_WORDS, run
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

SETTINGS: dict[str, Any] = {
    "model.vocab_size": 304, "model.hidden_size": 32, "model.num_attention_heads": 2, "model.num_key_value_heads": 1,
    "model.head_dim": 16, "model.intermediate_size": 48, "training.context_length": 16, "training.max_steps": 4,
    "training.save_interval": 2, "training.eval_interval": 0, "training.batch_size": 2, "training.learning_rate": 1e-2,
    "training.warmup_steps": 0, "data.num_workers": 0, "data.data_path": FEW_WORDS, "training.precision": "fp8",
}  # fmt: skip


def train(group: Group, folder: Path, settings: dict[str, Any], point: Path | None = None) -> list[tuple[Any, ...]]:
    with (
        mock.patch.object(precision, "float8_obstacle", return_value=""),  # the CPU, which users are refused
        mock.patch.object(llama, "chunk_tokens", return_value=16),  # and which takes so few at once by plain operations
    ):
        return run(folder, {**SETTINGS, **settings}, group=group, point=point)[1].trace


def losses(trace: list[tuple[Any, ...]]) -> list[float]:
    return [float.fromhex(entry[1]) for entry in trace]


@pytest.mark.slow
def test_shards_and_copies(ranks: Pool, tmp_path: Path) -> None:
    copies, shards = (ranks(2, train, tmp_path / mode, {"system.mode": mode})[0] for mode in ("ddp", "fsdp"))
    assert losses(shards) == pytest.approx(losses(copies), rel=1e-4)
    assert losses(shards)[-1] < losses(shards)[0]
    again = ranks(2, train, tmp_path / "again", {"system.mode": "fsdp"}, tmp_path / "fsdp/checkpoints/step_00000002")[0]
    assert again == shards[2:]
    plain = ranks(2, train, tmp_path / "plain", {"system.mode": "fsdp", "training.precision": "bf16"})[0]
    assert losses(plain) != pytest.approx(losses(shards), rel=1e-6), "float8 was computed in"
