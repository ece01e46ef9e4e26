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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lockstep.contracts import Batch, Draw, Objective, Rows
from lockstep.data.order import Order

if TYPE_CHECKING:
    from types import TracebackType

    from lockstep.contracts import Array
    from lockstep.data.cache import Table

WINDOW_BYTES = 1 << 19  # of rows on disk: what is fetched together should still lie near when it is used


class Window:
    """Some steps of one thread, their rows fetched together: among many a row costs half as much.

    What an objective makes of rows without drawing anything is made for all these steps at once.
    """

    def __init__(self, loader: Loader) -> None:
        self._objective, self._table, self._seed = loader.objective, loader.table, loader.seed
        self._order = Order(self._table.rows, self._seed)
        self._parts, self._micro_rows = loader.micro_batches, loader.micro_rows
        self._rows = self._parts * self._micro_rows  # of this rank in a step
        self._batch_rows, self._stride = loader.batch_rows, max(1, loader.workers)
        self._slots = slice(loader.rank * self._rows, (loader.rank + 1) * self._rows)  # of the global batch
        self._numbers = np.arange(self._slots.start, self._slots.stop)
        self._count = max(1, WINDOW_BYTES // (self._rows * self._table.row_bytes))
        self._steps = loader.steps
        self._many = _collate_many(self._objective)
        self._first, self._after = 0, 0  # steps at hand
        self._ids = self._epochs = np.empty(0, np.int64)
        self._columns: Mapping[str, Array] = {}
        self._whole_columns: Collection[str] = getattr(self._objective, "whole_columns", ())
        self._whole: Mapping[str, Array] = {}  # of all rows of the global batches at hand
        self._made: list[list[Batch]] = []  # of each step

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of one step: micro-batch m of all holds slots m * micro_rows and following."""
        if not self._first <= step < self._after:
            self._fetch(step)
        place = (step - self._first) // self._stride
        if self._many:
            return self._made[place]
        together = slice(place * self._batch_rows, (place + 1) * self._batch_rows)
        whole = {name: column[together] for name, column in self._whole.items()}
        draw = Draw(self._seed, step, self._batch_rows, self._steps, whole)
        firsts = range(0, self._rows, self._micro_rows)
        return [self._objective.collate(self._part(place * self._rows, first), draw) for first in firsts]

    def _part(self, step: int, first: int) -> Rows:
        """The rows of one micro-batch."""
        rows = slice(step + first, step + first + self._micro_rows)
        columns = {name: column[rows] for name, column in self._columns.items()}
        return Rows(self._ids[rows], self._epochs[rows], self._numbers[first : first + self._micro_rows], columns)

    def _fetch(self, step: int) -> None:
        rows = self._batch_rows
        if self._count == 1 and not self._whole_columns:
            ids, epochs = self._order.at(step * rows + self._slots.start, self._rows)
        else:
            shape = (self._count, self._stride, rows)
            everyone = [
                each.reshape(shape)[:, 0] for each in self._order.at(step * rows, self._count * self._stride * rows)
            ]
            ids, epochs = (each[:, self._slots].reshape(-1) for each in everyone)
            if self._whole_columns:
                self._whole = self._table.take(everyone[0].reshape(-1), only=self._whole_columns)
        columns = self._table.take(ids, as_stored=self._many is not None)
        if self._many:
            made, parts = self._many(columns, self._count * self._parts), self._parts
            self._made = [made[first : first + parts] for first in range(0, len(made), parts)]
        else:
            self._ids, self._epochs, self._columns = ids, epochs, columns
        self._first, self._after = step, step + self._count * self._stride


def _collate_many(objective: Objective) -> Callable[[Mapping[str, Array], int], list[Batch]] | None:
    """The objective's `collate_many`, unless a subclass has another idea of what `collate` is."""
    owner = next((kind for kind in type(objective).__mro__ if "collate" in vars(kind)), type(objective))
    return getattr(objective, "collate_many", None) if "collate_many" in vars(owner) else None


def own_choice(objective: Objective, *, on_gpu: bool) -> int:
    """How many workers where nobody has said: one, but none where a batch is sooner cut than handed over.

    That is on the CPU, which has to do it anyway, from rows that stay as they are.
    """
    return 0 if not on_gpu and _collate_many(objective) else 1


@dataclass
class Loader:
    """An endless iterator over the micro-batches of each step, from `start_step` on. Close it when done."""

    table: Table
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
    steps: int = field(default=0, kw_only=True)  # of the whole run, for objectives that change on the way

    def __post_init__(self) -> None:
        self._step = self.start_step
        self.batch_rows = self.world * self.micro_batches * self.micro_rows  # of the global batch of a step
        self._window = Window(self)
        self._stop, self._closed = threading.Event(), False
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
        assert not self._closed, "the loader is closed"
        step = self._step
        made = self._ready[(step - self.start_step) % self.workers].get() if self.workers else self._attempt(step)
        if isinstance(made, BaseException):
            self.close()
            raise made
        self._step = step + 1
        return made

    def close(self) -> None:
        """End the workers. Each puts at most one more step, for which emptying its queue makes room."""
        self._closed = True
        self._stop.set()
        for ready in self._ready:
            while not ready.empty():
                ready.get_nowait()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _attempt(self, step: int, window: Window | None = None) -> list[Batch] | BaseException:
        """A step, or why there is none."""
        try:
            made = (window or self._window).batches(step)
            return [batch.pin() for batch in made] if self.pin else made
        except BaseException as error:
            error.add_note(f"while preparing the batch of step {step}")
            return error

    def _work(self, index: int) -> None:
        """One worker: every `workers`-th step until the loader is closed or a step fails."""
        window, step = Window(self), self.start_step + index
        while not self._stop.is_set():
            made = self._attempt(step, window)
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
    whole_columns: Collection[str] = getattr(objective, "whole_columns", ())
    whole = table.take(np.arange(total), only=whole_columns) if whole_columns else {}
    for first in range(0, total, world * micro_rows):
        start = first + rank * micro_rows
        place = start if start < total else 0
        ids = np.arange(place, min(place + micro_rows, total))
        part = Rows(ids, epochs=np.zeros_like(ids), slots=ids, columns=table.take(ids))
        batch = objective.collate(part, Draw(seed, step=0, batch_rows=total, whole=whole))
        batch = batch._replace(is_short=len(ids) < min(micro_rows, total))
        nothing = dict.fromkeys(batch.weights, 0)
        made.append(batch if start < total else Batch(batch.tensors, nothing, rows=0, tokens=0))
    return made
