"""Workers' output on its way to the screen and to files: whole lines, prefixed, without secrets and control bytes.

Work is done on chunks of bytes, not on lines: the price of a line does not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 8 << 20  # a worker that never ends its line is cut here
HELD_BYTES = 4 << 20  # output kept per worker until its file is known
SCREEN_BYTES = 1 << 20  # what may wait for a slow reader; then workers wait, as they would without us
TAIL_BYTES = 8192
PIPE_BYTES = 4096  # a pipe that polls writable takes so many without blocking


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
    """Standard output, never blocking: what a slow reader has not taken waits here."""

    def __init__(self, descriptor: int) -> None:
        self.closed = False  # the reader went away
        self.hurried = False  # workers shall end: nobody waits for the reader any more
        self.copy: LogFile | None = None  # all that is shown, also what no reader takes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.descriptor, self._piece_bytes, self._own = _open_screen(descriptor)
        self._poll = select.poll()
        if self.descriptor >= 0:
            self._poll.register(self.descriptor, select.POLLOUT)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        return self._waiting_bytes > SCREEN_BYTES

    def show(self, data: bytes) -> None:
        """Workers' lines. In a hurry what a reader does not take is left to the files."""
        self.put(data, skipped=self.hurried and self.full)

    def put(self, data: bytes, *, skipped: bool = False) -> None:
        if self.copy is not None:
            self.copy.write(data)
        if self.closed or self.descriptor < 0 or skipped:
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self.drain()

    def drain(self, seconds: float = 0.0) -> None:
        """Write what the reader takes now, or within so many seconds."""
        deadline = time.monotonic() + seconds
        while self._waiting and not self.closed:
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return
            piece = self._waiting.popleft()
            try:
                written = os.write(self.descriptor, piece[: self._piece_bytes])
            except BlockingIOError:  # a terminal that was set so by another program
                written = 0
                time.sleep(0.001)
            except BrokenPipeError:
                self.closed = True
                written = len(piece)
            except OSError:  # a full disk behind `> file`: the run goes on, its own files have it all
                written = len(piece)
            self._waiting_bytes -= written
            if written < len(piece):
                self._waiting.appendleft(piece[written:])
        if self.closed:
            self._waiting.clear()
            self._waiting_bytes = 0

    def close(self) -> None:
        if self._own and self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        if self.copy is not None:
            self.copy.close()


def _open_screen(descriptor: int) -> tuple[int, int, bool]:
    """(descriptor, bytes to write at a time, whether it is ours): a pipe or terminal opened anew, never blocking.

    Set on the descriptor itself that would reach whoever shares it: the shell, the other programs of a pipeline.
    """
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # `>&-`: nobody reads, and nobody meant us to end
        return -1, 0, False
    if stat.S_ISREG(mode):
        return descriptor, READ_BYTES, False
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):  # a terminal of somebody else (su)
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", flags), PIPE_BYTES, True
    return descriptor, PIPE_BYTES, False


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
