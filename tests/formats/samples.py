"""A file of every kind with what it holds, every packing, and file objects that are worse than a file on a disk."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

from lockstep import formats

TEXTS = [
    "One.",
    "Two, with a comma.",
    "",
    "  \n ",
    'Three "quoted"\nover two lines.',
    "Vier: äöü €",
    "\u2028 separated \x85 oddly",
    "Sieben 😀",
    "",
]
TEXTS += [f"Text {number} of many. " * (number % 7 + 1) for number in range(40)]
HOLDS = [text for text in TEXTS if text.strip()]
CUT_CHARACTERS = 32


def txt() -> bytes:
    return "\n\n".join(HOLDS).encode()


def jsonl() -> bytes:
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=len(text) % 2 == 0) for text in TEXTS]
    return "\n".join([lines[0], "", " ", *lines[1:]]).encode()


def json_list() -> bytes:
    return json.dumps([{"text": text} if len(text) % 2 else text for text in TEXTS], indent=1).encode()


def csv_rows() -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["id", "text"], *enumerate(TEXTS)])
    return out.getvalue().replace('7,"', '\r\n7,"').encode()


def parquet(rows_of_group: int = 10) -> bytes:
    import pyarrow
    from pyarrow import parquet as library

    out = io.BytesIO()
    texts: list[str | None] = [text or None for text in TEXTS]
    library.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), out, row_group_size=rows_of_group)
    return out.getvalue()


SAMPLES: dict[str, Callable[[], bytes]] = {
    "txt": txt,
    "jsonl": jsonl,
    "json": json_list,
    "csv": csv_rows,
    "parquet": parquet,
}


def pack(content: bytes, packing: str) -> bytes:
    if packing == "zst":
        import pyarrow

        out = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(out, "zstd") as packed:
            packed.write(content)
        return out.getvalue().to_pybytes()
    ways: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        "gz": lambda raw: gzip.compress(raw, mtime=0),
    }
    return ways[packing](content)


def how(kind: str, packing: str = "", **named: Any) -> formats.Reading:
    name = f"a.{kind}.{packing}" if packing else f"a.{kind}"
    found = formats.kind_of(name)
    assert found == formats.Kind(kind, packing)
    return formats.Reading(found, name, **{"cut_characters": CUT_CHARACTERS, **named})


def walked(content: bytes, reading: formats.Reading) -> list[tuple[int, Any]]:
    """(number of the record, document)."""
    return [*formats.walk(io.BytesIO(content), reading)]


def documents(content: bytes, kind: str, packing: str = "", **named: Any) -> list[Any]:
    return [document for _, document in walked(content, how(kind, packing, **named))]


class Meagre(io.RawIOBase):
    """A file object without a descriptor, a path or a buffer; counts what is asked of it."""

    def __init__(self, content: bytes, most: int = 1 << 30) -> None:
        self._file, self._most = io.BytesIO(content), most
        self.bytes = 0
        self.touched: list[tuple[int, int]] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        at = self._file.tell()
        block = self._file.read(self._most if size < 0 else min(size, self._most))
        self.bytes += len(block)
        self.touched.append((at, len(block)))
        return block
