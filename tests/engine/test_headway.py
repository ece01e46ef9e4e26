"""How far a preparation is: lines, or a bar on a real terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest

from lockstep.engine import headway as module
from lockstep.engine.headway import Headway
from lockstep.report import logs
from tests.report.test_console import Terminal


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds at work takes hundredths here."""
    for name in ("LINE_SECONDS", "POLL_SECONDS", "BAR_SECONDS", "QUIET_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": "1", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    made = Terminal()
    yield made
    if not made.stream.closed:
        made.text()


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    headway = Headway()
    assert headway.line() == "Reading"  # nothing is said of nothing
    list(headway.reading(["ab" * 50_000]))
    assert headway.line() == "Reading: 1 document, 0.1 million characters"
    headway = Headway()
    assert list(headway.reading(["abc", np.arange(3), "d" * 1_500_000])) is not None
    assert headway.line() == "Reading: 3 documents, 1.5 million characters"
    headway.begin("Training the tokenizer")
    assert headway.line() == "Training the tokenizer"
    headway.begin("Tokenising", total=1000)
    headway._began -= 10.0
    assert headway.line() == "Tokenising: 0 % | 0 tokens | 0 tokens/s | ETA: ?"
    headway.done, headway.tokens = 250, 3000
    assert headway.line() == "Tokenising: 25 % | 3,000 tokens | 300 tokens/s | ETA: 0:30"
    assert headway.line(short=True) == "Tokenising: 25 % | 300 tokens/s | ETA: 0:30"
    headway.done = 2000  # a text that grew meanwhile
    assert "100 %" in headway.line()
    assert "ETA: 0:00" in headway.line()


@pytest.mark.usefixtures("quick")
def test_lines_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    headway = Headway()
    headway.begin("Tokenising", total=100)
    with headway:
        wait_for(lambda: len(caplog.messages) >= 2)
    told = len(caplog.messages)
    assert all(message.startswith("Tokenising: 0 %") for message in caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == told  # it ends with the work


@pytest.mark.usefixtures("quick")
def test_a_bar_on_a_terminal(terminal: Terminal) -> None:
    """NO_COLOR and LANG=C included: a bar of UTF-8 without colour, gone at the end; lines stay."""
    logs.setup_logging(stream=terminal.stream)
    with Headway() as headway:
        headway.begin("Tokenising", total=100)
        headway.done, headway.tokens = 50, 7
        wait_for(lambda: b"".join(terminal._parts).count("━".encode()) >= 2)
        logging.getLogger("lockstep.x").info("a line meanwhile")
    text = terminal.text()
    assert "Tokenising: 50 % | " in text
    assert "a line meanwhile\r\n" in text
    assert "\x1b[3" not in text.replace("\x1b[3J", "")  # no colour


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("done", "least", "most"), [(100, 20, 80), (50, 10, 40), (0, 0, 0)])
def test_a_bar_of_80_columns_is_as_full_as_its_words_say(terminal: Terminal, done: int, least: int, most: int) -> None:
    logs.setup_logging(stream=terminal.stream)
    with Headway() as headway:
        headway.begin("Tokenising", total=100)
        headway.done, headway.tokens, headway._began = done, 123_456_789_012, time.monotonic() - 100
        wait_for(lambda: b"Tokenising" in b"".join(terminal._parts))
    drawn = [part for part in terminal.text().replace("\r", "\n").split("\n") if f"Tokenising: {done} %" in part]
    assert all(least <= part.count("━") <= most for part in drawn)
    assert drawn


@pytest.mark.usefixtures("quick")
def test_no_bar_when_it_is_off(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    logs.setup_logging(stream=terminal.stream)
    with Headway(progress="off"):
        wait_for(lambda: b"Reading" in b"".join(terminal._parts))
    assert "\x1b" not in terminal.text()


def wait_for(what) -> None:
    """Until it is so; ten seconds at most."""
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
