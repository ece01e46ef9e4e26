"""JSON: a list of texts or of objects with a text field, an object that holds such a list, or JSON lines of that name.

JSON lines are read line by line; anything else is read whole, up to WHOLE_BYTES.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from functools import partial
from pathlib import PurePath
from shlex import quote
from typing import Any, BinaryIO, cast

from lockstep.errors import DataError
from lockstep.formats import COLUMNS, Reading, jsonl, not_utf8
from lockstep.formats.chats import is_record

HAS_FIELDS = True  # a record may hold more than a text
READ_BYTES = 1 << 20
WHOLE_BYTES = 1 << 30
CAT = {"": "cat", "gz": "zcat", "zst": "zstdcat"}


def read(file: BinaryIO, how: Reading) -> Iterator[str]:
    """One text per item, of JSON lines per line."""
    content = file.read(READ_BYTES)
    if not _is_lines(content):
        content = _whole(content, file, how)
    if _is_lines(content):
        yield from jsonl.read(file, how, head=content)
        return
    for place, item in _items(_parsed(content.removeprefix(codecs.BOM_UTF8), how), how):
        yield how.text(item, f"{how.where}{place}")


def _is_lines(content: bytes) -> bool:
    """Whether what begins so has a value on its first line, and more after it."""
    line, _, more = content.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not more.strip():
        return False
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def _whole(head: bytes, file: BinaryIO, how: Reading) -> bytes:
    parts, size = [head], len(head)
    for block in iter(partial(file.read, READ_BYTES), b""):
        parts.append(block)
        size += len(block)
        if size > WHOLE_BYTES:
            name = PurePath(how.where).name
            lines = f"{name.partition('.')[0]}.jsonl"
            raise DataError(
                f"more than {WHOLE_BYTES >> 20} MiB, and .json is read whole",
                where=how.where,
                hint=f"{CAT[how.kind.packing]} {quote(name)} | jq -c '.[]' > {quote(lines)}",
            )
    return b"".join(parts)


def _parsed(content: bytes, how: Reading) -> Any:
    try:
        return jsonl.parse(content.decode(), how.where)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise not_utf8(error, how, f":{line}") from error


def _items(whole: Any, how: Reading) -> Iterator[tuple[str, Any]]:
    """(place for messages, item): of a list, of the list that an object holds, or the only one."""
    found = _inside(cast("dict[str, Any]", whole), how) if isinstance(whole, dict) else whole
    if isinstance(found, list):
        for index, item in enumerate(cast("list[Any]", found)):
            yield f": item {index}", item
    elif isinstance(found, dict):
        yield "", found
    else:
        raise DataError(f"a list was expected, got {type(found).__name__}", where=how.where, hint=jsonl.FORMS)


def _inside(whole: dict[str, Any], how: Reading) -> dict[str, Any] | list[Any]:
    """The list that an object holds; without any it is an item itself."""
    if how.conversations and is_record(whole, how.column):
        return whole
    lists = {name: cast("list[Any]", value) for name, value in whole.items() if isinstance(value, list)}
    name = how.column if how.column in lists else next((name for name in COLUMNS if name in lists), None)
    if name is None and len(lists) > 1:
        raise DataError(
            f"an object with {len(lists)} lists: which holds the documents?",
            where=how.where,
            hint="data.text_column=NAME",
        )
    return lists[name] if name is not None else next(iter(lists.values()), whole)
