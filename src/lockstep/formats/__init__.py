"""How documents lie in files: one module per kind of file, called as the suffix is.

A kind offers `read(file, how)`: its records, over any binary file object with `read` (`.parquet` also seeks), so that a
file may as well lie behind a network. A packing (`gz`, `zst`) offers `unpack(file, where)`, the stream inside. A record
may be blank; `walk` leaves such out.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from shlex import quote
from typing import Any, BinaryIO, cast

from lockstep import registry
from lockstep.errors import DataError
from lockstep.formats.chats import ANSWERS, FORMS, encodable, exchange_of

PARTS = ("chats",)  # no kinds of files
COLUMNS = ("text", "content")  # looked for when no column is named
RECORD_BYTES = 1 << 26  # a longer line, item, field or row is refused, not gathered in memory
MAX_CUT_CHARACTERS = 1 << 18  # the tokenizers library takes some 170 bytes a character
LISTED, LISTED_CHARACTERS = 20, 60  # fields in a message


@dataclass(frozen=True)
class Kind:
    """What the name of a file says about its content."""

    name: str  # a module of this folder that reads
    packing: str = ""  # a module of this folder that unpacks; "": not packed


@dataclass(frozen=True)
class Reading:
    """How one file is to be read."""

    kind: Kind
    where: str  # for messages
    column: str | None = None  # the field that holds the text; None: looked for
    cut_characters: int = MAX_CUT_CHARACTERS  # .txt: longest document
    conversations: bool = False  # a record is a prompt and its answer

    def text(self, item: object, where: str) -> str:
        """The text of one parsed item: itself, or its text field. Words are joined by blanks."""
        if self.conversations:
            return exchange_of(item, where, column=self.column)
        if isinstance(item, str):
            return encodable(item)
        if not isinstance(item, dict):
            raise DataError(
                f"text or an object was expected, got {type(item).__name__}", where=where, hint='{"text": "..."}'
            )
        fields = cast("dict[str, Any]", item)
        wanted = (self.column, *COLUMNS)  # these may also be null, which is no text, or a list of words
        texts = [
            name
            for name, value in fields.items()
            if isinstance(value, str) or (name in wanted and (value is None or isinstance(value, list)))
        ]
        return encodable(joined(fields[self.choose(texts, where)], where))

    def choose(self, fields: list[str], where: str) -> str:
        """The field that holds the text, among those that hold any."""
        if self.column is not None:
            if self.column in fields:
                return self.column
            raise DataError(f"no text field {self.column!r}: {_listing(fields)}", where=where, hint="data.text_column")
        for name in COLUMNS:
            if name in fields:
                return name
        if len(fields) == 1:
            return fields[0]
        hint = "data.text_column=NAME"
        if any(name in fields for name in (*ANSWERS, "output")):
            hint += ", or data.documents=answers to learn the answers (family llada)"
        raise DataError(f"which field holds the text? {_listing(fields)}", where=where, hint=hint)


def joined(value: str | list[Any] | None, where: str) -> str:
    """Text as it is, no text as nothing, and words as one text."""
    if not isinstance(value, list):
        return value or ""
    for word in value:
        if not isinstance(word, str):
            raise DataError(
                f"a list of words was expected, it holds {type(word).__name__}",
                where=where,
                hint="data.text_column=NAME for another field",
            )
    return " ".join(value)


def kind_of(name: str) -> Kind | None:
    """The kind of file a name stands for: `a.jsonl.gz` is jsonl packed by gz. None: no kind of ours."""
    parts = PurePath(name).name.lower().split(".")[1:]
    if parts and parts[-1] in packings():
        return Kind(parts[-2], parts[-1]) if len(parts) > 1 and parts[-2] in kinds() else None
    return Kind(parts[-1]) if parts and parts[-1] in kinds() else None


@functools.cache
def kinds() -> tuple[str, ...]:
    """The modules that read."""
    return tuple(name for name in registry.names("formats") if hasattr(_module(name), "read"))


@functools.cache
def packings() -> tuple[str, ...]:
    """The modules that unpack."""
    return tuple(name for name in registry.names("formats") if hasattr(_module(name), "unpack"))


def suffixes() -> str:
    """What files may be called, for messages."""
    return f"{' '.join('.' + name for name in kinds())} (also with {' '.join('.' + name for name in packings())})"


def walk(file: BinaryIO, how: Reading) -> Iterator[tuple[int, str]]:
    """The documents of a file, each with the number of its record, from 1."""
    try:
        for number, document in enumerate(_records(file, how), 1):
            if document and not document.isspace():
                yield number, document
    except UnicodeDecodeError as error:
        raise not_utf8(error, how) from error


def _records(file: BinaryIO, how: Reading) -> Iterator[str]:
    if how.conversations and not getattr(_module(how.kind.name), "HAS_FIELDS", False):
        what = f"a .{how.kind.name} file holds no conversations"
        raise DataError(what, where=how.where, hint=f".jsonl, .json, .csv or .parquet with {FORMS}")
    packing = how.kind.packing
    with _module(packing).unpack(file, how.where) if packing else contextlib.nullcontext(file) as content:
        yield from _module(how.kind.name).read(content, how)


def not_utf8(error: UnicodeDecodeError, how: Reading, place: str = "") -> DataError:
    """Which byte it was, and what to do if it is the likely thing."""
    name = PurePath(how.where).name
    wide = not error.start and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    kind, likely = ("UTF-16", "") if wide else ("LATIN1", ", if it is Latin-1")
    return DataError(
        f"not UTF-8: byte 0x{error.object[error.start]:02x} ({error.reason})",
        where=how.where + place,
        hint="unpack it and convert the text to UTF-8"
        if how.kind.packing
        else f"iconv -f {kind} -t UTF-8 {quote(name)} > {quote('utf8-' + name)}{likely}",
    )


def damaged(error: Exception, where: str, packing: str) -> DataError:
    """An archive that is cut short, altered, or none at all."""
    said = str(error).rstrip(".") or type(error).__name__
    return DataError(f"a damaged or incomplete .{packing} file: {said}", where=where, hint="fetch or pack it again")


def is_of_content(error: OSError) -> bool:
    """Libraries say of bad content what the system says of a bad disk, but without a number."""
    return type(error) is OSError and error.errno is None


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def _listing(fields: list[str]) -> str:
    """Some of the fields: a file that only looks like one of ours can have a million, of any length."""
    if not fields:
        return "there is no text field"
    more = f" and {len(fields) - LISTED} more" if len(fields) > LISTED else ""
    return "text fields are " + ", ".join(name[:LISTED_CHARACTERS] for name in sorted(fields)[:LISTED]) + more
