"""The picture of the losses: a valid image of a size one can look at, for any history."""

from __future__ import annotations

import struct
import sys

import pytest

from lockstep.report import history


def size(content: bytes) -> tuple[int, int]:
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    ("train", "validation"),
    [([6.0], [5.5]), ([6.0, 5.0, 4.5], [5.9, 5.2, 5.1]), ([6.0, 5.0], [None, 5.2]), ([6.0], [None])],
    ids=["one epoch", "several", "one unknown", "all unknown"],
)
def test_any_history_can_be_drawn(train: list[float], validation: list[float | None]) -> None:
    content = history.picture(train, validation, title="MLM training")
    assert content is not None
    width, height = size(content)
    assert width >= 800
    assert height >= 400


def test_another_history_is_another_picture() -> None:
    one, two = (history.picture([6.0, last], [5.9, 5.2], title="x") for last in (5.0, 4.0))
    assert one != two


def test_without_the_package_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert history.picture([6.0], [5.5], title="x") is None
