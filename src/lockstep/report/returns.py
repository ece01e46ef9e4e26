"""The mean return of an agent over the episodes of its walks in unseen tasks, as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.report.figure import count_whole, new, png

CURVE, INK, FAINT = "#2563eb", "#1f2937", "#d1d5db"
INCHES = (7.0, 4.2)


def picture(curve: Sequence[float], *, optimum: float, title: str) -> bytes | None:
    """The PNG; None where the package for it is missing."""
    figure = new(INCHES, of="picture of the returns")
    if figure is None:
        return None
    axes = figure.subplots()
    episodes = range(1, len(curve) + 1)
    axes.plot(episodes, curve, color=CURVE, linewidth=1.8, marker="o" if len(curve) == 1 else None, label="mean return")
    axes.axhline(optimum, color=INK, linewidth=1, linestyle=":", label=f"optimum {optimum:.2f}")
    axes.set_xlim(0.5, len(curve) + 0.5)
    axes.set_ylim(0, 1.05 * max(optimum, 1.0))
    count_whole(axes.xaxis)
    axes.grid(visible=True, color=FAINT, linewidth=0.7)
    axes.set_xlabel("episode")
    axes.set_ylabel("return")
    axes.set_title(title, fontsize=11, loc="left")
    axes.legend(frameon=False)
    return png(figure)
