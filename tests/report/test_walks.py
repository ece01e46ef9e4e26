"""An agent on its grid as lines, the curve of its returns in two lines, and the picture of that curve."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.figure import Figure

from lockstep.report import returns
from lockstep.report.walks import bars, curve, grid, legend


def test_x_grows_to_the_right_and_y_upwards() -> None:
    assert grid(3, [1 * 3 + 1, 2 * 3 + 1], {2 * 3 + 2: "G"}, paid=False) == ["· · G", "· • @", "· · ·"]


def test_who_stands_where_it_pays_is_seen() -> None:
    assert grid(2, [0, 1, 3], {3: "G"}, paid=True) == ["• ★", "• ·"]
    assert grid(2, [0, 1, 3], {3: "G"}, paid=False) == ["• @", "• ·"]
    assert grid(2, [0, 1, 3], {1: "G"}, paid=False) == ["G @", "• ·"]  # a trail does not hide the goal


def test_the_letters_are_explained() -> None:
    assert legend({"K": "key", "D": "door"}) == "@ agent  K key  D door  • trail  ★ paid"


def test_bars_go_from_nothing_to_the_top_and_are_means_where_there_is_no_room() -> None:
    assert bars([0, 4, 8, 20], 8) == "▁▅██"
    assert bars([0] * 60 + [8] * 60, 8) == "▁" * 30 + "█" * 30
    assert bars([3, 3], 0) == "▁▁"
    assert len(bars(list(range(1000)), 999)) == 60
    assert curve([1, 2, 6], 8, last=2) == ["▂▃▆", "return by episode, 1 to 3: 1.00 → 4.00 (last 2) of 8.00"]


@pytest.mark.parametrize("episodes", [1, 5])
def test_the_mean_return_is_drawn(episodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paid = [float(number) for number in range(episodes)]
    drawn = returns.picture(paid, optimum=7.0, title="x")
    assert drawn is not None
    assert drawn.startswith(b"\x89PNG")
    assert returns.picture([value + 1 for value in paid], optimum=7.0, title="x") != drawn
    ticks, lines = list[float](), list[list[float]]()

    def look(figure: Any, file: Any, **_: Any) -> None:
        del file
        figure.canvas.draw()
        ticks.extend(float(tick) for axes in figure.axes for tick in axes.get_xticks())
        lines.extend([*map(float, line.get_ydata())] for axes in figure.axes for line in axes.lines)

    monkeypatch.setattr(Figure, "savefig", look)
    returns.picture(paid, optimum=7.0, title="x")
    assert ticks
    assert not [tick for tick in ticks if tick % 1], "episodes are whole numbers on the axis too"
    assert lines == [paid, [7.0, 7.0]], "one curve, and the optimum"
