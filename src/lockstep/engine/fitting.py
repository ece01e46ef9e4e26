"""Whether a run fits into the memory of its device, said before anything is loaded; if not, what would."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.schema import RunConfig
from lockstep.engine.present import memory_estimate
from lockstep.errors import LockstepError
from lockstep.models.shapes import Memory, Shape
from lockstep.runtime import env, hardware

logger = logging.getLogger(__name__)

HOPELESS = 2  # times the free memory: the estimate of activations is not that far off
ROOM = 0.95  # of the free memory: what is to fit must do so with the allocator's losses
WORTH_A_WORD = 0.1  # of the free memory
GPUS = (2, 4, 8, 16, 32, 64)
LORA_RANK = 16
GIB = 2**30


@dataclass(frozen=True)
class Change:
    """Flags, and what they would set."""

    flags: str
    section: str
    values: dict[str, Any]

    def applied(self, config: RunConfig) -> RunConfig:
        section = getattr(config, self.section).model_copy(update=self.values)
        return config.model_copy(update={self.section: section})


def check_memory(config: RunConfig, shape: Shape, device: torch.device, *, shards: int = 1) -> None:
    """Refuse what cannot fit before anything is allocated: on the CPU the kernel would end the run without a word."""
    compiled = compiles(config, device)
    need = memory_estimate(config, shape, compiled=compiled, shards=shards)
    free = hardware.free_memory_bytes(device)
    if env.detect().rank == 0 and need.total > WORTH_A_WORD * free:
        logger.info("%s", words(need, free, where=" per GPU" if device.type == "cuda" else ""))
    text = (
        f"{shape.parameters():,} parameters need about {need.total / GIB:.1f} GiB with training.batch_size "
        f"{config.training.batch_size} x {config.training.context_length:,} tokens, {need.states / GIB:.1f} GiB of it "
        f"for weights, gradients and AdamW moments; {free / GIB:.1f} GiB are free"
    )
    if need.total <= ROOM * free:
        return
    others = "; ".join(alternatives(config, shape, device, free=free, shards=shards))
    if need.states > free or (device.type == "cpu" and need.total > HOPELESS * free):
        rows = "a smaller training.batch_size, " if config.training.batch_size > 1 else ""
        smaller = f"{rows}fewer model.num_layers, another model.model_path, or --preset demo"
        raise LockstepError(
            f"the model does not fit: {text}", where=hardware.device_name(device), hint=others or smaller
        )
    logger.warning("This may not fit: %s%s", text, f"; {others}" if others else "")


def words(need: Memory, free: int, where: str = " per GPU") -> str:
    """The estimate by cause."""
    parts = {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer": need.moments,
        "activations": need.passing,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return f"Memory{where}, estimated: {need.total / GIB:.1f} GiB ({listed}); {free / GIB:.1f} GiB are free"


def alternatives(config: RunConfig, shape: Shape, device: torch.device, *, free: int, shards: int = 1) -> list[str]:
    """Flags with which it would fit, by the same estimate: of each kind the ones that change the least."""
    found: list[str] = []
    enough: list[Change] | None = None  # what helps already without anything else
    for ways in _kinds(config, device, shards):
        for way, helps in itertools.product(ways, _savings(config)):
            changes = [*way.changes, *helps]
            if helps == enough:
                break
            trial = config
            for each in changes:
                trial = each.applied(trial)
            need = memory_estimate(trial, shape, compiled=compiles(trial, device), shards=way.shards)
            if changes and need.total <= ROOM * free:
                found.append(f"{' '.join(each.flags for each in changes)} ({need.total / GIB:.1f} GiB)")
                enough = enough if way.changes else helps
                break
    return found


@dataclass(frozen=True)
class Way:
    """What is changed beside the batch, and in how many parts the state lies then."""

    shards: int
    changes: tuple[Change, ...] = ()


def _kinds(config: RunConfig, device: torch.device, shards: int) -> Iterator[list[Way]]:
    """Ways of one kind, the mildest first."""
    on_gpu, states = device.type == "cuda", ["fp32", "bf16"]
    yield [Way(shards)]
    if on_gpu and config.training.precision == "fp32":
        yield [Way(shards, (Change("--precision bf16", "training", {"precision": "bf16"}),))]
    smaller = states[states.index(config.training.optimizer_states) + 1 :]
    yield [
        Way(shards, (Change(f"--training.optimizer-states {kind}", "training", {"optimizer_states": kind}),))
        for kind in smaller
    ]
    if (
        getattr(config.model, "lora_rank", None) == 0 and config.model.init != "random"
    ):  # additions to noise teach nothing
        yield [Way(shards, (Change(f"--model.lora-rank {LORA_RANK}", "model", {"lora_rank": LORA_RANK}),))]
    counts = [count for count in GPUS if count > shards and on_gpu]
    yield [Way(count, (Change(f"--mode fsdp --gpus {count}", "system", {"mode": "fsdp"}),)) for count in counts]


def _savings(config: RunConfig) -> list[list[Change]]:
    """What shrinks the rest: recomputing, then fewer rows at a time, then both."""
    recompute = Change("--gradient-checkpointing", "system", {"gradient_checkpointing": True})
    rows = Change("--training.batch-size 1", "training", {"batch_size": 1})
    able = [] if config.system.gradient_checkpointing else [recompute]
    able += [rows] if config.training.batch_size > 1 else []
    return [[], *([each] for each in able), *([able] if len(able) > 1 else [])]


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks would be compiled there."""
    return config.model.compiles(on_gpu=device.type == "cuda", debug=config.debug.enabled)
