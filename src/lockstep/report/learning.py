"""The learning curves of a collection as a picture: how the return of an episode rises over a history."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.report.figure import count_whole, new, png

MEAN, SPREAD, ONE, INK, FAINT = "#2563eb", "#93c5fd", "#ea580c", "#1f2937", "#d1d5db"
INCHES = (9.0, 4.6)

Numbers = np.ndarray[Any, Any]


def curves(returns: Numbers, *, single: Numbers, optimum: float, title: str) -> bytes | None:
    """The PNG of mean returns (tasks, episodes), one stream beside them; None where the package for it is missing."""
    figure = new(INCHES, of="picture of the learning curves")
    if figure is None:
        return None
    axes = figure.subplots()
    episodes = np.arange(1, returns.shape[1] + 1)
    low, high = np.quantile(returns, (0.1, 0.9), axis=0)
    axes.fill_between(episodes, low, high, color=SPREAD, alpha=0.4, linewidth=0, label="80 % of the tasks")
    axes.plot(episodes, single, color=ONE, linewidth=0.8, alpha=0.8, label="one stream")
    axes.plot(episodes, returns.mean(0), color=MEAN, linewidth=2, label=f"mean, {returns[:, -1].mean():.2f} at the end")
    axes.axhline(optimum, color=INK, linewidth=1, linestyle=":", label=f"optimum {optimum:.2f}")
    axes.set_xlabel("episode", color=INK)
    axes.set_ylabel("return", color=INK)
    count_whole(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.set_xlim(1 - 0.5 * (len(episodes) == 1), len(episodes) + 0.5 * (len(episodes) == 1))
    axes.grid(visible=True, color=FAINT, linewidth=0.7, alpha=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, labelcolor=INK)
    axes.set_title(title, fontsize=12, color=INK, loc="left")
    return png(figure)
