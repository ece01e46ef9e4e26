"""A text as it is filled in, redrawn in place on a terminal, and gone when it is done. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import IO, Any

from lockstep.report.live import Place

HIDDEN = "▒"
STYLES = {"hidden": "bright_black", "given": "bold", "fresh": "black on bright_green", "filled": ""}
Decode = Callable[[list[int]], str]


def pieces(
    ids: Sequence[int], *, mask: int, fresh: Collection[int], given: Collection[int], decode: Decode
) -> list[tuple[str, str]]:
    """(text, kind) of runs of tokens: hidden, given by the prompt, fresh from the last pass, filled before."""
    kinds = [
        "hidden" if token == mask else "fresh" if place in fresh else "given" if place in given else "filled"
        for place, token in enumerate(ids)
    ]
    found: list[tuple[str, str]] = []
    place = 0
    for kind, same in groupby(kinds):
        end = place + len(list(same))
        text = (
            HIDDEN * (end - place) if kind == "hidden" else following(decode, ids[max(0, place - 1) : end], place > 0)
        )
        found.append((text, kind))
        place = end
    return found


def following(decode: Decode, ids: Sequence[int], has_before: bool) -> str:
    """The text of ids after the first of them, with the blank between; tokenizers of words only join words they see."""
    whole = decode(list(ids))
    if not has_before:
        return whole
    before = decode(list(ids[:1]))
    return whole[len(before) :] if whole.startswith(before) else decode(list(ids[1:]))


class View(Place):
    """The place on the terminal. What does not fit on it is its beginning."""

    def __init__(self, stream: IO[str], decode: Decode, *, mask: int, prompt: Sequence[int]) -> None:
        super().__init__(stream)
        self._decode, self._mask = decode, mask
        self._given = {place for place, token in enumerate(prompt) if token != mask}

    def show(self, ids: Sequence[int], *, fresh: Collection[int], number: int) -> None:
        """After a pass."""
        self.draw(self._picture(ids, fresh, number))

    def _picture(self, ids: Sequence[int], fresh: Collection[int], number: int) -> Any:
        from rich.console import Group
        from rich.text import Text

        text, width = Text(no_wrap=True, overflow="crop"), self._console.width
        for words, kind in pieces(ids, mask=self._mask, fresh=fresh, given=self._given, decode=self._decode):
            text.append(printable(words), style=STYLES[kind])
        lines = [part for line in text.split("\n", allow_blank=True) for part in line.divide(folds(line.plain, width))]
        lines = lines[-max(1, self._console.height - 2) :]
        left = sum(token == self._mask for token in ids)
        return Group(*lines, Text(f"pass {number}, {left} to come", style=STYLES["hidden"]))


def folds(line: str, width: int) -> list[int]:
    """Where a line that is too long is cut. Anywhere, as a terminal does: at blanks it would jump as they come."""
    from rich.cells import cell_len

    found: list[int] = []
    used = 0
    for place, letter in enumerate(line):
        size = cell_len(letter)
        if used + size > width:
            found.append(place)
            used = 0
        used += size
    return found


def printable(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
