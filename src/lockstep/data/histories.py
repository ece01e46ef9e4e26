"""Histories of source learners: which file they lie in, and as rows which of them belong to a split. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data.cache import Table
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.data.options import HistoryOptions

FOLDER = "datasets"  # where histories lie, unless data.data_path says otherwise


def stem(world: str, learner: str, seed: int) -> str:
    """The documented name, without its suffix."""
    return f"history_{world}_{learner}_alg-seed{seed}"


def file_of(options: HistoryOptions) -> Path:
    """Where the histories of these options lie."""
    return Path(options.data_path or FOLDER) / f"{stem(options.env, options.alg, options.alg_seed)}.hdf5"


class HistoryTable(Table):
    """The numbers of the histories of one split: row -> place in the array of all of them."""

    def __init__(self, places: Array) -> None:
        numbers = np.ascontiguousarray(places.astype(np.int32)[:, None])
        self.rows, self.dtypes = len(numbers), {"histories": "int32"}
        self.columns = self._plain = {"histories": numbers}
