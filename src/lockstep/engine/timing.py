"""How long steps take, and where the time goes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep.engine.step import Pending

logger = logging.getLogger(__name__)


class Clock:
    """Seconds of settled steps: by the GPU's own clock, which no late look distorts, else by the host's."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.since = time.perf_counter()
        self.previous: Pending | None = None

    def lap(self, pending: Pending) -> float:
        seconds = pending.seconds(self.previous) or pending.made - self.since
        self.since, self.previous = pending.made, pending
        return seconds


class NoProfiler:
    """Stands where no profile was asked for."""

    def step(self) -> None: ...


@contextlib.contextmanager
def profiling(trace_file: Path | None, *, steps_left: int) -> Iterator[NoProfiler | torch.profiler.profile]:
    """Trace a few steps after the first ones to a file that chrome://tracing and Perfetto show."""
    if trace_file is None:
        yield NoProfiler()
        return
    if steps_left < 3:
        logger.warning("Too few steps to profile: it needs 3, one to start, one to warm up and one to trace")
        yield NoProfiler()
        return
    steps = min(3, steps_left - 2)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda profile: profile.export_chrome_trace(str(trace_file))
    ) as profiler:
        yield profiler
    logger.info("Profile saved: %s", trace_file)
