"""Log lines for the screen and for files: every line carries its GPU, holds no secret, and never stops a run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

from lockstep.errors import OutputError
from lockstep.runtime import env
from lockstep.runtime.scrub import scrubber

Prefix = Literal["bracket", "colon", "none"]
ROOT = logging.getLogger("lockstep")
COLUMNS = 80  # what banner and summary are laid out for, prefix included
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
ANSI = {"yellow": "\x1b[33m", "red": "\x1b[31m"}


def is_terminal(stream: IO[str]) -> bool:
    """Whether cursor movement makes sense there."""
    return stream.isatty() and env.get("TERM") != "dumb"


class AppendFile:
    """A file to which lines are appended whole. When that fails it says so once and goes on trying."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complaint = ""  # to be shown once by the owner
        self._failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = not _ends_whole(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(
                f"cannot open it for writing: {error.strerror or error}",
                where=str(path),
                hint="choose a file in a folder you can write to",
            ) from error

    def write(self, lines: bytes) -> None:
        """Append in one system call; `lines` ends with a newline. A line torn by a crash before is ended first."""
        if self._descriptor < 0:
            return
        data = b"\n" + lines if self._torn else lines
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if written < len(data):
            self._torn = True
            self._fail("no room for a whole line")
        else:
            self._torn = False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self.complaint = f"cannot write {self.path}: {reason}. Training goes on without it."


def _ends_whole(path: Path) -> bool:
    """Whether the last line of a file is complete. Pipes, devices and files that are not there have none."""
    if not path.is_file() or path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class PrefixFormatter(logging.Formatter):
    """`[GPU0] message` or `GPU0:INFO | [GPU 0] message`, on every line. The record is left as it was.

    Under our launcher, which puts `[GPU0] ` or `GPU0:` before every line of a worker, only the rest is written.
    """

    def __init__(self, tag: str, *, prefix: Prefix, scrub: Callable[[str], str], launched: bool = False) -> None:
        super().__init__()
        self._scrub = scrub
        self._colon = prefix == "colon"
        tag = "" if prefix == "none" else tag
        spaced = re.sub(r"(?<=\D)(?=\d)", " ", tag)
        first = "" if launched else tag
        if self._colon:
            self._before, self._after = f"{first}:" if first else "", f" | [{spaced}] " if tag else " | "
        else:
            self._before, self._after = "", f"[{first}] " if first else ""
        by_launcher = 0 if first or not tag else len(f"{tag}:" if self._colon else f"[{tag}] ")
        self.columns = by_launcher + len(self.prefix())

    def prefix(self, level: str = "INFO") -> str:
        return f"{self._before}{level}{self._after}" if self._colon else self._after

    def format(self, record: logging.LogRecord) -> str:
        return prefixed(self.prefix(record.levelname), full_text(record, self, self._scrub))


class FileFormatter(logging.Formatter):
    """`YYYY-mm-dd HH:MM:SS | GPU0 | logger | LEVEL | message`, on every line."""

    def __init__(self, tag: str, *, scrub: Callable[[str], str]) -> None:
        super().__init__()
        self._tag = tag or "CPU"
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        prefix = f"{when} | {self._tag} | {record.name} | {record.levelname} | "
        return prefixed(prefix, full_text(record, self, self._scrub))


def full_text(record: logging.LogRecord, formatter: logging.Formatter, scrub: Callable[[str], str]) -> str:
    """Message, traceback and stack of a record. logging's own format() would cache them in the record."""
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + formatter.formatException(record.exc_info)
    if record.stack_info:
        text += "\n" + record.stack_info
    return scrub(text)


def prefixed(prefix: str, text: str) -> str:
    """The text with the prefix before each of its lines."""
    if "\n" not in text:
        return prefix + text if text else prefix.rstrip()
    return "\n".join((prefix + line).rstrip() for line in text.split("\n"))


class _Handler(logging.Handler):
    """A handler whose failure becomes one warning, given after its lock is free so that handlers cannot block."""

    complaint = ""

    def handle(self, record: logging.LogRecord) -> bool:
        handled = bool(super().handle(record))
        if self.complaint:
            complaint, self.complaint = self.complaint, ""
            ROOT.warning(complaint)
        return handled


class FileHandler(_Handler):
    """Appends to a log file."""

    def __init__(self, path: Path, formatter: FileFormatter) -> None:
        super().__init__()
        self._file = AppendFile(path)
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        self.complaint, self._file.complaint = self._file.complaint, ""

    def close(self) -> None:
        self._file.close()
        super().close()


class ConsoleHandler(_Handler):
    """Writes to a terminal or pipe; while a progress bar is up, `printer` puts the lines above it."""

    def __init__(self, stream: IO[str], formatter: PrefixFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.stream = stream
        self.printer: Callable[[str, str], None] | None = None  # (text, style)
        self.labels = formatter.columns > 0  # whether a label stands before the lines
        self.width = COLUMNS - formatter.columns
        self._colour = is_terminal(stream) and not env.get("NO_COLOR")
        self._broken = False
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # UTF-8 whatever LANG says
            reconfigure(encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        if self._broken:
            return
        text, style = self.format(record), STYLES.get(record.levelno, "")
        try:
            if self.printer is not None:
                self.printer(text, style)
            else:
                self.stream.write(f"{ANSI[style]}{text}\x1b[0m\n" if style and self._colour else text + "\n")
                self.stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed under us
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        self._broken = True
        self.complaint = f"cannot write to the terminal: {error}. Training goes on without it."
        with contextlib.suppress(OSError, ValueError):  # else the interpreter fails once more when it flushes at exit
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)
        if self.stream is not sys.stderr:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(self.complaint + "\n")


def setup_logging(
    *,
    tag: str = "",
    prefix: Prefix = "bracket",
    level: str = "INFO",
    log_files: Sequence[Path] = (),
    stream: IO[str] | None = None,
    screen: Literal["own", "launched", "none"] = "own",
) -> None:
    """Send what lockstep logs to the screen and to files. A second call replaces what the first one set up.

    `screen`: `launched` under a launcher that labels the lines; `none` for a worker that only its files hear of.
    """
    scrub = scrubber()
    handlers: list[logging.Handler] = []
    for path in dict.fromkeys(path.absolute() for path in log_files):
        handlers.append(FileHandler(path, FileFormatter(tag, scrub=scrub)))
    if screen != "none":
        formatter = PrefixFormatter(tag, prefix=prefix, scrub=scrub, launched=screen == "launched")
        handlers.append(ConsoleHandler(sys.stdout if stream is None else stream, formatter))
    close_logging()
    for handler in handlers:
        ROOT.addHandler(handler)
    ROOT.setLevel(level)
    ROOT.propagate = False


def close_logging() -> None:
    """Take down what setup_logging has set up."""
    for handler in list(ROOT.handlers):
        if isinstance(handler, _Handler):
            ROOT.removeHandler(handler)
            handler.close()


def console_handler() -> ConsoleHandler | None:
    """The handler that writes to the screen, if logging is set up."""
    return next((handler for handler in ROOT.handlers if isinstance(handler, ConsoleHandler)), None)
