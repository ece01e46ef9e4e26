"""JSON lines: a line is a record, a text or an object with a text field; blank lines are blank records."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, BinaryIO

from lockstep.errors import DataError
from lockstep.formats import RECORD_BYTES, Reading, not_utf8

HAS_FIELDS = True  # a record may hold more than a text
READ_BYTES = 1 << 20
FORMS = '.jsonl: {"text": "..."} on a line of its own; .json: all of them in one list'


def read(file: BinaryIO, how: Reading, *, head: bytes = b"") -> Iterator[str]:
    """One text per line. `head`: what was read of the file before."""
    for number, line in enumerate(lines(file, how, head), 1):
        if line.isspace() or not line:
            yield ""
        else:
            where = f"{how.where}:{number}"
            yield how.text(parse(decoded(line, how, number).rstrip("\r"), where), where)


def lines(file: BinaryIO, how: Reading, head: bytes = b"") -> Iterator[bytes]:
    """The lines of a file without their line feeds; a byte order mark is none of the text."""
    number = 1
    parts: list[bytes] = []  # of a line that has not ended yet
    for block in chain([head], iter(partial(file.read, READ_BYTES), b"")):
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


def parse(text: str, where: str) -> Any:
    """A JSON value, or one message."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise DataError(f"not JSON: {place}: {error.msg}", where=where, hint=FORMS) from None
    except RecursionError:
        raise DataError("JSON nested too deeply", where=where, hint=FORMS) from None
    except ValueError as error:  # a number of more digits than Python turns into one
        raise DataError(
            f"not readable JSON: {error}", where=where, hint="mend or leave out what stands there"
        ) from None
