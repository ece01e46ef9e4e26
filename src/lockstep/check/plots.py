"""Pictures of a check as inline SVG: strips of agreement, and small charts that share a scale. Torch-free.

Words stand beside the drawings, not in them: a drawing can then be as wide as a screen or a phone without distortion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lockstep.check.markup import Markup, element, joined

MOST_CELLS = 300  # of a strip: neighbours share a cell, and the worst of them is shown
MOST_COLUMNS = 100  # of a chart: of neighbours the lowest and the highest are drawn
LETTERS = {"x": "different", "?": "no majority", "-": "no record", ".": "equal"}  # the worst first
CLASSES = {"x": "bad", "?": "open", "-": "none", ".": "good"}
HEIGHT = 100.0


def strip(letters: str, steps: Sequence[int]) -> Markup:
    """One row of cells, one for each compared step; equal neighbours are one box with a word about them."""
    size = -(-len(letters) // MOST_CELLS) or 1
    cells = [_worst(letters[start : start + size]) for start in range(0, len(letters), size)]
    boxes: list[Markup] = []
    start = 0
    for letter, group in groupby(cells):
        count = len(list(group))
        first, last = start * size, min(len(letters), (start + count) * size) - 1
        if letter != "-":
            boxes.append(_box(letter, start, count, _span(steps, first, last)))
        start += count
    view = f"0 0 {max(1, len(cells))} 10"
    return element("svg", *boxes, viewBox=view, preserveAspectRatio="none", class_="strip", role="img")


def _box(letter: str, start: int, count: int, span: str) -> Markup:
    top = 0 if letter in "x?" else 2  # what is wrong stands out without its colour
    box = element("rect", x=start, y=top, width=count, height=10 - 2 * top, class_=CLASSES[letter])
    return element("g", element("title", f"{span}: {LETTERS[letter]}"), box)


def _worst(letters: str) -> str:
    return next((letter for letter in LETTERS if letter in letters), "-")


def _span(steps: Sequence[int], first: int, last: int) -> str:
    if last >= len(steps):
        return "steps"
    return f"step {steps[first]}" if first == last else f"steps {steps[first]} to {steps[last]}"


@dataclass(frozen=True)
class Scale:
    """From what to what both axes of a group of charts go."""

    left: float
    right: float
    low: float
    high: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is drawn; what is beyond the scale stands at its edge."""
        across = (x - self.left) / ((self.right - self.left) or 1)
        up = (y - self.low) / ((self.high - self.low) or 1)
        return 1000 * min(1, max(0, across)), HEIGHT * (1 - min(1, max(0, up)))


def chart(points: Sequence[tuple[float, float]], scale: Scale, *, usual: float | None = None, kind: str = "") -> Markup:
    """A line; `usual`: a dashed level to compare it with. `kind`: a class more, for its colour."""
    drawn = [scale.place(x, y) for x, y in thinned(points)]
    track = " ".join(f"{'ML'[place > 0]}{x:.0f} {y:.1f}" for place, (x, y) in enumerate(drawn))
    level = []
    if usual is not None:
        _, y = scale.place(scale.left, usual)
        level = [element("line", x1=0, x2=1000, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="usual")]
    line = element("path", d=track or "M0 0", class_=f"track {kind}".strip())
    return element("svg", *level, line, viewBox=f"0 0 1000 {HEIGHT:.0f}", preserveAspectRatio="none", class_="chart")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most two points a column, the lowest and the highest: no peak is lost."""
    size = -(-len(points) // MOST_COLUMNS) or 1
    if size <= 2:
        return list(points)
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        found += sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])})
    return found


def panel(title: str, note: str, drawing: Markup, corners: tuple[str, str, str, str]) -> Markup:
    """A chart with its name and the ends of its axes: top, bottom, left, right."""
    top, bottom, left, right = corners
    return element(
        "figure",
        element("figcaption", element("b", title), " ", element("span", note)),
        element("div", element("span", top), element("span", bottom), class_="up"),
        drawing,
        element("div", element("span", left), element("span", right), class_="across"),
    )


def panels(found: Sequence[Markup]) -> Markup:
    return element("div", joined(found), class_="panels")
