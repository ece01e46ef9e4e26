"""From the table to the batches of a step, ahead of time, always in the same order.

Threads and not processes: rows are memory-mapped and a collate is a gather, so there is nothing to copy between
processes and nobody who could be left behind. Worker w of N makes the steps w, w + N, w + 2N, ... into a queue of its
own, and the reader takes from the queues in turn: batches are the same for any number of workers and any first step.

The global batch of a step is world * micro_batches * micro_rows rows. Rank r makes its micro-batches r * micro_batches
and following: how many ranks there are decides who makes a micro-batch, never what is in it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lockstep.contracts import Batch, Draw, Objective, Rows

if TYPE_CHECKING:
    from types import TracebackType

    from lockstep.contracts import Array
    from lockstep.data.cache import Table
    from lockstep.data.stream import StreamTable

WINDOW_BYTES = 1 << 19  # of rows on disk: what is fetched together should still lie near when it is used


class Window:
    """The rows of some steps of one thread, fetched together: among many a row costs half as much.

    A table that still grows is read step by step: nobody waits for rows that are not needed yet.
    """

    def __init__(self, table: Table | StreamTable, seed: int, *, slots: slice, batch_rows: int, stride: int) -> None:
        """`slots` of each global batch of `batch_rows` rows, in every `stride`-th step."""
        self.table, self.order = table, table.order(seed)
        self._slots, self._batch_rows, self._stride = slots, batch_rows, stride
        self._rows = slots.stop - slots.start
        self._count = max(1, WINDOW_BYTES // (self._rows * table.row_bytes)) if table.is_whole else 1
        self._first, self._after = 0, 0  # steps that were fetched
        self._ids = self._epochs = np.empty(0, np.int64)
        self._columns: Mapping[str, Array] = {}

    def at(self, step: int) -> tuple[Array, Array, dict[str, Array]]:
        """Row ids, epochs and columns of a step."""
        if not self._first <= step < self._after:
            self._fetch(step)
        first = (step - self._first) // self._stride * self._rows
        part = slice(first, first + self._rows)
        return self._ids[part], self._epochs[part], {name: column[part] for name, column in self._columns.items()}

    def _fetch(self, step: int) -> None:
        rows, shape = self._batch_rows, (self._count, self._stride, self._batch_rows)
        if self._count == 1:
            ids, epochs = self.order.at(step * rows + self._slots.start, self._rows)
        else:
            everything = self.order.at(step * rows, self._count * self._stride * rows)
            ids, epochs = (each.reshape(shape)[:, 0, self._slots].reshape(-1) for each in everything)
        self._columns = self.table.take(ids)
        self._ids, self._epochs = ids, epochs
        self._first, self._after = step, step + self._count * self._stride


@dataclass
class Loader:
    """An endless iterator over the micro-batches of each step, from `start_step` on. Close it when done."""

    table: Table | StreamTable
    objective: Objective
    seed: int = field(kw_only=True)
    micro_rows: int = field(kw_only=True)
    micro_batches: int = field(kw_only=True)  # of one rank
    rank: int = field(default=0, kw_only=True)
    world: int = field(default=1, kw_only=True)
    start_step: int = field(default=0, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    prefetch: int = field(default=2, kw_only=True)  # steps each worker keeps ready
    pin: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._step = self.start_step
        own = self.micro_rows * self.micro_batches
        self.batch_rows = self.world * own  # of the global batch of a step
        self._slots = self.rank * own + np.arange(own)
        self._parts = [slice(first, first + self.micro_rows) for first in range(0, own, self.micro_rows)]
        self._window = self._new_window()
        self._stop = threading.Event()
        self._ready = [queue.Queue[list[Batch] | BaseException](self.prefetch) for _ in range(self.workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"loader-{index}", daemon=True)
            for index in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next step. What went wrong for a step is raised at that step."""
        assert not self._stop.is_set(), "the loader is closed"
        if not self.workers:
            made = self._attempt(self._window, self._step)
        else:
            made = self._ready[(self._step - self.start_step) % self.workers].get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        self._step += 1
        return made

    def batches(self, window: Window, step: int) -> list[Batch]:
        """This rank's micro-batches of one step: micro-batch m of all holds slots m * micro_rows and following."""
        draw = Draw(self.seed, step, self.batch_rows)
        ids, epochs, columns = window.at(step)
        if self.micro_batches == 1:
            made = [self.objective.collate(Rows(ids, epochs, self._slots, columns), draw)]
        else:
            made = [self._micro_batch(part, ids, epochs, columns, draw) for part in self._parts]
        return [batch.pin() for batch in made] if self.pin else made

    def _micro_batch(self, part: slice, ids: Array, epochs: Array, columns: Mapping[str, Array], draw: Draw) -> Batch:
        taken = {name: column[part] for name, column in columns.items()}
        return self.objective.collate(Rows(ids[part], epochs[part], self._slots[part], taken), draw)

    def close(self) -> None:
        """End the workers. Each puts at most one more step, for which emptying its queue makes room."""
        self._stop.set()
        self.table.close()  # who waits for rows waits no more
        for ready in self._ready:
            while not ready.empty():
                ready.get_nowait()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _new_window(self) -> Window:
        """For one thread."""
        own = self.micro_rows * self.micro_batches
        slots, stride = slice(self.rank * own, (self.rank + 1) * own), max(1, self.workers)
        return Window(self.table, self.seed, slots=slots, batch_rows=self.batch_rows, stride=stride)

    def _attempt(self, window: Window, step: int) -> list[Batch] | BaseException:
        """A step, or why there is none."""
        try:
            return self.batches(window, step)
        except BaseException as error:
            error.add_note(f"while preparing the batch of step {step}")
            return error

    def _work(self, index: int) -> None:
        """One worker: every `workers`-th step until the loader is closed or a step fails."""
        window, step = self._new_window(), self.start_step + index
        while not self._stop.is_set():
            made = self._attempt(window, step)
            self._ready[index].put(made)
            if isinstance(made, BaseException):
                return
            step += self.workers


def validation_batches(
    table: Table, objective: Objective, *, micro_rows: int, rows: int, seed: int, share: tuple[int, int] = (0, 1)
) -> list[Batch]:
    """The first `rows` rows of a table, or all, in table order: one batch that is the same however it is cut.

    `share` is (rank, world): rank r has the cuts r, r + world, ... All ranks have equally many, since in some modes a
    forward pass needs everyone: where there is no cut left stands a real batch that counts for nothing (rows = 0).
    """
    total, (rank, world) = min(rows, table.rows), share
    made: list[Batch] = []
    for first in range(0, total, world * micro_rows):
        start = first + rank * micro_rows
        place = start if start < total else 0
        ids = np.arange(place, min(place + micro_rows, total))
        part = Rows(ids, epochs=np.zeros_like(ids), slots=ids, columns=table.take(ids))
        batch = objective.collate(part, Draw(seed, step=0, batch_rows=total))
        nothing = dict.fromkeys(batch.weights, 0)
        made.append(batch if start < total else Batch(batch.tensors, nothing, rows=0, tokens=0))
    return made
