"""A stream small enough to look at whole, chunk by chunk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lockstep.data.cache import write_table
from lockstep.data.stream import DESCRIPTION, ROWS, Chunk, chunk_folder
from lockstep.rundir import publishing, write_json
from tests.data.stand_in import Plain

SIZES = (7, 5, 0, 30, 1, 11)  # rows of each chunk; one has none


def rows_of(number: int, sizes: tuple[int, ...] = SIZES, *, width: int = 5) -> np.ndarray:
    """Row i of the whole stream holds 10 * i, 10 * i + 1, ..."""
    first = sum(sizes[:number])
    return (10 * np.arange(first, first + sizes[number])[:, None] + np.arange(width)).astype(np.int32)


def described(number: int, sizes: tuple[int, ...] = SIZES) -> Chunk:
    last = number == len(sizes) - 1
    return Chunk(number, (0, number), (0, number + 1), number + 1, rows=sizes[number], tokens=0, last=last)


def begin(folder: Path, sizes: tuple[int, ...] = SIZES) -> Path:
    """The cache of the head: chunk 0."""
    base = folder / "base"
    base.mkdir(parents=True)
    write_table(base / "train", [{"tokens": rows_of(0, sizes)}], columns=Plain.columns, stored={"tokens": "uint16"})
    (base / "meta.json").write_text(json.dumps({"stream": {"head": described(0, sizes).to_json()}}), encoding="utf-8")
    return base


def add(base: Path, number: int, sizes: tuple[int, ...] = SIZES) -> Path:
    """One more chunk."""
    blocks = [{"tokens": rows_of(number, sizes)}] if sizes[number] else []
    with publishing(chunk_folder(base, number)) as folder:
        write_table(folder / ROWS, blocks, columns=Plain.columns, stored={"tokens": "uint16"})
        write_json(folder / DESCRIPTION, described(number, sizes).to_json())
    return chunk_folder(base, number)


def whole(folder: Path, sizes: tuple[int, ...] = SIZES) -> Path:
    base = begin(folder, sizes)
    for number in range(1, len(sizes)):
        add(base, number, sizes)
    return base
