"""A text that is filled in before one's eyes, on a real pseudo-terminal: what is drawn, and that nothing is left."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Iterator
from typing import IO

import pytest

from lockstep.data.tokenize import ByteTokenizer, TokenizerFile, train_wordpiece
from lockstep.report.denoising import HIDDEN, View, folds, pieces, printable

MASK = 300
PARTS = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|([\s\S])")


class Screen:
    """What a terminal would show: lines, and whether its cursor is hidden."""

    def __init__(self) -> None:
        self.lines, self.row, self.column, self.cursor = [""], 0, 0, True

    def feed(self, data: str) -> None:
        for numbers, letter, plain in PARTS.findall(data):
            if letter == "A":
                self.row -= int(numbers or 1)
            elif letter == "K":
                self.lines[self.row] = ""
            elif numbers == "?25":
                self.cursor = letter == "h"
            elif plain == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif plain == "\r":
                self.column = 0
            elif plain:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + 1 :]
                self.column += 1

    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).strip()


class Terminal:
    """Two ends of a pseudo-terminal."""

    def __init__(self) -> None:
        self.ours, theirs = pty.openpty()
        self.stream: IO[str] = os.fdopen(theirs, "w", encoding="utf-8")

    def read(self) -> str:
        self.stream.flush()
        os.set_blocking(self.ours, False)
        data = b""
        try:
            while chunk := os.read(self.ours, 1 << 16):
                data += chunk
        except BlockingIOError:
            pass
        return data.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "10")
    made = Terminal()
    yield made
    made.stream.close()
    os.close(made.ours)


def ids(text: str) -> list[int]:
    """Bytes; `_` is hidden."""
    return [MASK if letter == "_" else ord(letter) for letter in text]


def view(terminal: Terminal, prompt: str) -> View:
    return View(terminal.stream, ByteTokenizer().decode, mask=MASK, prompt=ids(prompt))


def test_it_is_redrawn_in_place_and_gone_at_the_end(terminal: Terminal) -> None:
    screen = Screen()
    assert terminal.stream.isatty()
    with view(terminal, "the ____") as shown:
        shown.show(ids("the s___"), fresh={4}, number=1)
        screen.feed(first := terminal.read())
        assert screen.shown() == f"the s{HIDDEN * 3}\npass 1, 3 to come"
        assert "\x1b[30;102ms\x1b[0m" in first, "what is new stands out"
        shown.show(ids("the se_a"), fresh={5, 7}, number=2)
        screen.feed(second := terminal.read())
        assert screen.shown() == f"the se{HIDDEN}a\npass 2, 1 to come"
        assert "\x1b[30;102ms" not in second
        assert not screen.cursor
    screen.feed(terminal.read())
    assert (screen.shown(), screen.cursor) == ("", True)


def test_an_interruption_leaves_nothing_behind(terminal: Terminal) -> None:
    screen = Screen()

    def interrupted() -> None:
        with view(terminal, "the ____") as shown:
            shown.show(ids("the s___"), fresh={4}, number=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    screen.feed(terminal.read())
    assert (screen.shown(), screen.cursor) == ("", True)


def test_of_a_long_text_the_end_is_seen(terminal: Terminal) -> None:
    screen, long = Screen(), "".join(f"line {number:02}\n" for number in range(30)) + "end_"
    with view(terminal, long) as shown:
        shown.show(ids(long), fresh=(), number=1)
        screen.feed(terminal.read())
        lines = screen.shown().splitlines()
    assert lines[0] == "line 23"
    assert lines[-2:] == [f"end{HIDDEN}", "pass 1, 1 to come"]
    assert len(lines) < 10


def test_lines_are_cut_where_they_end_and_not_at_blanks(terminal: Terminal) -> None:
    screen, long = Screen(), "word " * 5 + "_" * 30
    with view(terminal, long) as shown:
        shown.show(ids(long), fresh=(), number=1)
        screen.feed(terminal.read())
        assert screen.shown().splitlines()[:2] == ["word " * 5 + HIDDEN * 15, HIDDEN * 15]
    assert folds("日本語", 4) == [2], "each is two wide"
    assert folds("", 4) == []


def test_what_would_move_the_cursor_is_a_dot(terminal: Terminal) -> None:
    assert printable("a\x1b[2Jb\tc\r\n") == "a·[2Jb·c·\n"
    with view(terminal, "") as shown:
        shown.show([0x1B, *b"[31mred"], fresh=(), number=1)
        assert "\x1b[31m" not in terminal.read()


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_words_stay_apart_where_the_kinds_change(name: str) -> None:
    text = "the old sea is near"
    tokenizer: TokenizerFile = ByteTokenizer() if name == "bytes" else train_wordpiece([text] * 9, 400)
    row = tokenizer.encode([text])[0].tolist()
    middle = len(row) // 2
    found = pieces(row, mask=MASK, fresh={middle}, given=set(range(middle)), decode=tokenizer.decode)
    assert [kind for _, kind in found] == ["given", "fresh", "filled"]
    assert "".join(words for words, _ in found) == text
    row[middle] = MASK
    assert (HIDDEN, "hidden") in pieces(row, mask=MASK, fresh=(), given=(), decode=tokenizer.decode)


def test_a_letter_of_several_tokens_is_one_letter() -> None:
    row = list("née".encode())
    assert pieces(row, mask=MASK, fresh=(), given=set(range(4)), decode=ByteTokenizer().decode) == [("née", "given")]
