"""What the engine tells about where it is, for a watchdog to judge by. lockstep.launch.link.Link understands it."""

from __future__ import annotations

from typing import Protocol


class Marks(Protocol):
    """Signs of life of the main thread."""

    def enter(self, section: str, step: int = -1) -> None:
        """data, forward, backward, communication, save or evaluate begins; -1 keeps the step."""
        ...

    def busy(self, step: int, seconds: float) -> None:
        """Own work time of a finished step, waiting for others excluded."""
        ...


class NoMarks:
    """Nobody watches."""

    def enter(self, section: str, step: int = -1) -> None: ...

    def busy(self, step: int, seconds: float) -> None: ...
