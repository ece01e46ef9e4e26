"""Comma-separated values: a header, then a row per record, of which one field is the text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

from lockstep.errors import DataError
from lockstep.formats import RECORD_BYTES, Reading
from lockstep.formats.jsonl import decoded, lines

HAS_FIELDS = True  # a record may hold more than a text


def read(file: BinaryIO, how: Reading) -> Iterator[str]:
    """One text per row."""
    csv.field_size_limit(RECORD_BYTES)  # the default is 128 KiB
    rows = csv.reader(_text_lines(file, how), strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        column = 0 if how.conversations else header.index(how.choose(header, f"{how.where}:1"))
        for row in rows:
            if row and len(row) != len(header):
                raise DataError(
                    f"a row of {len(row)} fields, the header has {len(header)}",
                    where=f"{how.where}:{rows.line_num}",
                    hint='a text with commas or line ends stands in "quotes"',
                )
            if row and how.conversations:
                yield how.text(dict(zip(header, row, strict=True)), f"{how.where}:{rows.line_num}")
            else:
                yield row[column] if row else ""
    except csv.Error as error:
        raise DataError(
            f"not CSV: {error}",
            where=f"{how.where}:{rows.line_num}",
            hint='every quote that is opened is closed; one inside "quotes" is doubled',
        ) from error


def _text_lines(file: BinaryIO, how: Reading) -> Iterator[str]:
    for number, line in enumerate(lines(file, how), 1):
        yield decoded(line, how, number) + "\n"
