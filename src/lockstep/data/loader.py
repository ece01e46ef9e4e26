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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lockstep.contracts import Batch, Draw, Objective, Rows

if TYPE_CHECKING:
    from types import TracebackType

    from lockstep.data.cache import Table
    from lockstep.data.order import Order
    from lockstep.data.stream import StreamOrder, StreamTable


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
        self._order = self.table.order(self.seed)
        own = self.micro_rows * self.micro_batches
        self.batch_rows = self.world * own  # of the global batch of a step
        self._slots = (self.rank * own + np.arange(own)).reshape(self.micro_batches, self.micro_rows)
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
            made = self._attempt(self._order, self._step)
        else:
            made = self._ready[(self._step - self.start_step) % self.workers].get()
        if isinstance(made, BaseException):
            self.close()
            raise made
        self._step += 1
        return made

    def batches(self, order: Order | StreamOrder, step: int) -> list[Batch]:
        """This rank's micro-batches of one step: micro-batch m of all holds slots m * micro_rows and following."""
        ids, epochs = order.at(step * self.batch_rows + int(self._slots[0, 0]), self._slots.size)
        draw = Draw(self.seed, step, self.batch_rows)
        made: list[Batch] = []
        for index, slots in enumerate(self._slots):
            part = slice(index * self.micro_rows, (index + 1) * self.micro_rows)
            rows = Rows(ids[part], epochs[part], slots, self.table.take(ids[part]))
            batch = self.objective.collate(rows, draw)
            made.append(batch.pin() if self.pin else batch)
        return made

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

    def _attempt(self, order: Order | StreamOrder, step: int) -> list[Batch] | BaseException:
        """A step, or why there is none."""
        try:
            return self.batches(order, step)
        except BaseException as error:
            error.add_note(f"while preparing the batch of step {step}")
            return error

    def _work(self, index: int) -> None:
        """One worker: every `workers`-th step until the loader is closed or a step fails."""
        order = self.table.order(self.seed)  # of its own: an Order keeps a window
        step = self.start_step + index
        while not self._stop.is_set():
            made = self._attempt(order, step)
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
