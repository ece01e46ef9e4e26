"""Figures as a table for people, and as JSON. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lockstep.bench.short_run import Measured

GIB = 2**30
SHOWN_NAMES, NAME_WIDTH = 5, 70  # of kernels that no part claims


def table(found: Sequence[Measured], *, on_gpu: bool) -> list[str]:
    """What was measured, a line for each number of workers, and where a step of the last of them goes."""
    start, last = found[0].start, found[-1]
    estimated = sum(start["memory_bytes"].values())
    rows = [
        ("device", start["device"]),
        ("model", f"{start['model']}, {start['parameters']:,} parameters"),
        ("batch", f"{start['batch']} a worker, {start['precision']}"),
        ("attention", start["attention"]),
        ("memory", f"{estimated / GIB:.2f} GiB estimated{'' if on_gpu else '; measured is the whole process'}"),
        ("start", f"{found[0].start_seconds:.1f} s to the end of the first step, compiling included"),
    ]
    head = f"{'workers':>8} {'samples/s':>12} {'tokens/s':>14} {'ms/step':>10} {'p95':>10} {'mfu':>7} {'peak GiB':>9}"
    lines = [*(f"{name:<12} {text}" for name, text in rows), "", f"{head} {'efficiency':>11}"]
    for each in found:
        mfu = f"{100 * each.mfu:.1f} %" if each.mfu is not None else "n/a"
        lines.append(
            f"{each.workers:>8} {each.rows_per_second:>12,.2f} {each.tokens_per_second:>14,.0f}"
            f" {1e3 * each.seconds:>10,.2f} {1e3 * p95(each.step_seconds):>10,.2f} {mfu:>7}"
            f" {each.memory_bytes / GIB:>9.2f} {100 * each.efficiency(found[0]):>9.1f} %"
        )
    return [*lines, *_parts(last, on_gpu=on_gpu)]


def _parts(found: Measured, *, on_gpu: bool) -> list[str]:
    """Where a step goes. A GPU's kernels are held against a step that nobody watched: watching slows only the host."""
    if not found.parts_seconds:
        return []
    whole = found.seconds if on_gpu else found.traced_seconds
    gaps = whole - sum(found.parts_seconds.values())  # below 0: kernels overlap
    title = f"a step of {found.workers} workers" if found.workers > 1 else "a step"
    lines = ["", f"{title + ('' if on_gpu else ', with the profiler'):<38} {'ms':>10} {'%':>6}"]
    shown = [(part, seconds) for part, seconds in found.parts_seconds.items() if seconds]
    for part, seconds in [*shown, ("gaps", gaps), ("step", whole)]:
        lines.append(f"  {part:<36} {1e3 * seconds:10.3f} {100 * seconds / whole:6.1f}")
    for name, seconds in list(found.unnamed_seconds.items())[:SHOWN_NAMES]:
        lines.append(f"  other: {1e3 * seconds:.3f} ms {name[:NAME_WIDTH]}")
    return lines


def as_json(found: Sequence[Measured]) -> dict[str, Any]:
    """All of it."""
    start = found[0].start
    about = ("device", "model", "parameters", "precision", "attention", "batch")
    return {
        **{name: start[name] for name in about},
        "estimated_memory_bytes": sum(start["memory_bytes"].values()),
        "steps": len(found[0].step_seconds),
        "workers": [_point(each, found[0]) for each in found],
    }


def _point(found: Measured, first: Measured) -> dict[str, Any]:
    return {
        "workers": found.workers,
        "step_ms": 1e3 * found.seconds,
        "step_ms_p95": 1e3 * p95(found.step_seconds),
        "samples_per_second": found.rows_per_second,
        "tokens_per_second": found.tokens_per_second,
        "tokens_per_step": found.tokens_per_step,
        "mfu": found.mfu,
        "peak_memory_bytes": found.memory_bytes,
        "start_seconds": found.start_seconds,
        "efficiency": found.efficiency(first),
        "traced_step_ms": 1e3 * found.traced_seconds,
        "parts_ms": {part: 1e3 * seconds for part, seconds in found.parts_seconds.items()},
        "unnamed_ms": {name: 1e3 * seconds for name, seconds in found.unnamed_seconds.items()},
    }


def p95(values: Sequence[float]) -> float:
    """The smallest value that 95 of 100 do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]
