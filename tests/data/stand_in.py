"""An objective and a table small enough to see through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.contracts import Batch, Draw, Rows
from lockstep.data.cache import Table, write_table


class Plain:
    """Rows of context_length + 1 tokens without overlap; a batch shows all that a collate was given."""

    columns: Mapping[str, str] = {"tokens": "int32"}
    terms: Mapping[str, float] = {"loss": 1.0}

    def pack(
        self, documents: Iterable[np.ndarray[Any, Any]], *, context_length: int, separator: int
    ) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        stream = np.concatenate([np.append(ids, separator) for ids in documents] or [np.empty(0)]).astype(np.int32)
        width = context_length + 1
        count = len(stream) // width
        if count:
            yield {"tokens": stream[: count * width].reshape(count, width)}

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        shown = {"ids": rows.ids, "epochs": rows.epochs, "slots": rows.slots, "tokens": rows.columns["tokens"]}
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in shown.items()}
        tensors["draw"] = torch.tensor([draw.seed, draw.step, draw.batch_rows])
        return Batch(tensors, {"loss": rows.columns["tokens"].size}, len(rows.ids), rows.columns["tokens"].size)

    def loss(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        raise AssertionError("preparing and loading rows needs no model")

    def evaluate(self, model: Any, batch: Batch) -> dict[str, Any]:
        raise AssertionError("preparing and loading rows needs no model")

    def sample(self, model: Any, prompt: list[int], options: Any) -> list[int]:
        raise AssertionError("preparing and loading rows needs no model")


def table(folder: Path, rows: int, *, width: int = 5) -> Table:
    """A table whose row i holds 10 * i, 10 * i + 1, ..."""
    tokens = (10 * np.arange(rows)[:, None] + np.arange(width)).astype(np.int32)
    write_table(folder, [{"tokens": tokens}], columns=Plain.columns, stored={"tokens": "uint16"})
    return Table(folder)
