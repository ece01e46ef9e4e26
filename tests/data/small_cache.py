"""A cache small enough to look at whole. Without torch, so that processes of a test start quickly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lockstep.data.cache import key_of, write_table

KEY = key_of({"a": 1})
ROWS = 400
COLUMNS = {"tokens": "int32"}


def fill(folder: Path) -> None:
    """The builder of it."""
    for name in ("train", "validation"):
        tokens = np.arange(ROWS * 33, dtype=np.int32).reshape(ROWS, 33)
        write_table(folder / name, [{"tokens": tokens}], columns=COLUMNS, stored={"tokens": "uint16"})
    (folder / "meta.json").write_text(json.dumps({"source": "numbers"}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def never(folder: Path) -> None:
    """The builder where nothing is to be built."""
    raise AssertionError("must not be built")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
