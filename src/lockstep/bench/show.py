"""Figures as tables for people. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.bench.figures import TERA, Figures, p95
from lockstep.bench.scaling import Point

GIB = 2**30
SHOWN_NAMES, NAME_WIDTH = 5, 70  # of kernels that no part claims


def table(figures: Figures) -> list[str]:
    """One bench."""
    subject = figures.subject
    memory = f"{figures.memory_bytes / GIB:.2f} GiB, {figures.estimated_bytes / GIB:.2f} estimated"
    if figures.estimate_off is not None:
        memory += f" ({100 * figures.estimate_off:+.1f} %)"
    rows = [
        ("device", subject.device),
        ("model", f"{subject.model}, {subject.parameters:,} parameters"),
        ("batch", f"{subject.batch}, {subject.precision}"),
        ("attention", subject.attention + (", compiled" if subject.compiled else "")),
        ("tokens/s", f"{figures.tokens_per_second:,.0f}"),
        ("ms per step", f"{1e3 * figures.seconds:,.2f} median, {1e3 * p95(figures.step_seconds):,.2f} p95"
                        f" ({len(figures.step_seconds)} step{'s' * (len(figures.step_seconds) > 1)})"),
        ("mfu_palm", _share(figures.mfu_palm, figures.peak_flops)),
        ("mfu_causal", _share(figures.mfu_causal, figures.peak_flops)),
        ("of_measured_peak", _share(figures.of_measured_peak, figures.measured_flops, "measured here")),
        ("peak memory", memory + ("" if subject.on_gpu else " (peak: the whole process)")),
        ("compile", f"{figures.compile_seconds:.1f} s beyond the steps that warm up"),
    ]  # fmt: skip
    return [
        *(f"{name:<18} {text}" for name, text in rows if text),
        *(f"{'BUSY':<18} {reason}" for reason in subject.busy),
        *_anatomy(figures),
    ]


def _share(value: float | None, of: float | None, what: str = "peak") -> str:
    """A share of so many FLOP/s; nothing where nobody knows how many there are."""
    if value is None or of is None:
        return ""
    return f"{100 * value:.1f} % of {of / TERA:.{0 if of >= 10 * TERA else 3}f} TFLOP/s {what}"


def _anatomy(figures: Figures) -> list[str]:
    found = figures.anatomy
    watched = "" if figures.subject.on_gpu else ", watched by the profiler"
    lines = [f"{'a step' + watched:<38} {'ms':>10} {'%':>6}"]
    shown = [(part, ms) for part, ms in found.parts_ms.items() if ms or part == "gaps"]
    for part, ms in [*shown, ("sum of the parts", found.sum_ms), ("step", found.wall_ms)]:
        lines.append(f"  {part:<36} {ms:10.3f} {100 * ms / found.wall_ms:6.1f}")
    for name, ms in list(found.unnamed_ms.items())[:SHOWN_NAMES]:
        lines.append(f"  other: {ms:.3f} ms {name[:NAME_WIDTH]}")
    return lines


def scaling_table(points: Sequence[Point], *, device: str, batch: str, busy: Sequence[str]) -> list[str]:
    """One line for each number of workers."""
    first = points[0]
    lines = [f"{device}: {batch} a worker", f"{'workers':>8} {'samples/s':>12} {'tokens/s':>14} {'efficiency':>11}"]
    for point in points:
        efficiency = f"{100 * point.efficiency(first):.1f} %"
        lines.append(
            f"{point.workers:>8} {point.samples_per_second:>12,.2f} {point.tokens_per_second:>14,.0f} {efficiency:>11}"
        )
    return [*lines, *(f"BUSY: {reason}" for reason in busy)]
