"""The returns of an agent over episodes in tasks it has not seen, as a picture, with the optimum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.report.figure import count_whole, new, png

AGENT, WALKS, INK, FAINT = "#2563eb", "#93c5fd", "#1f2937", "#d1d5db"
MOST_PANELS = 16  # more tasks are one panel of their mean
COLUMNS = 4
INCHES = (3.1, 2.3)  # of one panel

Numbers = np.ndarray[Any, Any]


def picture(
    returns: Numbers,
    *,
    optimum: Numbers,
    names: Sequence[str],
    title: str,
) -> bytes | None:
    """The PNG of returns (tasks, repeats, episodes): the mean, then each task; None where the package is missing.

    `optimum` is (tasks,).
    """
    tasks = len(names) if 1 < len(names) <= MOST_PANELS else 0
    panels = tasks + 1
    columns = min(COLUMNS, math.ceil(math.sqrt(panels)))
    rows = math.ceil(panels / columns)
    size = (max(2, columns) * INCHES[0], rows * INCHES[1] + 1.1)
    figure = new(size, of="picture of the returns")
    if figure is None:
        return None
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    heading = names[0] if len(names) == 1 else f"mean of {len(names)} tasks"
    spread = returns.mean(1) if len(names) > 1 else returns[0]
    _panel(grid[0], heading, returns.mean((0, 1)), spread, float(optimum.mean()))
    for place in range(tasks):
        _panel(grid[place + 1], names[place], returns[place].mean(0), returns[place], float(optimum[place]))
    for axes in grid[panels:]:
        axes.set_visible(False)
    count_whole(grid[0].xaxis, nbins=6)
    grid[0].set_ylim(0, 1.05 * max(float(optimum.max()), 1.0))
    for place, axes in enumerate(grid[:panels]):
        _label(axes, first=place % columns == 0, lowest=place + columns >= panels)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=max(2, columns), fontsize=9, frameon=False, labelcolor=INK
    )
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    return png(figure)


def _panel(axes: Any, heading: str, mean: Numbers, each: Numbers, optimum: float) -> None:
    """One curve with its spread (rows, episodes)."""
    episodes = np.arange(1, len(mean) + 1)
    low, high = each.min(0), each.max(0)
    if len(each) > 1:
        axes.fill_between(episodes, low, high, color=WALKS, alpha=0.4, linewidth=0, label="lowest to highest")
    dot = "o" if len(mean) == 1 else None
    axes.plot(episodes, mean, color=AGENT, linewidth=1.8, marker=dot, label="agent, no weight changed")
    axes.axhline(optimum, color=INK, linewidth=1, linestyle=":", label="optimum")
    title = f"{heading}: {mean.mean():.1f} of {round(optimum, 2):g}"
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.set_xlim(*((1, len(mean)) if len(mean) > 1 else (0.5, 1.5)))


def _label(axes: Any, *, first: bool, lowest: bool) -> None:
    axes.grid(visible=True, color=FAINT, linewidth=0.6, alpha=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, labelbottom=lowest)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if first:
        axes.set_ylabel("return", fontsize=8, color=INK)
    if lowest:
        axes.set_xlabel("episode", fontsize=8, color=INK)
