"""How a run ends: well, with a summary; badly, with the cause written down and the state kept."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch

from lockstep import rundir
from lockstep.config.schema import RunConfig
from lockstep.contracts import Sink
from lockstep.engine import loop
from lockstep.engine.parts import Parts
from lockstep.engine.present import memory_estimate
from lockstep.errors import ExitCode, LockstepError, Stopped
from lockstep.models.shapes import LlamaShape
from lockstep.rundir import RunDir
from lockstep.runtime import env, hardware

logger = logging.getLogger(__name__)

TRACE_LINES = 20
HOPELESS = 2  # times the free memory: the estimate of activations is not that far off


def explain(error: BaseException, config: RunConfig, device: torch.device) -> BaseException:
    """Out of memory as a user should read it; everything else as it is."""
    on_host = isinstance(error, RuntimeError) and "allocate memory" in str(error)  # how torch says it on the CPU
    if not on_host and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return error
    options = config.training
    total = hardware.total_memory_bytes(device)
    has = f" of {total / 2**30:.1f} GiB" if total else ""
    said = str(error).splitlines()[0][:200] if str(error) else "no more memory"
    return LockstepError(
        f"out of memory: peak {hardware.peak_memory_bytes(device) / 2**30:.1f} GiB{has} with batch_size "
        f"{options.batch_size} x context_length {options.context_length} ({said})",
        where=hardware.device_name(device),
        hint="--training.batch-size 1 with more grad_accum_nums, --gradient-checkpointing, or a shorter context_length",
        exit_code=ExitCode.FAILED,
    )


def check_memory(config: RunConfig, shape: LlamaShape, device: torch.device) -> None:
    """Refuse what cannot fit before anything is allocated: on the CPU the kernel would end the run without a word."""
    need = memory_estimate(config, shape, compiled=device.type == "cuda")
    free = hardware.free_memory_bytes(device)
    total, states, room = (count / 2**30 for count in (need.total, need.states, free))
    text = (
        f"{shape.parameters():,} parameters need about {total:.1f} GiB, {states:.1f} GiB of it for weights, gradients "
        f"and AdamW moments; {room:.1f} GiB are free"
    )
    if need.states > free or (device.type == "cpu" and need.total > HOPELESS * free):
        raise LockstepError(
            f"the model does not fit: {text}",
            where=hardware.device_name(device),
            hint="a smaller training.batch_size, fewer model.num_layers, another model.model_path, or --preset demo",
        )
    if need.total > free:
        logger.warning("This may not fit: %s; --training.batch-size 1 or --gradient-checkpointing need less", text)


def end_badly(run: RunDir, error: BaseException, sinks: list[Sink], parts: Parts | None) -> None:
    """Write down why the run ended, then save what is whole. Whatever fails here never hides the error itself."""
    stopped = isinstance(error, Stopped)
    code = int(error.exit_code) if isinstance(error, LockstepError) else int(ExitCode.FAILED)
    step, tag = parts.progress.step if parts else None, env.detect().tag
    record: dict[str, Any] = {"exit_code": code, "step": step, "cause": env.redact(str(error))}
    if not stopped:
        trace = "".join(traceback.format_exception(error)).splitlines()[-TRACE_LINES:]
        record |= {"exception": type(error).__name__, "tag": tag, "trace": [env.redact(line) for line in trace]}
        with contextlib.suppress(OSError):
            rundir.write_json(run.failure, record)
    for sink in sinks:
        _attempt("reporting the end", sink.event, "end" if stopped else "fault", record)
    if stopped:
        label = f" [{tag.replace('GPU', 'GPU ')}]" if tag else ""
        logger.warning("Training interrupted by user%s", label)
        logger.warning("Training ended at step %s%s", step or 0, label)
    if parts and not stopped and not parts.stepper.updating and isinstance(error, Exception):
        _attempt("the last save", loop.save, parts, "error")


def _attempt(what: str, action: Callable[..., object], *arguments: object) -> None:
    try:
        action(*arguments)
    except Exception as failure:
        logger.error("%s failed too: %s", what, failure)
