"""How long steps take, and where the time goes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lockstep.engine import anatomy
from lockstep.engine.step import Pending

logger = logging.getLogger(__name__)

TABLE_ROWS = 20


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
def profiling(
    trace_file: Path | None, window: tuple[int, int], *, begin: int, steps_left: int, tell: Callable[..., None]
) -> Iterator[NoProfiler | torch.profiler.profile]:
    """Trace a window (first step, how many) to a file that chrome://tracing and Perfetto show, and tell what they cost.

    The step that begins a run and the one after it are never traced: they start and warm up what is measured. `tell`
    gets an event with the seconds of each part of a step.
    """
    wait = max(1, window[0] - begin - 1)
    active = min(window[1], steps_left - wait - 1)
    if trace_file is not None and active < 1:
        logger.warning(
            "Too few steps to profile: the first would be step %d, and training is over then", begin + wait + 1
        )
    if trace_file is None or active < 1:
        yield NoProfiler()
        return
    usual = torch.profiler.schedule(wait=wait, warmup=1, active=active, repeat=1)

    def schedule(step: int) -> torch.profiler.ProfilerAction:
        if step == wait + 1 and torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels of the step before, still on their way, would count as traced
        return usual(step)

    def ready(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(trace_file))
        last = begin + wait + active
        logger.info("Profile of steps %d to %d:", begin + wait + 1, last)
        for line in _costs(profile):
            logger.info("%s", line)
        parts, unnamed = anatomy.of_profile(profile, steps=active)
        tell("profile", step=last + 1, steps=active, parts_seconds=parts, unnamed_seconds=unnamed)

    with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as profiler:
        yield profiler
    logger.info("Profile saved: %s", trace_file)


def _costs(profile: torch.profiler.profile) -> list[str]:
    """The documented table: what took longest, on the GPU where there is one."""
    events = profile.key_averages()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return events.table(sort_by=f"{kind}_time_total", row_limit=TABLE_ROWS, max_name_column_width=40).splitlines()
