"""An empty figure for a picture of ours, and its bytes. Needs matplotlib, which not everybody has."""

from __future__ import annotations

import io
import logging
from typing import Any

log = logging.getLogger(__name__)

DOTS_PER_INCH = 120


def new(inches: tuple[float, float], *, of: str) -> Any:
    """The figure; None, with a word about the picture `of` what, where the package is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.info("no %s: the package matplotlib is missing (pip install matplotlib)", of)
        return None
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of fonts
    figure: Any = Figure(figsize=inches, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def count_whole(axis: Any) -> None:
    """An axis of things that are counted."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def png(figure: Any) -> bytes:
    """The same figure always gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
