"""Plain text: a file is one document, or is cut into several at blank lines, else at line ends, else at blanks."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from lockstep.formats import MAX_CUT_CHARACTERS, Reading, not_utf8

SHARE_OF_DOCUMENT = 40  # no document is more of the text than a 40th, so that one file alone can be split
MIN_CUT_CHARACTERS = 1 << 10
READ_BYTES = 1 << 20


def cut_limit(total_bytes: int) -> int:
    """Characters of the longest document where all the plain text together has so many bytes."""
    return min(max(total_bytes // SHARE_OF_DOCUMENT, MIN_CUT_CHARACTERS), MAX_CUT_CHARACTERS)


def read(file: BinaryIO, how: Reading) -> Iterator[str]:
    """The pieces of the text, which joined are the text."""
    return cut(blocks(file, how), how.cut_characters)


def blocks(file: BinaryIO, how: Reading) -> Iterator[str]:
    """The text of a file, block by block, every line ended by a line feed."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line_feeds = io.IncrementalNewlineDecoder(None, translate=True)
    line, ended = 1, False
    while not ended:
        ended = not (block := file.read(READ_BYTES))
        try:
            text = line_feeds.decode(decoder.decode(block, final=ended), final=ended)
        except UnicodeDecodeError as error:
            line += line_feeds.decode(error.object[: error.start].decode(), final=True).count("\n")
            raise not_utf8(error, how, f":{line}") from error
        line += text.count("\n")
        yield text


def cut(texts: Iterable[str], limit: int) -> Iterator[str]:
    """A text that comes in blocks, in pieces of at most `limit` characters. How it came decides nothing."""
    rest = ""
    for block in texts:
        rest += block
        start = 0
        while len(rest) - start > limit:
            end = _boundary(rest, start, start + limit)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    yield rest


def _boundary(text: str, start: int, end: int) -> int:
    """The best place to cut in start..end: after the last blank line, else line, else blank, else at the end."""
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, start + (end - start) // 2, end)
        if found >= 0:
            return found + len(mark)
    return end
