"""How a run ends: well, with a summary; badly, with the cause written down and the state kept."""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import Any

import torch

from lockstep import rundir
from lockstep.config.schema import RunConfig
from lockstep.contracts import Sink
from lockstep.engine import loop
from lockstep.engine.parts import Parts
from lockstep.errors import ExitCode, LockstepError, Stopped
from lockstep.rundir import RunDir
from lockstep.runtime import env, hardware

logger = logging.getLogger(__name__)

TRACE_LINES = 20


def explain(error: BaseException, config: RunConfig, device: torch.device) -> BaseException:
    """Out of memory as a user should read it; everything else as it is."""
    if not isinstance(error, torch.OutOfMemoryError | MemoryError):
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


def end_badly(run: RunDir, error: BaseException, sinks: list[Sink], parts: Parts | None) -> None:
    """Save what is whole, and write down why the run ended."""
    stopped = isinstance(error, Stopped)
    code = int(error.exit_code) if isinstance(error, LockstepError) else int(ExitCode.FAILED)
    step = parts.progress.step if parts else None
    if parts and step and not stopped and not parts.stepper.updating and isinstance(error, Exception):
        try:
            loop.save(parts, "error")
        except LockstepError as failure:
            logger.error("%s", failure)
    record: dict[str, Any] = {"exit_code": code, "step": step, "cause": env.redact(str(error))}
    if not stopped:
        trace = "".join(traceback.format_exception(error)).splitlines()[-TRACE_LINES:]
        record |= {
            "exception": type(error).__name__,
            "tag": env.detect().tag,
            "trace": [env.redact(line) for line in trace],
        }
        with contextlib.suppress(OSError):
            rundir.write_json(run.failure, record)
    for sink in sinks:
        sink.event("end" if stopped else "fault", record)
