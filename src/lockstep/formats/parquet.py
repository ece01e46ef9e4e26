"""Parquet: a row is a record. Row groups are read one by one, and of them only the column that holds the text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

from lockstep.errors import DataError, LockstepError
from lockstep.formats import COLUMNS, Reading, is_of_content, joined
from lockstep.formats.chats import FIELDS

HAS_FIELDS = True  # a record may hold more than a text
BATCH_ROWS = 1024
BUFFER_BYTES = 1 << 22  # of a column fetched at a time: a few rows do not cost a whole row group


def read(file: BinaryIO, how: Reading) -> Iterator[str]:
    """One text per row."""
    if how.kind.packing:
        raise DataError("a packed .parquet cannot be read in parts", where=how.where, hint="unpack it")
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise LockstepError("pyarrow, which reads .parquet, is not installed", hint="pip install pyarrow") from error
    try:
        with parquet.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as opened:
            columns = _columns(opened.schema_arrow, how, arrow.types)
            yield from _texts(_batches(opened, columns), how)
    except (OSError, arrow.ArrowException) as error:
        if isinstance(error, OSError) and not is_of_content(error):
            raise
        raise DataError(
            f"not a readable parquet file: {error}",
            where=how.where,
            hint="fetch it again, or call it by what it holds: .txt, .jsonl, .csv",
        ) from error


def _batches(opened: Any, columns: list[str]) -> Iterator[Any]:
    """Group by group: a batch over several of them would fetch them all before its first row."""
    for group in range(opened.num_row_groups):
        yield from opened.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)


def _texts(batches: Iterator[Any], how: Reading) -> Iterator[str]:
    first = 0
    for batch in batches:
        if how.conversations:
            for row, record in enumerate(batch.to_pylist(), first):
                yield how.text(record, f"{how.where}: row {row}")
        else:
            for value in batch.column(0).to_pylist():
                yield joined(value, how.where)
        first += len(batch)


def _columns(schema: Any, how: Reading, types: Any) -> list[str]:
    """Those to be read: the one that holds the text, or all that a conversation may be made of."""
    if not how.conversations:
        return [how.choose(_text_fields(schema, how, types), how.where)]
    wanted = (how.column,) if how.column else FIELDS
    return [field.name for field in schema if field.name in wanted]


def _text_fields(schema: Any, how: Reading, types: Any) -> list[str]:
    """The columns that hold text; a column of lists of words is one if it is called so."""

    def is_text(kind: Any) -> bool:
        plain = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        return plain or (types.is_dictionary(kind) and is_text(kind.value_type))

    def is_words(kind: Any) -> bool:
        return (types.is_list(kind) or types.is_large_list(kind)) and is_text(kind.value_type)

    wanted = (how.column, *COLUMNS)
    fields: list[tuple[str, Any]] = [(field.name, field.type) for field in schema]
    return [name for name, kind in fields if is_text(kind) or (name in wanted and is_words(kind))]
