"""JSON: a list of texts or of objects with a text field, an object that holds such a list, or values one after another.

Items are parsed one by one as the file comes in, so that a list of any length takes little memory; only an object that
holds the list is read whole. Values one after another are what JSON lines are under this name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO, cast

from lockstep.errors import DataError
from lockstep.formats import COLUMNS, RECORD_BYTES, Reading
from lockstep.formats.chats import is_record
from lockstep.formats.txt import blocks

HAS_FIELDS = True  # a record may hold more than a text
WHOLE_CHARACTERS = 1 << 28  # of an object that holds all documents
NEAR_THE_END = 16  # characters: no literal, escape or sign of JSON that may be cut short there is longer
FORMS = '.jsonl: {"text": "..."} on a line of its own; .json: all of them in one list'
BLANKS = re.compile(r"[ \t\n\r]*")


def read(file: BinaryIO, how: Reading, start: int) -> Iterator[str]:
    """One text per item; items before `start` are parsed and dropped."""
    text = _Text(blocks(file, how), how.where)
    for place, item in islice(_items(text, how), start, None):
        yield how.text(item, f"{how.where}{place}")


def _items(text: _Text, how: Reading) -> Iterator[tuple[str, Any]]:
    """(place for messages, item)."""
    if text.peek() == "[":
        for index, item in enumerate(text.list_items()):
            yield f": item {index}", item
        return
    line = text.line()
    first = text.value(WHOLE_CHARACTERS)
    if text.peek():  # more than one value
        yield f":{line}", first
        while text.peek():
            line = text.line()
            yield f":{line}", text.value(RECORD_BYTES)
        return
    if not isinstance(first, dict):
        raise DataError(f"a list was expected, got {type(first).__name__}", where=how.where, hint=FORMS)
    yield from _inside(cast("dict[str, Any]", first), how)


def _inside(whole: dict[str, Any], how: Reading) -> Iterator[tuple[str, Any]]:
    """The items of the list an object holds; without any list it is the only item."""
    if how.conversations and is_record(whole, how.column):
        yield "", whole
        return
    lists = {name: cast("list[Any]", value) for name, value in whole.items() if isinstance(value, list)}
    name = how.column if how.column in lists else next((name for name in COLUMNS if name in lists), None)
    if name is None and len(lists) > 1:
        raise DataError(
            f"an object with {len(lists)} lists: which holds the documents?",
            where=how.where,
            hint="data.text_column=NAME",
        )
    chosen = name if name is not None else next(iter(lists), None)
    if chosen is None:
        yield "", whole
        return
    for index, item in enumerate(lists[chosen]):
        yield f": item {index}", item


class _Text:
    """JSON that comes in blocks: what has been parsed is forgotten, except for how many lines it had."""

    def __init__(self, texts: Iterator[str], where: str) -> None:
        self._texts, self._where = texts, where
        self._held, self._next = "", 0  # what is in memory, and the character in it to go on at
        self._lines, self._columns = 0, 0  # complete lines that are gone, and characters of the line begun
        self._counted, self._breaks = 0, 0  # how far line ends in memory are counted, so that none is counted twice
        self._ended = False
        self._decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            self._next = cast("re.Match[str]", BLANKS.match(self._held, self._next)).end()
            if self._next < len(self._held):
                return self._held[self._next]
            if self._ended:
                return ""
            self._more()

    def line(self) -> int:
        """The number of the line it is in."""
        self._breaks += self._held.count("\n", self._counted, self._next)
        self._counted = self._next
        return self._lines + self._breaks + 1

    def list_items(self) -> Iterator[Any]:
        """The items of a list that begins here and is all there is."""
        self._next += 1
        sign = "]" if self.peek() == "]" else ","
        while sign == ",":
            yield self.value(RECORD_BYTES)
            sign = self.peek()
            self._next += sign == ","
        if sign != "]":
            raise self._error("Expecting ',' delimiter", self._next)
        self._next += 1
        if self.peek():
            raise self._error("Extra data", self._next)

    def value(self, limit: int) -> Any:
        """The value that begins here, of so many characters at most."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._held, self._next)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos >= len(self._held) - NEAR_THE_END
                if self._ended or not unfinished:
                    raise self._error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise not_json(error, self._where) from None
            else:
                if self._ended or end < len(self._held):  # else a number could go on
                    self._next = end
                    return value
            if len(self._held) - self._next > limit:
                raise DataError(
                    f"a value of more than {limit >> 20} Mi characters",
                    where=f"{self._where}:{self.line()}",
                    hint="write it as .jsonl, a document a line",
                )
            self._more()

    def _more(self) -> None:
        """Forget what is parsed, and hold at least twice as much of what is not, so that nothing is parsed often."""
        gone = self._held[: self._next]
        if breaks := self.line() - self._lines - 1:
            self._columns = 0
        self._lines += breaks
        self._columns += len(gone) - (gone.rfind("\n") + 1)
        parts = [self._held[self._next :]]
        self._next, self._counted, self._breaks = 0, 0, 0
        size, wanted = len(parts[0]), 2 * len(parts[0]) + 1
        while size < wanted:
            block = next(self._texts, None)
            if block is None:
                self._ended = True
                break
            parts.append(block)
            size += len(block)
        self._held = "".join(parts)

    def _error(self, said: str, position: int) -> DataError:
        error = json.JSONDecodeError(said, self._held, position)
        return not_json(error, self._where, line=self._lines + 1, column=self._columns)


def parse(text: str, where: str) -> Any:
    """A JSON value, or one message."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_json(error, where) from None


def not_json(error: Exception, where: str, *, line: int = 1, column: int = 0) -> DataError:
    """What the parser says; `line` and `column`: where in the file its text began."""
    if isinstance(error, json.JSONDecodeError):
        column = error.colno + (column if error.lineno == 1 else 0)
        line += error.lineno - 1
        place = f"column {column}" if line == 1 else f"line {line}, column {column}"
        return DataError(f"not JSON: {place}: {error.msg}", where=where, hint=FORMS)
    if isinstance(error, RecursionError):
        return DataError("JSON nested too deeply", where=where, hint=FORMS)
    # a number of more digits than Python turns into one
    return DataError(f"not readable JSON: {error}", where=where, hint="mend or leave out what stands there")
