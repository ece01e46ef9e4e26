"""The loss history of a run as a picture: the two curves, and how far they lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lockstep.report.figure import count_whole, new, png

TRAIN, VALIDATION, GAP, INK, FAINT = "#2563eb", "#ea580c", "#7c3aed", "#1f2937", "#d1d5db"
INCHES = (11.0, 4.6)


def picture(train: Sequence[float | None], validation: Sequence[float | None], *, title: str) -> bytes | None:
    """The PNG; None where the package for it is missing."""
    figure = new(INCHES, of="training_history.png")
    if figure is None:
        return None
    curves, gap = figure.subplots(1, 2, width_ratios=(3, 2))
    epochs = list(range(1, len(train) + 1))
    lost, held = _numbers(train), _numbers(validation)
    apart = [abs(one - other) for one, other in zip(lost, held, strict=True)]
    marks: dict[str, Any] = {"linewidth": 2, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1}
    curves.plot(epochs, lost, marker="o", color=TRAIN, label="training", **marks)
    curves.plot(epochs, held, marker="s", color=VALIDATION, label="validation", **marks)
    _mark_best(curves, epochs, held)
    gap.plot(epochs, apart, marker="D", color=GAP, label="|training − validation|", **marks)
    gap.fill_between(epochs, apart, color=GAP, alpha=0.12, linewidth=0)
    for axes, heading, unit in ((curves, "Loss", "loss (nats)"), (gap, "Difference", "absolute difference (nats)")):
        _dress(axes, heading, unit, epochs)
        count_whole(axes.xaxis)
    gap.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=14, fontweight="bold", color=INK)
    return png(figure)


def _numbers(losses: Sequence[float | None]) -> list[float]:
    return [math.nan if loss is None else loss for loss in losses]


def _mark_best(axes: Any, epochs: list[int], losses: list[float]) -> None:
    """The lowest validation loss, in words: what one looks for first."""
    known = [(loss, epoch) for loss, epoch in zip(losses, epochs, strict=True) if math.isfinite(loss)]
    if not known:
        return
    loss, epoch = min(known)
    axes.axhline(loss, color=VALIDATION, linewidth=1, linestyle=":", alpha=0.7)
    axes.plot([], [], " ", label=f"best {loss:.4f} in epoch {epoch}")


def _dress(axes: Any, heading: str, unit: str, epochs: list[int]) -> None:
    axes.set_title(heading, fontsize=12, color=INK, loc="left")
    axes.set_xlabel("epoch", color=INK)
    axes.set_ylabel(unit, color=INK)
    axes.grid(visible=True, color=FAINT, linewidth=0.7, alpha=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    margin = 0.5 if len(epochs) == 1 else 0.03 * (len(epochs) - 1)
    axes.set_xlim(epochs[0] - margin, epochs[-1] + margin)
    axes.legend(frameon=False, labelcolor=INK)
