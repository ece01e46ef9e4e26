"""What a run is made of, once assembled: the loop works with these and builds nothing itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch, Sink, StepRecord, Tokenizer
from lockstep.data.cache import Table
from lockstep.engine.checkpoint import Checkpointer
from lockstep.engine.council import Council
from lockstep.engine.epochs import Epochs
from lockstep.engine.progress import Progress
from lockstep.engine.replicas import Stamps
from lockstep.engine.saving import Saver
from lockstep.engine.step import Stepper
from lockstep.engine.unseen import Outcome
from lockstep.health.spikes import Spikes
from lockstep.runtime import faults
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.signals import StopRequest

KEPT_STEPS = 20


@dataclass
class Pace:
    """How fast this process trains; the first steps, in which caches warm up, do not count."""

    warm_up: int = 3
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recent: float = 0.0  # seconds of a step, smoothed
    own: float = 0.0  # seconds of this rank's own work in the last step, on the host
    data: float = 0.0  # seconds until the rows of the steps were there
    first_loss: float | None = None

    def note(self, loss: float, tokens: int, seconds: float, *, data: float = 0.0) -> None:
        """Take a step into account."""
        self.steps += 1
        self.recent = seconds if self.steps <= self.warm_up else 0.9 * self.recent + 0.1 * seconds
        if self.first_loss is None:
            self.first_loss = loss
        if self.steps == self.warm_up + 1:
            self.tokens, self.seconds, self.data = 0, 0.0, 0.0
        self.tokens += tokens
        self.seconds += seconds
        self.data += data


@dataclass
class Parts:
    """One worker's share of a run."""

    config: RunConfig
    device: torch.device
    stepper: Stepper
    progress: Progress
    batches: Iterator[list[Batch]]  # this rank's micro-batches of each step, from progress.step on
    validation: Sequence[Batch]  # the same batches at every validation
    saver: Saver
    sinks: Sequence[Sink]
    stop: StopRequest
    faults: faults.Plan
    about: Mapping[str, Any]  # what a checkpoint belongs to
    table: Table  # of the training rows
    flops_per_token: float
    peak_flops: float | None  # of all ranks together
    council: Council
    link: Marks = field(default_factory=NoMarks)
    saves: bool = True  # False: another worker keeps the records of this run
    stopping: bool = False  # after the step at hand: all ranks have agreed to
    trace_file: Path | None = None  # where to put a profile, if one was asked for
    last: StepRecord | None = None
    val_loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict[str, float])  # of the last validation
    outcome: Outcome | None = None  # of the last walks, if this is an agent
    epochs: Epochs | None = None  # None: training.max_steps decides
    until: int | None = None  # go no further, although the schedule does: for a proof
    epoch_began: float = 0.0  # by the clock that only runs forward, in this process
    vocabulary: Mapping[str, int] = field(default_factory=dict[str, int])  # token -> id, for who gets the results
    pace: Pace = field(default_factory=Pace)
    words: Tokenizer | None = None  # of rows that are text
    stamps: Stamps | None = None  # fingerprints of the steps, where they are wanted
    agreed_step: int = 0  # after so many steps all ranks were seen to have equal weights
    evidence_dir: Path | None = None  # this worker's folder in the run, for what is kept of a bad step
    spikes: Spikes = field(default_factory=Spikes)
    history: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))  # the last steps

    @property
    def checkpointer(self) -> Checkpointer:
        """Where this run saves."""
        return self.saver.checkpointer

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return self.table.rows

    @property
    def batch_rows(self) -> int:
        """Rows of the global batch."""
        options = self.config.training
        return self.council.group.world * options.batch_size * options.grad_accum_nums

    @property
    def known_val_loss(self) -> float | None:
        """Of the last validation, if it is a number."""
        return self.val_loss if self.val_loss is not None and math.isfinite(self.val_loss) else None

    def is_over(self, done: int) -> bool:
        """Whether `done` steps are all there are to make."""
        if self.until is not None and done >= self.until:
            return True
        return done >= self.config.training.max_steps

    @property
    def is_stale(self) -> bool:
        """Whether the loss has not improved for as long as the user would wait: such a run has ended early.

        A proof goes as far as it is told to: it begins where the run may already have been stale.
        """
        options = self.config.training
        return self.until is None and self.progress.is_stale(options.patience, min_delta=options.min_delta)

    @property
    def has_ended(self) -> bool:
        """Whether the run is over where it stands: one that goes on from there has nothing left to do."""
        return self.is_over(self.progress.step) or self.is_stale

    def ends_epoch(self, done: int) -> bool:
        """Whether an epoch ends with step number `done`; never where nobody counts in epochs."""
        return self.epochs is not None and self.epochs.ends(done)

    def steps_left(self, done: int) -> int:
        """Steps to make."""
        return max(0, self.config.training.max_steps - done)

    def must_stop(self) -> bool:
        """Whether to stop now: alone a signal is enough, several ranks go by what they have agreed on."""
        self.stopping = self.stopping or (self.council.alone and bool(self.stop))
        return self.stopping

    def has_saved(self) -> bool:
        """Whether the save on its way has ended; several ranks go by what they have agreed on."""
        saver, council = self.saver, self.council
        ended = saver.ended if council.alone else council.agreed.saves / council.group.world
        return saver.is_flying and ended == saver.begun

    def tell(self, kind: str, **fields: Any) -> None:
        """An event to every sink."""
        for sink in self.sinks:
            sink.event(kind, fields)
