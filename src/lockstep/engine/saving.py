"""Saves that training does not wait for: a thread writes a copy of the state while the next steps are made.

One save at a time. Several ranks write together, each by a thread of its own, in a group of their own, so that nothing
they exchange meets the exchanges of training; all hear the same outcome. It is told, or raised, by the main thread
after a step that all ranks have agreed on (council.py): a save that has failed never passes for a good one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.engine.checkpoint import MODEL, OPTIMIZER, Checkpointer, State
from lockstep.engine.shards import Stored
from lockstep.engine.snapshot import Snapshot, needed_bytes
from lockstep.errors import LockstepError
from lockstep.runtime.marks import Marks
from lockstep.runtime.signals import UNSTOPPABLE

logger = logging.getLogger(__name__)

NAP_SECONDS = 0.1  # of who waits for a save: in between it hears signals, and tells that the save goes on

Write = Callable[[State, Marks], None]


class Pulse:
    """Signs of life of the thread that writes. Whoever waits for it passes them on; else nobody needs them."""

    def __init__(self) -> None:
        self.count, self.section = 0, "save"

    def enter(self, section: str, step: int = -1) -> None:  # noqa: ARG002 - the step is the main thread's
        self.section = section  # whether it writes, or waits for another rank
        self.count += 1

    def busy(self, step: int, seconds: float) -> None: ...


@dataclass(frozen=True)
class Export:
    """A documented file that is written after the checkpoint, from the same state, by the first rank."""

    path: Path
    write: Write


@dataclass(frozen=True)
class Saved:
    """A save that is there."""

    step: int
    path: Path
    export: Path | None
    failed: LockstepError | None = None  # what there is no such export for


class Saver:
    """At most one save of a run, on its way."""

    def __init__(self, checkpointer: Checkpointer, snapshot: Snapshot) -> None:
        self.checkpointer, self.snapshot = checkpointer, snapshot
        self.group = checkpointer.group  # of the threads that write
        self.pulse = Pulse()
        self.group.link = self.pulse
        checkpointer.link = self.group.told(self.pulse)
        self.begun = self.landed = 0  # saves, by the main thread
        self.ended = 0  # saves, by the thread that writes
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._is_told = False

    @property
    def is_flying(self) -> bool:
        """Whether a save was begun that nobody has looked at since."""
        return self.landed < self.begun

    @property
    def keeps(self) -> bool:
        """Whether this rank writes tensors, and so needs a copy of them."""
        return self.checkpointer.writes if self.checkpointer.sharded else self.group.rank == 0

    def make_room(self, state: State, *, ranks: int) -> None:
        """Get ready for copies of such a state, beside whatever is going on, where there is memory for them."""
        if self.keeps and self._fits(state, ranks):
            self.snapshot.reserve(needed_bytes(state))

    def _fits(self, state: State, ranks: int) -> bool:
        return self.snapshot.fits(state, ranks=ranks if self.checkpointer.sharded else 1)

    def has_room(self, state: State, *, ranks: int) -> bool:
        """Whether there is memory for a copy here, where `ranks` processes share it; says so once if there is not."""
        if not self.keeps or self._fits(state, ranks):
            return True
        if not self._is_told:
            logger.warning("Not enough memory for a copy of the state: training waits while it is saved")
        self._is_told = True
        return False

    def begin(self, step: int, state: State, *, export: Export | None = None, copy: bool = True) -> None:
        """Write the state as it is now, by and by; without a copy nobody may change it until it has landed.

        All ranks must call it, with no other save on its way.
        """
        assert not self.is_flying, "one save at a time"
        frozen = self.snapshot.take(state) if copy and self.keeps else state
        self.begun += 1
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(step, [frozen], export), name=UNSTOPPABLE, daemon=True)
        self._thread.start()

    def _run(self, step: int, handed: list[State], export: Export | None) -> None:
        """In the thread. The state is handed over: the copy is gone with the end of the save."""
        try:
            self._outcome = self._write(step, handed.pop(), export)
        except BaseException as error:
            self._outcome = error
        self.ended = self.begun

    def _write(self, step: int, state: State, export: Export | None) -> Saved:
        self.snapshot.wait()
        path = self.checkpointer.save(step, state)
        if not export:
            return Saved(step, path, None)
        try:
            self.group.together(lambda: export.write(self._whole(path, state), self.checkpointer.link))
        except LockstepError as error:  # the checkpoint is there all the same
            return Saved(step, path, None, failed=error)
        return Saved(step, path, export.path)

    def _whole(self, path: Path, state: State) -> State:
        """Of a state in shards no rank has all: it lies in the files that were just published."""
        return State(Stored(path, MODEL), Stored(path, OPTIMIZER), state.run) if self.checkpointer.sharded else state

    def land(self, link: Marks, *, patience_seconds: float = math.inf) -> Saved | None:
        """The save that was on its way, once it is there; None if there was none. Raises what it failed of.

        `patience_seconds`: give up on one that shows no sign of life for so long, and return None.
        """
        if not self.is_flying or not self._wait(link, patience_seconds):
            return None
        outcome, self._outcome, self._thread = self._outcome, None, None
        self.landed = self.begun
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _wait(self, link: Marks, patience_seconds: float) -> bool:
        assert self._thread is not None
        seen, since = -1, time.monotonic()
        while self._thread.is_alive():
            if self.pulse.count != seen:
                seen, since = self.pulse.count, time.monotonic()
                link.enter(self.pulse.section)
            elif time.monotonic() - since > patience_seconds:
                return False
            self._thread.join(NAP_SECONDS)
        return True
