"""Comma-separated values: a header, then a row per record, of which one field is the text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from shlex import quote
from typing import BinaryIO

from lockstep.errors import DataError
from lockstep.formats import RECORD_BYTES, Reading
from lockstep.formats.jsonl import decoded, lines

HAS_FIELDS = True  # a record may hold more than a text
SEPARATORS = {";": "semicolons", "\t": "tabs"}  # that others write
CONVERT = "import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter={mark!r}))"


def read(file: BinaryIO, how: Reading, start: int) -> Iterator[str]:
    """One text per row; rows before `start` are parsed and dropped, as a quoted field may hold line ends."""
    csv.field_size_limit(RECORD_BYTES)  # the default is 128 KiB
    rows, other = csv.reader(_text_lines(file, how), strict=True), ""
    try:
        header = next(rows, None)
        if header is None:
            return
        other = _conversion(header, how)
        hint = other or "data.text_column"
        column = 0 if how.conversations else header.index(how.choose(header, f"{how.where}:1", hint=hint))
        for index, row in enumerate(rows):
            if row and len(row) != len(header):
                raise DataError(
                    f"a row of {len(row)} fields, the header has {len(header)}",
                    where=f"{how.where}:{rows.line_num}",
                    hint=other or 'a text with commas or line ends stands in "quotes"',
                )
            if index < start:
                continue
            if row and how.conversations:
                yield how.text(dict(zip(header, row, strict=True)), f"{how.where}:{rows.line_num}")
            else:
                yield row[column] if row else ""
    except csv.Error as error:
        raise DataError(
            f"not CSV: {error}",
            where=f"{how.where}:{rows.line_num}",
            hint=other or 'every quote that is opened is closed; one inside "quotes" is doubled',
        ) from error


def _text_lines(file: BinaryIO, how: Reading) -> Iterator[str]:
    for number, line in enumerate(lines(file, how), 1):
        yield decoded(line, how, number) + "\n"


def _conversion(header: list[str], how: Reading) -> str:
    """What helps where the fields seem to be separated by something else: there is but one; "": they do not."""
    mark = next((mark for mark in SEPARATORS if len(header) == 1 and mark in header[0]), "")
    if not mark:
        return ""
    command = f'python3 -c "{CONVERT.format(mark=mark)}" < {quote(how.where)} > commas.csv'
    unpacked = "unpack it, then " if how.kind.packing else ""
    return f"the fields seem to be separated by {SEPARATORS[mark]}, commas are read: {unpacked}{command}"
