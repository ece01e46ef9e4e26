"""The estimate of memory beside peaks that were measured on an H200 (benchmarks/LOG.md, 18 November 2026, night)."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.load import load
from lockstep.engine.present import memory_estimate
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
    """Rather above: gradients that come when activations have gone are counted beside them."""
    family, preset, settings, peak_gib = MEASURED[name]
    config = load(family, preset=preset, flags=flags(settings)).config
    shape = resolve(config.model, context_length=config.training.context_length)
    found = memory_estimate(config, shape, compiled=True).total / GIB
    assert 0.99 * peak_gib < found < 1.3 * peak_gib
