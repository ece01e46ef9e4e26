"""Workers' output on its way to the screen and to files: whole lines, prefixed, without secrets and control bytes.

Work is done on chunks of bytes, not on lines: the price of a line does not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 8 << 20  # a worker that never ends its line is cut here
HELD_BYTES = 4 << 20  # output kept per worker until its file is known
SCREEN_BYTES = 16 << 20  # of workers' lines that may wait for a slow reader
SKIPPED = b"[WARNING] %d lines were not shown, whoever reads this was too slow; the workers' logs have them\n"
CLOSE_SECONDS = 1.0  # for what waits when a start has failed
TAIL_BYTES = 8192


class Lines:
    """Chunks in, whole lines out. A carriage return ends a line too: a progress bar is many lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are complete by now, each ended by a newline."""
        if b"\r" in chunk or (self._rest and self._rest[-1].endswith(b"\r")):
            chunk = self._without_returns(chunk)
        whole, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._keep(chunk)
            return self.end() if self._rest_bytes > LONGEST_LINE_BYTES else b""
        lines = b"".join((*self._rest, whole, newline))
        self._rest, self._rest_bytes = [], 0
        self._keep(rest)
        return lines

    def end(self) -> bytes:
        """What is left, as a line."""
        rest = b"".join(self._rest).rstrip(b"\r")
        self._rest, self._rest_bytes = [], 0
        return rest + b"\n" if rest else b""

    def _keep(self, data: bytes) -> None:
        if data:
            self._rest.append(data)
            self._rest_bytes += len(data)

    def _without_returns(self, chunk: bytes) -> bytes:
        """Returns become newlines; one at the very end waits, its newline may be the next byte."""
        if self._rest and self._rest[-1].endswith(b"\r"):
            self._rest[-1] = self._rest[-1][:-1]
            chunk = b"\r" + chunk
        last = b"\r" if chunk.endswith(b"\r") else b""
        body = chunk[: len(chunk) - len(last)]
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + last


class LogFile:
    """A file to which output is appended. When that fails it says so once and goes on trying."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self._complain: Callable[[str], None] | None = complain
        self._descriptor = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._fail(error)

    def write(self, data: bytes) -> None:
        if self._descriptor < 0 or not data:
            return
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                os.write(self._descriptor, data[written:])
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fail(self, error: OSError) -> None:
        if self._complain is not None:
            complain, self._complain = self._complain, None
            complain(f"cannot write {self.path}: {error.strerror or error}. Training goes on without it.")


class Output:
    """The output of one worker process: split, scrubbed, kept until its file is known, handed to the screen."""

    def __init__(self, prefix: bytes, scrub: Callable[[bytes], bytes], screen: Screen | None) -> None:
        self.files: list[LogFile] = []
        self.shown = screen is not None
        self.tail = b""  # the last lines, for a failure record
        self._prefix = prefix
        self._scrub = scrub
        self._screen = screen
        self._lines = Lines()
        self._held: deque[bytes] | None = deque()  # None: the last file it waits for is there
        self._held_bytes = 0

    def feed(self, chunk: bytes) -> None:
        self._pass(self._lines.feed(chunk))

    def end(self) -> None:
        self._pass(self._lines.end())

    def add_file(self, file: LogFile, *, last: bool = False) -> None:
        """Write there from now on; the last file first gets what came before it."""
        self.files.append(file)
        if last and self._held is not None:
            for data in self._held:
                file.write(data)
            self._held = None

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _pass(self, lines: bytes) -> None:
        if not lines:
            return
        lines = self._scrub(lines)
        self.tail = (self.tail + lines)[-TAIL_BYTES:] if len(lines) < TAIL_BYTES else lines[-TAIL_BYTES:]
        for file in self.files:
            file.write(lines)
        if self._held is not None:
            self._held.append(lines)
            self._held_bytes += len(lines)
            while self._held_bytes > HELD_BYTES and len(self._held) > 1:
                self._held_bytes -= len(self._held.popleft())
        if self._screen is not None:
            self._screen.show(prefixed(self._prefix, lines))


def prefixed(prefix: bytes, lines: bytes) -> bytes:
    """Whole lines, the prefix before each."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n" if prefix else lines


class Screen:
    """Standard output, written by a thread of its own: a reader that stands still holds up nobody but that thread.

    What it has not taken waits here. Workers' lines beyond SCREEN_BYTES are counted, not kept: their files have them.
    """

    def __init__(self, descriptor: int) -> None:
        self.closed = False  # the reader went away
        self.copy: LogFile | None = None  # all that is shown, also what no reader takes
        self.descriptor = descriptor
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._skipped = 0  # lines, since the reader was last told
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="lockstep-screen", daemon=True)

    def begin(self) -> None:
        """Start the thread. Call it once every process was started: a fork is for a process with one thread."""
        if self.descriptor >= 0 and self._thread.ident is None:
            self._thread.start()

    def show(self, data: bytes) -> None:
        """Workers' lines."""
        self.put(data, most=SCREEN_BYTES)

    def put(self, data: bytes, *, most: float = math.inf) -> None:
        """Whole lines to be shown, unless more than so many bytes wait already."""
        if self.copy is not None:
            self.copy.write(data)
        with self._changed:
            if self.closed or self.descriptor < 0:
                return
            if self._waiting_bytes > most:
                self._skipped += data.count(b"\n")
                return
            if self._skipped:
                data = SKIPPED % self._skipped + data
                self._skipped = 0
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify()

    def finish(self, seconds: float = math.inf, *, unless: Callable[[], object] = bool) -> None:
        """Wait until the reader has taken everything; so long, and not if there is a reason to give up."""
        self.begin()
        if self._skipped:
            self.put(b"")
        with self._changed:
            self._ending = True
            self._changed.notify()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and not unless() and time.monotonic() < deadline:
            self._thread.join(0.05)

    def close(self) -> None:
        if not self._ending:
            self.finish(CLOSE_SECONDS)
        if self.copy is not None:
            self.copy.close()

    def _write_all(self) -> None:
        while not self.closed and (data := self._next()):
            self._write(data)
            with self._changed:
                self._waiting_bytes -= len(data)

    def _next(self) -> bytes:
        """What is to be written next; nothing: that was all."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else b""

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:  # a terminal that was set so by another program
                select.select([], [self.descriptor], [])
            except BrokenPipeError:
                self.closed = True
                return
            except OSError:  # a full disk behind `> file`: the run goes on, its own files have it all
                return


def read_available(descriptor: int, output: Output, *, most: int = 16) -> bool:
    """Feed what a non-blocking pipe holds, at most so many chunks. False: it has ended."""
    for _ in range(most):
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(descriptor, READ_BYTES)
            if not chunk:
                return False
            output.feed(chunk)
            continue
        return True
    return True
