"""Passes over the training rows, counted in steps: how many there will be, and after which step one ends.

A batch may straddle two epochs: an epoch ends with the step that takes its last row. Of a stream nobody knows how long
it is before its last chunk is there. Its steps are estimated from what is fixed before training begins, which decides
the learning rate; where it really ends is read off the chunks up to the last row that was taken, which every rank has
seen by then and which are the same for all: ranks, and runs that go on later, end at the same step.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lockstep.data.stream import StreamTable
from lockstep.engine.options import EpochTrainingOptions, TrainingOptions
from lockstep.runtime import env
from lockstep.runtime.grid import BLOCKS

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.data.cache import Table


logger = logging.getLogger(__name__)

THEIR_FLAGS = {"torchrun": "--nproc_per_node", "accelerate": "--num_processes", "slurm": "--ntasks"}
SHOWN_COUNTS = 4  # of workers that would fit, on either side of those there are


@dataclass(frozen=True)
class Epochs:
    """The epochs of one run."""

    asked: Fraction
    table: Table | StreamTable
    batch_rows: int
    limit: int  # training.max_steps: the run ends there at the latest
    expected_rows: int  # of an epoch; of a stream, an estimate

    @property
    def count(self) -> int:
        """How many there are, one that is not whole included."""
        return math.ceil(self.asked)

    def steps_for(self, rows: int) -> int:
        """Steps of the run if an epoch has so many rows."""
        return max(1, min(self.limit, math.ceil(self.asked * rows / self.batch_rows)))

    def rows_after(self, done: int) -> int | None:
        """Rows of an epoch, as far as whoever has made `done` steps can know it."""
        if not isinstance(self.table, StreamTable):
            return self.table.rows
        if self.asked < 1:  # it may be over before the end of the stream has come
            return self.expected_rows
        return self.table.epoch_rows_by(done * self.batch_rows - 1)

    def steps_after(self, done: int) -> int:
        """Steps of the run: the number is final once the rows are known."""
        return self.steps_for(self.rows_after(done) or self.expected_rows)

    def epoch_steps_after(self, done: int) -> float:
        """Steps of one epoch, which need not be whole."""
        return (self.rows_after(done) or self.expected_rows) / self.batch_rows

    def finished_after(self, done: int) -> int:
        """How many whole epochs `done` steps make; the last batch may reach beyond the last one."""
        rows = self.rows_after(done)
        return min(self.count, done * self.batch_rows // rows) if rows else 0

    def is_over(self, done: int) -> bool:
        """Whether `done` steps are all."""
        rows = self.rows_after(done)
        return done >= (self.limit if rows is None else self.steps_for(rows))

    def ends(self, done: int) -> bool:
        """Whether step number `done` was the last one of an epoch."""
        return self.is_over(done) or self.finished_after(done) > self.finished_after(done - 1)


def count(config: RunConfig, table: Table | StreamTable, *, world: int) -> tuple[RunConfig, Epochs | None, list[str]]:
    """The configuration with its steps, now that the rows are known; the epochs, if it counts in them; what to tell."""
    options = config.training
    if not isinstance(options, EpochTrainingOptions):
        return config, None, []
    if not options.epochs:
        return _with_steps(config, options, options.max_steps), None, []
    rows = batch_rows(config, world)
    asked, limit = Fraction(repr(options.epochs)), options.max_steps
    epochs = Epochs(asked, table, rows, limit, expected_rows=expected_rows(config, table))
    steps, notices = epochs.steps_for(epochs.expected_rows), list[str]()
    if isinstance(table, StreamTable) and not table.is_short:
        notices.append(
            f"How long the stream is shows at its end: the learning rate is planned for about "
            f"{epochs.expected_rows:,} rows, {steps:,} steps"
        )
    uncapped = math.ceil(asked * epochs.expected_rows / rows)
    if uncapped > limit:
        words = "epoch does" if options.epochs == 1 else "epochs do"
        notices.append(f"training.max_steps {limit:,} ends the run before its {options.epochs:g} {words}")
    return _with_steps(config, options, steps), epochs, notices


def batch_rows(config: RunConfig, world: int) -> int:
    """Rows of the global batch."""
    return world * config.training.batch_size * config.training.grad_accum_nums


def with_batch(config: RunConfig, rows: int, *, world: int) -> RunConfig:
    """The same with a global batch of so many rows, on another number of workers: no micro-batch grows.

    Unchanged where they cannot be shared out equally. Of canonical sums a micro-batch is what is added, and stays.
    """
    own, most = rows // world, config.training.batch_size
    if rows == batch_rows(config, world) or rows % world or (config.system.canonical and own % most):
        return config
    micro = max(size for size in range(1, min(own, most) + 1) if own % size == 0)
    if micro < most and getattr(config.model, "dropout", 0):
        logger.warning(
            "Micro-batches of %d rows instead of %d: dropout is drawn for each of them, and will be another",
            micro,
            most,
        )
    logger.info(
        "The global batch stays %d rows: %d workers x batch_size %d x grad_accum_nums %d",
        rows,
        world,
        micro,
        own // micro,
    )
    training = config.training.model_copy(update={"batch_size": micro, "grad_accum_nums": own // micro})
    return config.model_copy(update={"training": training})


def counts_that_fit(rows: int, config: RunConfig, *, near: int) -> str:
    """The numbers of workers that can keep a global batch, those around `near`; as words for a hint."""
    share = config.training.batch_size if config.system.canonical else 1
    able = [count for count in range(1, rows + 1) if rows % (count * share) == 0]
    if config.system.canonical:
        able = [count for count in able if BLOCKS % count == 0]
    smaller, larger = [count for count in able if count < near], [count for count in able if count >= near]
    *first, last = map(str, smaller[-SHOWN_COUNTS:] + larger[:SHOWN_COUNTS]) if able else [""]
    if not last:
        return f"workers x batch_size x grad_accum_nums must be {rows}"
    flag = "--gpus" if env.launcher_pid() else THEIR_FLAGS.get(env.detect().launcher, "--gpus")
    return f"{flag} {', '.join(first)}{' or ' * bool(first)}{last}"


def _with_steps(config: RunConfig, options: EpochTrainingOptions, steps: int) -> RunConfig:
    changes: dict[str, int] = {"max_steps": steps}
    if options.warmup_ratio:
        changes["warmup_steps"] = round(options.warmup_ratio * steps)
    training: TrainingOptions = options.model_copy(update=changes)
    return config.model_copy(update={"training": training})


def expected_rows(config: RunConfig, table: Table | StreamTable) -> int:
    """Rows of an epoch. Of a stream: as many for each document to come as for those of its beginning."""
    if not isinstance(table, StreamTable) or table.is_short:
        return table.rows
    head, data = table.head, config.data
    trained = max(1.0, head.documents * (1 - data.validation_fraction))  # of the head only a part is trained on
    to_come = max(0, data.max_train_samples - head.documents)
    return max(1, head.rows + round(to_come * head.rows / trained))
