"""The estimate of memory beside peaks that were measured on an H200 (benchmarks/LOG.md, 18 November 2026, night)."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.load import load
from lockstep.engine.present import memory_estimate
from lockstep.models.memory import Lora, Memory, Sharing, memory_bytes
from lockstep.models.shapes import resolve
from tests.gates.training import flags

GIB = 2**30
ONCE = {"training.grad_accum_nums": 1, "training.precision": "bf16", "system.device": "cpu"}
PRODUCTION: dict[str, Any] = {"training.batch_size": 4, **ONCE}
FULL: dict[str, Any] = {"training.batch_size": 1, "training.optimizer_states": "bf16", **ONCE}
LLADA: dict[str, Any] = {
    "model.model_path": "GSAI-ML/LLaDA-8B-Base", "model.num_layers": 4, "training.context_length": 4096,
    "training.batch_size": 8, "objective.random_length_probability": 0, **ONCE,
}  # fmt: skip
MEASURED = {
    "production": ("llama", "production", PRODUCTION, 40.84),
    "batch 8": ("llama", "production", PRODUCTION | {"training.batch_size": 8}, 58.08),
    "fp8": ("llama", "production", PRODUCTION | {"training.precision": "fp8"}, 41.20),
    "LLaDA": ("llada", "llada_base", LLADA, 41.14),
    "32 layers, made again": ("llama", "full", FULL, 90.07),
    "32 layers, kept": ("llama", "full", FULL | {"system.gradient_checkpointing": False}, 92.07),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_is_near_what_was_measured(name: str) -> None:
    """A little above: what does not fit by it is refused, and a model in shards goes by it alone."""
    family, preset, settings, peak_gib = MEASURED[name]
    config = load(family, preset=preset, flags=flags(settings)).config
    shape = resolve(config.model, context_length=config.training.context_length)
    found = memory_estimate(config, shape, compiled=True).total / GIB
    assert 0.995 * peak_gib < found < 1.05 * peak_gib


TABLES = 2 * 126_464 * 4_096  # numbers of the embedding and of the head, LLaDA-8B's, which is not tied
LAYER = 4 * 4_096**2 + 3 * 4_096 * 12_288  # of the matrices of one of its layers
NORMS = (2 * 32 + 1) * 4_096
RESIDUAL = 2 * 4_096 * 4_096  # bytes of a row between two layers


def eight(*, shards: int = 1, rank: int = 0, standing: bool = False) -> Memory:
    """All of LLaDA-8B, one row of 4,096."""
    settings = {"model.model_path": "GSAI-ML/LLaDA-8B-Base", "system.device": "cpu"}
    config = load("llada", preset="llada_base", flags=flags(settings)).config
    return memory_bytes(
        resolve(config.model, context_length=4096), batch_size=1, context_length=4096, dtype_name="bf16",
        checkpointing=True, compiled=True, lora=Lora(rank), sharing=Sharing(shards, standing_gradients=standing),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_in_shards_tables_are_whole_until_the_last_gradient_is(shards: int, rank: int) -> None:
    """What others keep of embedding, head and norms, and of two layers: weights and gradients, or frozen halves."""
    alone, need = eight(rank=rank), eight(shards=shards, rank=rank)
    whole = (2 if rank else 4 + 4) * (TABLES + NORMS + 2 * LAYER) * (shards - 1) // shards
    assert need.copies - alone.copies == pytest.approx(whole, rel=1e-4)
    table = 0 if rank else 4 * TABLES // 2  # the head's gradient takes the place of what a layer made
    at_the_end = 3 * RESIDUAL + max(0, 2 * need.block - table // shards)
    assert need.last == pytest.approx(whole + at_the_end, rel=1e-4)
    assert alone.last == pytest.approx(3 * RESIDUAL + max(0, 2 * alone.block - table), rel=1e-4)
    assert need.total >= need.states + whole


def test_gradients_that_stand_are_waited_for_by_nobody() -> None:
    whole, added, standing = eight(), eight(rank=16), eight(standing=True)
    assert added.weights < 0.55 * whole.weights
    assert added.awaited == added.gradients < whole.awaited < whole.gradients
    assert whole.awaited == whole.gradients - 4 * TABLES // 2
    assert standing.awaited == 0
    assert standing.total > whole.total
