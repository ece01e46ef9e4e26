"""Passes over the training rows, counted in steps: how many there will be, and after which step one ends.

A batch may straddle two epochs: an epoch ends with the step that takes its last row.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lockstep.engine.options import EpochTrainingOptions, TrainingOptions

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.data.cache import Table


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Epochs:
    """The epochs of one run."""

    asked: Fraction
    rows: int  # of one epoch
    batch_rows: int
    limit: int  # training.max_steps: the run ends there at the latest

    @property
    def count(self) -> int:
        """How many there are, one that is not whole included."""
        return math.ceil(self.asked)

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return max(1, min(self.limit, self.uncapped_steps))

    @property
    def uncapped_steps(self) -> int:
        """Steps of the run if nothing ends it before its epochs do."""
        return math.ceil(self.asked * self.rows / self.batch_rows)

    @property
    def epoch_steps(self) -> float:
        """Steps of one epoch, which need not be whole."""
        return self.rows / self.batch_rows

    def finished_after(self, done: int) -> int:
        """How many whole epochs `done` steps make; the last batch may reach beyond the last one."""
        return min(self.count, done * self.batch_rows // self.rows)

    def ends(self, done: int) -> bool:
        """Whether step number `done` was the last one of an epoch."""
        return done >= self.steps or self.finished_after(done) > self.finished_after(done - 1)


def count(config: RunConfig, table: Table, *, world: int) -> tuple[RunConfig, Epochs | None, list[str]]:
    """The configuration with its steps, now that the rows are known; the epochs, if it counts in them; what to tell."""
    options = config.training
    if not isinstance(options, EpochTrainingOptions):
        return config, None, []
    if not options.epochs:
        return _with_steps(config, options, options.max_steps), None, []
    limit = options.max_steps
    epochs = Epochs(Fraction(repr(options.epochs)), table.rows, batch_rows(config, world), limit)
    notices: list[str] = []
    if epochs.uncapped_steps > limit:
        words = "epoch does" if options.epochs == 1 else "epochs do"
        notices.append(f"training.max_steps {limit:,} ends the run before its {options.epochs:g} {words}")
    return _with_steps(config, options, epochs.steps), epochs, notices


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


def _with_steps(config: RunConfig, options: EpochTrainingOptions, steps: int) -> RunConfig:
    changes: dict[str, int] = {"max_steps": steps}
    if options.warmup_ratio:
        changes["warmup_steps"] = round(options.warmup_ratio * steps)
    training: TrainingOptions = options.model_copy(update=changes)
    return config.model_copy(update={"training": training})
