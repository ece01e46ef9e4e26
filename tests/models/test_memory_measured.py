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


def eight(*, shards: int, rank: int = 0) -> Memory:
    """All of LLaDA-8B, one row of 4,096."""
    settings = {"model.model_path": "GSAI-ML/LLaDA-8B-Base", "system.device": "cpu"}
    config = load("llada", preset="llada_base", flags=flags(settings)).config
    return memory_bytes(
        resolve(config.model, context_length=4096), batch_size=1, context_length=4096, dtype_name="bf16",
        checkpointing=True, compiled=True, lora=Lora(rank), sharing=Sharing(shards=shards),
    )  # fmt: skip


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_in_shards_the_embedding_is_whole_until_its_gradient_is(shards: int) -> None:
    need, tables = eight(shards=shards), 2 * 126_464 * 4_096  # the embedding's and the head's numbers
    rest = (shards - 1) / shards
    assert need.total >= need.states + rest * tables * (4 + 4), "weights and gradients in fp32, at the very end"
    assert need.total < need.states + rest * tables * (4 + 4) + 8 * GIB
    assert eight(shards=1).total < 1.1 * eight(shards=1).states, "the control: nothing is gathered by one alone"


def test_additions_wait_for_no_gradient_of_a_table() -> None:
    whole, added = eight(shards=1), eight(shards=1, rank=16)
    assert added.weights < 0.55 * whole.weights
    assert added.awaited == added.gradients < whole.awaited < whole.gradients
