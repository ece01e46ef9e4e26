"""An agent on its grid: each letter in its place, key and door as they are found, and nothing left on a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from lockstep.report import returns
from lockstep.report.learning import curves
from lockstep.report.walks import (
    FINE,
    PLAIN,
    Scene,
    View,
    bars,
    curve,
    grid,
    legend,
    letters_for,
    room_for,
    shown_episodes,
    side_by_side,
)
from tests.report.test_denoising import Screen, Terminal, terminal  # noqa: F401 - a fixture


def test_x_grows_to_the_right_and_y_upwards() -> None:
    scene = Scene(3, targets=(2 * 3 + 2,), trail=(1 * 3 + 1, 2 * 3 + 1))
    assert grid(scene, PLAIN) == [". . G", ". o @", ". . ."]


def test_who_stands_where_it_pays_is_seen() -> None:
    assert grid(Scene(2, (3,), (0, 1, 3), paid=True), PLAIN) == ["o *", "o ."]
    assert grid(Scene(2, (3,), (0, 1, 3), paid=False), PLAIN) == ["o @", "o ."]
    assert grid(Scene(2, (1,), (0, 1, 3), held=0), PLAIN) == ["G @", "o ."]  # a trail does not hide the goal


def test_a_key_that_was_found_is_gone_and_the_door_is_left() -> None:
    letters = letters_for("ascii", 2)
    without, with_key, opened = (Scene(2, (1, 2), (0,), held=held) for held in (0, 1, 2))
    assert grid(without, letters) == ["K .", "@ D"]
    assert grid(with_key, letters) == [". .", "@ D"]
    assert grid(opened, letters) == [". .", "@ ."]
    in_one_cell = Scene(2, (1, 1), (0,))
    assert grid(in_one_cell, letters)[0] == "K ."
    assert legend(letters) == "@ agent  K key  D door  o trail  * paid"


@pytest.mark.parametrize("encoding", ["ascii", None, "latin-1", "no such encoding"])
def test_a_stream_that_knows_few_letters_gets_plain_ones(encoding: str | None) -> None:
    letters = letters_for(encoding, 1)
    assert letters == PLAIN
    drawn = [*grid(Scene(3, (4,), (0, 1)), letters), bars([0, 1, 2], 2, 9, letters), legend(letters)]
    assert "".join(drawn).isascii()
    assert letters_for("utf-8", 1) == FINE


def test_bars_go_from_nothing_to_the_top_and_are_means_where_there_is_no_room() -> None:
    assert bars([0, 4, 8, 20], 8, 10, FINE) == "▁▅██"
    assert bars([0, 0, 8, 8], 8, 2, FINE) == "▁█"
    assert bars([], 8, 10, FINE) == ""
    assert bars([3, 3], 0, 10, FINE) == "▁▁"
    assert len(bars(list(range(1000)), 999, 60, FINE)) == 60
    assert curve([1, 2, 6], 8, PLAIN, width=3, last=2)[1] == "return by episode, 1 to 3: 1.00 -> 4.00 (last 2) of 8.00"


def test_pictures_stand_side_by_side_as_far_as_there_is_room() -> None:
    assert side_by_side([["ab", "c"], ["d"]]) == ["ab   d", "c"]
    assert [room_for(9, width) for width in (10, 36, 37, 80)] == [1, 1, 2, 4]
    assert shown_episodes(3, 4) == [0, 1, 2]
    assert shown_episodes(20, 4) == [0, 1, 2, 19]
    assert shown_episodes(20, 1) == [19]


def test_the_walk_is_redrawn_in_place_and_gone_at_the_end(terminal: Terminal) -> None:  # noqa: F811
    screen = Screen()
    with View(terminal.stream, FINE) as view:
        view.show(Scene(3, (8,), (4,)), "task", ["episode 1"])
        screen.feed(terminal.read())
        first = screen.shown()
        view.show(Scene(3, (8,), (4, 7)), "task", ["episode 1"])
        screen.feed(terminal.read())
        assert first == "task\n  · · G\n  · @ ·\n  · · ·\nepisode 1"
        assert screen.shown() == "task\n  · · G\n  · • @\n  · · ·\nepisode 1"
    screen.feed(terminal.read())
    assert screen.shown() == ""
    assert screen.cursor


def test_the_picture_never_exceeds_the_screen(terminal: Terminal) -> None:  # noqa: F811
    screen = Screen()
    with View(terminal.stream, FINE) as view:
        view.show(Scene(16, (8,), (4,)), "a task with a very long name that does not fit a line of this screen", ["x"])
        screen.feed(terminal.read())
        shown = screen.shown().splitlines()
    assert len(shown) <= 10
    assert max(map(len, shown)) <= 40


def test_no_colour_where_none_is_wanted(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def drawn() -> str:
        with View(terminal.stream, FINE) as view:
            view.show(Scene(3, (8,), (4,)), "task", [])
            return terminal.read()

    coloured = drawn()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "36m" in coloured or "33m" in coloured
    assert "36m" not in drawn()
    assert "33m" not in drawn()


@pytest.mark.parametrize(("tasks", "episodes"), [(1, 1), (3, 4), (20, 4)])
def test_returns_are_drawn(tasks: int, episodes: int) -> None:
    paid = np.arange(tasks * 2 * episodes).reshape(tasks, 2, episodes) % 7
    names = [str(task) for task in range(tasks)]
    drawn = returns.picture(paid, optimum=np.full(tasks, 7), names=names, title="x")
    assert drawn is not None
    assert drawn.startswith(b"\x89PNG")
    other = returns.picture(paid + 1, optimum=np.full(tasks, 7), names=names, title="x")
    assert other != drawn


def test_episodes_are_whole_numbers_on_the_axis_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []

    def look(figure: Any, file: Any, **_: Any) -> None:
        del file
        figure.canvas.draw()
        ticks.extend(float(tick) for axes in figure.axes for tick in axes.get_xticks())

    monkeypatch.setattr(Figure, "savefig", look)
    paid = np.ones((3, 2, 5))
    returns.picture(paid, optimum=np.full(3, 7), names=["a", "b", "c"], title="x")
    curves(paid[:, 0], single=paid[0, 0], optimum=7.0, title="x")
    assert ticks
    assert not [tick for tick in ticks if tick % 1]
