"""JSON lines: a line is a record, a text or an object with a text field; blank lines are blank records."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

from lockstep.errors import DataError
from lockstep.formats import RECORD_BYTES, Reading, not_utf8
from lockstep.formats.json import parse

HAS_FIELDS = True  # a record may hold more than a text
READ_BYTES = 1 << 20


def read(file: BinaryIO, how: Reading, start: int) -> Iterator[str]:
    """One text per line; lines before `start` are not even parsed."""
    for number, line in enumerate(islice(lines(file, how), start, None), start + 1):
        if line.isspace() or not line:
            yield ""
        else:
            where = f"{how.where}:{number}"
            yield how.text(parse(decoded(line, how, number).rstrip("\r"), where), where)


def lines(file: BinaryIO, how: Reading) -> Iterator[bytes]:
    """The lines of a file without their line feeds; a byte order mark is none of the text."""
    number = 1
    parts: list[bytes] = []  # of a line that has not ended yet
    while block := file.read(READ_BYTES):
        *ended, last = block.split(b"\n")
        for part in ended:
            yield _whole([*parts, part], number)
            number += 1
            parts.clear()
        parts.append(last)
        if sum(map(len, parts)) > RECORD_BYTES:
            raise DataError(
                f"a line of more than {RECORD_BYTES >> 20} MiB",
                where=f"{how.where}:{number}",
                hint="cut the document into several",
            )
    if any(parts):
        yield _whole(parts, number)


def decoded(line: bytes, how: Reading, number: int) -> str:
    """A line as text."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(error, how, f":{number}") from error


def _whole(parts: list[bytes], number: int) -> bytes:
    line = parts[0] if len(parts) == 1 else b"".join(parts)
    return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
