"""How far a preparation is: a bar on a terminal, else a line now and then. Torch-free."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Self

from lockstep.engine.encoding import length_of
from lockstep.report.console import Bar
from lockstep.report.logs import console_handler, is_terminal
from lockstep.report.words import format_eta

if TYPE_CHECKING:
    from types import TracebackType

    from lockstep.contracts import Document

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
POLL_SECONDS = 1.0
BAR_SECONDS = 0.1
QUIET_SECONDS = 1.0  # what is done sooner needs no bar


def counted(documents: int) -> str:
    """1 document, 12,345 documents."""
    return "1 document" if documents == 1 else f"{documents:,} documents"


class Headway:
    """Counts what the work itself tells it; a thread of its own shows it, also while a single call takes long."""

    def __init__(self, *, progress: Literal["auto", "on", "off"] = "auto", unit: str = "tokens") -> None:
        self.tokens = 0  # or what else `unit` says
        self.documents = 0
        self.characters = 0  # of the documents that were read
        self.total = 0  # characters to be tokenised, or other work; 0: not known yet
        self.done = 0
        self._progress, self._unit = progress, unit
        self._doing = "Reading"
        self._began = time.monotonic()
        self._bar: Bar | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show, name="headway", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def reading(self, documents: Iterable[Document]) -> Iterator[Document]:
        """The documents, counted."""
        for document in documents:
            self.documents += 1
            self.characters += length_of(document)
            yield document

    def begin(self, doing: str, *, total: int = 0) -> None:
        """The next stage."""
        self._began, self.done, self.total, self._doing = time.monotonic(), 0, total, doing

    @property
    def share(self) -> float:
        """Of the work, as far as it can be said."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def line(self, *, short: bool = False) -> str:
        """The state of things; short: so that 80 columns have room for a bar beside it."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        if not self.total:
            read = f": {counted(self.documents)}, {self.characters / 1e6:,.1f} million characters"
            return self._doing + (read if self._doing == "Reading" and self.documents else "")
        share = self.share
        eta = format_eta(seconds / share - seconds) if share > 0 else "?"
        made = [] if short else [f"{self.tokens:,} {self._unit}"]
        speed = f"{self.tokens / seconds:,.0f} {self._unit}/s"
        return " | ".join([f"{self._doing}: {100 * share:.0f} %", *made, speed, f"ETA: {eta}"])

    def _show(self) -> None:
        """The thread: the bar ten times a second, or else a line every ten seconds."""
        handler = console_handler()
        drawable = self._progress == "on" or (
            self._progress == "auto" and handler is not None and is_terminal(handler.stream)
        )
        terminal = handler is not None and drawable
        started = told = time.monotonic()
        try:
            while not self._stop.wait(BAR_SECONDS if terminal else POLL_SECONDS):
                now = time.monotonic()
                if terminal and now - started >= QUIET_SECONDS:
                    terminal = self._draw(self.share, self.line(short=True))
                elif not terminal and now - told >= LINE_SECONDS:
                    told = now
                    logger.info("%s", self.line())
        finally:
            if self._bar is not None:
                self._bar.close()

    def _draw(self, share: float, line: str) -> bool:
        """Whether there is a terminal to draw on, and a package that draws."""
        handler = console_handler()
        try:
            if self._bar is None and handler is not None:
                self._bar = Bar(handler.stream, 1000, counted=False)
            if self._bar is not None:
                self._bar.update(round(1000 * share), line)
        except (ImportError, OSError):  # no rich, or the terminal is gone: lines then
            return False
        return True
