"""Tensors in the files of a checkpoint: each whole in one file, or in pieces with a JSON index. Read when asked for.

The index, `model.safetensors.index.json`, says where the rows of a tensor lie:

    {"format": 1, "tensors": {NAME: {"shape": [512, 64], "dtype": "float32", "pieces": [
        {"file": "model-00001-of-00002.safetensors", "start": [0, 0], "shape": [256, 64]}, ...]}}}

Pieces are runs of whole rows, follow each other without gap or overlap, and bear the tensor's name in their file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import DataError
from lockstep.rundir import SAFE_NAME, read_json
from lockstep.runtime.parallel import is_sharded, local, offset


@dataclass(frozen=True)
class Piece:
    """A run of rows of one tensor, in one file."""

    file: str
    start: int
    rows: int


@dataclass(frozen=True)
class Entry:
    """One tensor and the pieces that make it up, in order."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class Stored(Mapping[str, Tensor]):
    """The tensors of one kind in a checkpoint folder, by name; `file` is the one that would hold them all."""

    def __init__(self, folder: Path, file: str) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        index = folder / index_of(file)
        self._entries = read_index(index) if index.is_file() else self._whole_entries(file)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, self._entries[name].shape[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """`count` rows of a tensor from row `start` on; of the files only these are read."""
        entry, stop = self._entries[name], start + count
        parts = [
            self._read(name, entry, piece, max(start, piece.start), min(stop, piece.start + piece.rows))
            for piece in entry.pieces
            if piece.start < stop and piece.start + piece.rows > start
        ]
        if not parts:
            return torch.empty(0, *entry.shape[1:])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str, entry: Entry, piece: Piece, start: int, stop: int) -> Tensor:
        try:
            stored = self._open(piece.file).get_slice(name)
            if tuple(stored.get_shape()) != (piece.rows, *entry.shape[1:]):
                raise DataError(f"{name} is {tuple(stored.get_shape())} there", where=str(self.folder / piece.file))
            return stored[start - piece.start : stop - piece.start]
        except (SafetensorError, OSError) as error:
            raise DataError(f"{name} cannot be read: {error}", where=str(self.folder / piece.file)) from None

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, framework="pt", device="cpu")
        return self._opened[file]

    def _whole_entries(self, file: str) -> dict[str, Entry]:
        try:
            opened = self._open(file)
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no dict
        except (SafetensorError, OSError) as error:
            raise DataError(f"not a safetensors file: {error}", where=str(self.folder / file)) from None
        return {name: Entry(shape, (Piece(file, 0, shape[0]),)) for name, shape in shapes.items()}


def index_of(file: str) -> str:
    return f"{file}.index.json"


def piece_file(file: str, number: int, count: int) -> str:
    """model.safetensors -> model-00002-of-00004.safetensors; numbers from 1."""
    stem, _, suffix = file.partition(".")
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def read_index(path: Path) -> dict[str, Entry]:
    """The index, if every tensor in it is whole."""
    try:
        listed = read_json(path)["tensors"]
        return {str(name): _entry(listed[name], f"{path}: {name}") for name in listed}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"unreadable index ({error!r})", where=str(path)) from None


def _entry(said: Mapping[str, Any], where: str) -> Entry:
    shape = tuple(int(size) for size in said["shape"])
    pieces: list[Piece] = []
    for piece in sorted(said["pieces"], key=lambda piece: piece["start"][0]):
        (start, *others), (rows, *width), file = piece["start"], piece["shape"], piece["file"]
        if not SAFE_NAME.fullmatch(file) or any(others) or tuple(width) != shape[1:]:
            raise DataError(f"a piece that is no run of rows: {str(piece)[:200]}", where=where)
        pieces.append(Piece(file, int(start), int(rows)))
    end = 0
    for piece in pieces:
        if piece.start != end:
            what = "overlap" if piece.start < end else "are missing"
            raise DataError(f"rows {min(piece.start, end)} to {max(piece.start, end)} {what}", where=where)
        end += piece.rows
    if end != shape[0]:
        raise DataError(f"{end} of {shape[0]} rows are there", where=where)
    return Entry(shape, tuple(pieces))


def write_pieces(tensors: Mapping[str, Tensor], path: Path, *, first: bool) -> dict[str, Any]:
    """This rank's parts into one file; what the index says of each. A tensor that is not cut is the first rank's."""
    parts = {
        name: tensor for name, tensor in tensors.items() if (is_sharded(tensor) or first) and local(tensor).numel()
    }
    save_file({name: local(tensor).detach().contiguous() for name, tensor in parts.items()}, path)
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "piece": {"file": path.name, "start": list(offset(tensor)), "shape": list(local(tensor).shape)},
        }
        for name, tensor in parts.items()
    }


def make_index(written: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The index of what all ranks have written."""
    tensors: dict[str, Any] = {}
    for parts in written:
        for name, part in parts.items():
            entry = tensors.setdefault(name, {"shape": part["shape"], "dtype": part["dtype"], "pieces": []})
            entry["pieces"].append(part["piece"])
    return {"format": 1, "tensors": tensors}
