"""What the engine tells about where it is, for a watchdog to judge by. lockstep.launch.link.Link understands it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

PULSE_SECONDS = 1.0


class Marks(Protocol):
    """Signs of life of the main thread."""

    def enter(self, section: str, step: int = -1) -> None:
        """data, forward, backward, communication, save or evaluate begins; -1 keeps the step."""
        ...

    def busy(self, step: int, seconds: float) -> None:
        """Own work time of a finished step, waiting for others excluded."""
        ...


class Told:
    """Marks of which other ranks hear as well, once in a while: those that wait for this one."""

    def __init__(self, link: Marks, tell: Callable[[], object]) -> None:
        self.link, self._tell = link, tell
        self._told = 0.0

    @property
    def section(self) -> str:
        return getattr(self.link, "section", "start")

    def enter(self, section: str, step: int = -1) -> None:
        self.link.enter(section, step)
        if (now := time.monotonic()) - self._told >= PULSE_SECONDS:
            self._told = now
            self.link.enter("communication")  # if nobody takes the word, it is not this rank that is stuck
            self._tell()
            self.link.enter(section)

    def busy(self, step: int, seconds: float) -> None:
        self.link.busy(step, seconds)


class NoMarks:
    """Nobody watches."""

    def enter(self, section: str, step: int = -1) -> None: ...

    def busy(self, step: int, seconds: float) -> None: ...
