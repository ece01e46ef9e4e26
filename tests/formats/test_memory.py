"""Files of any size take little memory: in small by counting what Python holds, and (slow) by 1 GB on the disk."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from lockstep import formats
from tests.formats.samples import how

SENTENCE = "The quick brown fox jumps over the lazy dog. " * 10
RECORDS = {
    "txt": ("", SENTENCE + "\n\n", ""),
    "jsonl": ("", json.dumps({"id": 1, "text": SENTENCE}) + "\n", ""),
    "json": ("", json.dumps({"id": 1, "text": SENTENCE}) + "\n", ""),  # lines under this name, as of c4
    "csv": ("id,text\n", f'1,"{SENTENCE}\n"\n', ""),
}


def content(kind: str, size: int) -> Iterator[bytes]:
    """About so many bytes of a kind of file, in pieces."""
    opening, record, ending = (part.encode() for part in RECORDS[kind])
    many = record * (1 + (1 << 16) // len(record))
    yield opening
    yield from itertools.repeat(many, max(1, size // len(many)))
    yield ending


def packed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(1, wbits=31)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


class Made(io.RawIOBase):
    """A file that is made as it is read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = piece
        part, self._rest = self._rest[:size], self._rest[size:]
        return part


def peak_bytes(documents: Iterator[object]) -> int:
    """The most that Python held at a time while going through."""
    tracemalloc.start()
    try:
        assert sum(1 for _ in documents) > 3
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "packing", "size"),
    [
        *((kind, "", 1 << 23) for kind in RECORDS),
        ("jsonl", "gz", 1 << 23),
        *(pytest.param(kind, packing, 1 << 24, marks=pytest.mark.slow) for kind in RECORDS for packing in ("", "gz")),
    ],
)
def test_memory_does_not_grow_with_the_file(kind: str, packing: str, size: int) -> None:
    reading = how(kind, packing, cut_characters=size // 16)
    formats.walk(io.BytesIO(), reading)

    def peak(size: int) -> int:
        pieces = content(kind, size)
        file = Made(packed(pieces) if packing else pieces)
        return peak_bytes(formats.walk(cast("BinaryIO", file), reading))

    small, large = peak(size // 4), peak(size)
    assert large < small + (1 << 20)
    assert large < 1 << 23
    if not packing and kind == "jsonl":  # a list of all of them would be seen
        file = Made(content(kind, size))
        kept: list[object] = []
        walked = (kept.append(one) or one for one in formats.walk(cast("BinaryIO", file), reading))
        assert peak_bytes(walked) > max(size // 2, small + (1 << 20))


READ_ALONE = """
import sys
from lockstep.sources.text import TextSource
characters = sum(len(document) for document in TextSource(sys.argv[1]).documents())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(characters, status["VmHWM"].split()[0])
"""
GIGABYTE = 1 << 30


def write_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetWriter(path, pyarrow.schema({"text": pyarrow.string()}), compression="none") as writer:
        part = pyarrow.table({"text": [f"{number} {SENTENCE}" for number in range(100_000)]})
        for _ in range(GIGABYTE // (100_000 * len(SENTENCE))):
            writer.write_table(part)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_a_gigabyte_is_read_in_flat_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kind = name.split(".")[1]
    if kind == "parquet":
        write_parquet(path)
    else:
        pieces = content(kind, GIGABYTE)
        with path.open("wb") as file:
            file.writelines(packed(pieces) if name.endswith(".gz") else pieces)
    done = subprocess.run(
        [sys.executable, "-c", READ_ALONE, str(path)], capture_output=True, text=True, check=True, timeout=1000
    )
    path.unlink()
    characters, peak_kilobytes = map(int, done.stdout.split())
    assert characters > 0.9 * GIGABYTE
    assert peak_kilobytes < 300 << 10, f"{peak_kilobytes >> 10} MiB"
