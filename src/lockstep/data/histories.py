"""Histories of source learners: which files they lie in, and as rows which of them belong to a split. Torch-free.

A file of histories in the documented form has, beside it, the same as a table (.npy) and a note (.json) of what both
were when the one was made from the other. Whoever trains opens the table, if the note still holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.data.builders import read_json
from lockstep.data.cache import Table
from lockstep.rundir import write_json
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.data.options import HistoryOptions

FOLDER = "datasets"  # where histories lie, unless data.data_path says otherwise
FORMAT = 1  # of the note


def stem(world: str, learner: str, seed: int) -> str:
    """The documented name, without its suffix."""
    return f"history_{world}_{learner}_alg-seed{seed}"


def file_of(options: HistoryOptions, suffix: str) -> Path:
    """Where the histories of these options lie: hdf5, npy, json, png."""
    return Path(options.data_path or FOLDER) / f"{stem(options.env, options.alg, options.alg_seed)}.{suffix}"


@dataclass(frozen=True)
class Note:
    """What a table was made from, and what is in it."""

    settings: dict[str, Any]  # with which the histories were collected; empty: by another program
    world: dict[str, Any]  # whose rules they were found to follow
    tasks: tuple[int, ...]  # of which there are histories, in the order of the table


def write_note(file: Path, note: Note) -> None:
    """Once the file of histories and its table are both complete."""
    stamps = {"hdf5": _stamp(file), "npy": _stamp(file.with_suffix(".npy"))}
    about = {"format": FORMAT, "settings": note.settings, "world": note.world, "tasks": list(note.tasks)}
    write_json(file.with_suffix(".json"), about | stamps)


def read_note(file: Path) -> Note | None:
    """The note of a file of histories; None where there is none, or where one of the two files has changed since."""
    found = read_json(file.with_suffix(".json"))
    try:
        stamps = {"hdf5": _stamp(file), "npy": _stamp(file.with_suffix(".npy"))}
        if found.get("format") != FORMAT or any(found.get(name) != stamp for name, stamp in stamps.items()):
            return None
        return Note(dict(found["settings"]), dict(found["world"]), tuple(int(task) for task in found["tasks"]))
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def is_ready(options: HistoryOptions) -> bool:
    """Whether the histories can be opened as they are: nothing is to be collected or read in first."""
    return read_note(file_of(options, "hdf5")) is not None


class HistoryTable(Table):
    """The numbers of the histories of one split: row -> place in the array of all of them."""

    def __init__(self, places: Array) -> None:
        numbers = np.ascontiguousarray(places.astype(np.int32)[:, None])
        self.rows, self.dtypes = len(numbers), {"histories": "int32"}
        self.columns = self._plain = {"histories": numbers}
