"""Whether a run fits into the memory of its device, and the changes that would make it fit: before training, and after
a shortage of memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.config.load import replaced
from lockstep.config.schema import RunConfig
from lockstep.engine.present import memory_estimate, shards
from lockstep.errors import LockstepError
from lockstep.launch.failure import size_text
from lockstep.models.shapes import Memory, Shape
from lockstep.runtime import env, hardware

if TYPE_CHECKING:
    from lockstep.engine.build import Plan

logger = logging.getLogger(__name__)

ROOM = 0.95  # of the free memory: what is to fit must do so with the allocator's losses
WORTH_A_WORD = 0.1  # of the free memory
HOPELESS = 4  # times the free memory: estimates were 0.95 to 1.29 of what was measured
GPUS = (2, 4, 8, 16, 32, 64)
LORA_RANK = 16
SMALLER = "fewer model.num_layers, or another model.model_path"
GIB = 2**30


@dataclass(frozen=True)
class Change:
    """A setting that needs less memory. `shards`: in how many parts the state lies then; 0: as before."""

    flags: str
    section: str
    values: dict[str, Any]
    shards: int = 0


@dataclass(frozen=True)
class Remedy:
    """Flags that need less. `exact`: they change no number, so a saved state can be gone on from as it is."""

    flags: str
    words: str
    exact: bool = False


@dataclass(frozen=True)
class Work:
    """What is to be done where, as far as it costs memory."""

    config: RunConfig
    shape: Shape
    device: torch.device
    shards: int = 1
    world: int = 1

    def need(self, changes: Sequence[Change] = ()) -> Memory:
        """By the estimate, with these changes; raises ConfigError where the configuration refuses one."""
        values = {f"{each.section}.{name}": value for each in changes for name, value in each.values.items()}
        config = replaced(self.config, values).config if values else self.config
        compiled = config.model.compiles(on_gpu=self.device.type == "cuda", debug=config.debug.enabled)
        parts = max((each.shards for each in changes), default=0) or self.shards
        return memory_estimate(config, self.shape, compiled=compiled, shards=parts)


def work_of(planned: Plan, place: env.Env) -> Work:
    """Of a run that is planned, or was."""
    parts = shards(planned.config.system.mode, place)
    return Work(planned.config, planned.shape, planned.device, parts, place.world)


def check_memory(work: Work) -> None:
    """Refuse a run whose states alone do not fit, before anything is allocated. The estimated rest is a warning.

    An estimate of several times the free memory is refused too: on the CPU the kernel would kill this process.
    """
    need, free, training = work.need(), hardware.free_memory_bytes(work.device), work.config.training
    if env.detect().rank == 0 and need.total > WORTH_A_WORD * free:
        logger.info("%s", words(need, free, where=" per GPU" if work.device.type == "cuda" else ""))
    if need.total <= ROOM * free:
        return
    text = (
        f"{work.shape.parameters():,} parameters need about {need.total / GIB:.1f} GiB with training.batch_size "
        f"{training.batch_size} x {training.context_length:,} tokens, {need.states / GIB:.1f} GiB of it "
        f"for weights, gradients and AdamW moments; {free / GIB:.1f} GiB are free"
    )
    helpful = "; ".join(f"{each.flags} ({each.words})" for each in remedies(work, int(ROOM * free))) or SMALLER
    if need.states > free or need.total > HOPELESS * free:
        raise LockstepError(f"the model does not fit: {text}", where=hardware.device_name(work.device), hint=helpful)
    logger.warning("This may not fit: %s; %s", text, helpful)


def words(need: Memory, free: int, where: str = " per GPU") -> str:
    """The estimate by cause."""
    parts = {
        "weights": need.weights,
        "gradients": need.gradients,
        "optimizer": need.moments,
        "activations": need.activations,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return f"Memory{where}, estimated: {need.total / GIB:.1f} GiB ({listed}); {free / GIB:.1f} GiB are free"


def remedies(work: Work, room: int) -> Iterator[Remedy]:
    """Changes with which the estimate is within `room` bytes, the mildest first; none where nothing is enough.

    Blocks are computed again, or rows of a micro-batch move into accumulation, which keeps the global batch. Where both
    are not enough the state gets smaller too: in half precision, with bf16 moments, by LoRA, or in shards.
    """
    for way in _ways(work):
        for savings in _savings(work, way):
            changes = [*way, *savings]
            if not changes or (total := _total(work, changes)) > room:
                continue
            flags = " ".join(each.flags for each in changes)
            exact = all(each.section == "system" for each in changes)
            yield Remedy(flags, f"{size_text(int(total))} by the estimate", exact)
            if not way or way[0].shards:  # the state can stay; or more GPUs would do as well
                return
            break


def _total(work: Work, changes: Sequence[Change]) -> float:
    try:
        return work.need(changes).total
    except LockstepError:  # the configuration refuses one
        return math.inf


def _ways(work: Work) -> Iterator[list[Change]]:
    """What is changed of the state, the mildest first; shards on as many GPUs as there are, or more."""
    config, on_gpu = work.config, work.device.type == "cuda"
    yield []
    if on_gpu and config.training.precision == "fp32":
        yield [Change("--precision bf16", "training", {"precision": "bf16"})]
    if config.training.optimizer_states == "fp32":
        yield [Change("--training.optimizer-states bf16", "training", {"optimizer_states": "bf16"})]
    if getattr(config.model, "lora_rank", None) == 0 and config.model.init != "random":  # noise has nothing to add to
        yield [Change(f"--model.lora-rank {LORA_RANK}", "model", {"lora_rank": LORA_RANK})]
    for count in sorted({work.world, *GPUS}) if on_gpu else ():
        if count > work.shards and count >= work.world:
            gpus = f" --gpus {count}" if count > work.world else ""
            yield [Change(f"--mode fsdp{gpus}", "system", {"mode": "fsdp"}, shards=count)]


def _savings(work: Work, way: Sequence[Change]) -> list[list[Change]]:
    """What shrinks the activations, the mildest first. More GPUs share the rows of the global batch, if they can."""
    training = work.config.training
    workers = way[0].shards if way and way[0].shards else work.world
    rows, rest = divmod(training.batch_size * training.grad_accum_nums * work.world, workers)
    single = Change(
        f"--training.batch-size 1 --training.grad-accum-nums {rows}",
        "training",
        {"batch_size": 1, "grad_accum_nums": rows},
    )
    recompute = Change("--gradient-checkpointing", "system", {"gradient_checkpointing": True})
    fewer = [] if rest or (training.batch_size == 1 and workers == work.world) else [single]
    again = [] if work.config.system.gradient_checkpointing else [recompute]
    return [fewer, [*again, *fewer]] if workers > work.world else [[], again, fewer, [*again, *fewer]]
