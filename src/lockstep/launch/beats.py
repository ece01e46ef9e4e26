"""Signs of life: one memory-mapped slot per local worker, written by the worker and read by whoever watches it.

A mark costs about a microsecond and no system call. Every number is eight aligned bytes, so a reader sees an old or a
new one, never half of it; the mark is written first and read twice, so that no section is paired with an older mark.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

FILE = "beats"
SECTIONS = ("start", "prepare", "data", "forward", "backward", "communication", "save", "evaluate", "done")
INDEX = {name: number for number, name in enumerate(SECTIONS)}
RING = 64  # busy seconds of the last steps

SLOT_BYTES = 8192
_WORDS = SLOT_BYTES // 8
_PID, _MARK, _SECTION, _STEP, _RANK, _BUSY_COUNT, _FLAGS = range(7)
_BUSY = 16  # words: the ring
_TAG, _TAG_BYTES = 128 * 8, 64
_RUN, _RUN_BYTES = 160 * 8, 4800
DUMPS = 1  # flag: SIGRTMIN+3 writes the stacks


@dataclass(frozen=True)
class Beat:
    """What one slot said at one moment. pid 0: nobody has attached yet."""

    slot: int
    pid: int = 0
    mark_ns: int = 0  # time.monotonic_ns() of the last sign of progress
    section: str = "start"
    step: int = -1
    rank: int = 0
    tag: str = ""
    run: str = ""
    dumps: bool = False
    busy_count: int = 0
    busy: tuple[float, ...] = ()  # own work seconds of the last finished steps, oldest first

    def age(self, now_ns: int) -> float:
        """Seconds since the last sign of progress."""
        return max(0, now_ns - self.mark_ns) / 1e9


class Slot:
    """The worker's end: one slot of the file, or (no path) memory that nobody reads."""

    def __init__(self, path: Path | None = None, slot: int = 0) -> None:
        memory = bytearray(SLOT_BYTES) if path is None else _map(path, slot)
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("q")
        self._seconds = self._bytes.cast("d")

    def attach(self, pid: int, *, rank: int, tag: str, dumps: bool) -> None:
        """Say who writes here from now on."""
        self._words[_RANK] = rank
        self._words[_FLAGS] = DUMPS if dumps else 0
        self._text(_TAG, _TAG_BYTES, tag)
        self.mark(INDEX["start"], -1)
        self._words[_PID] = pid

    def mark(self, section: int, step: int) -> None:
        """Progress, now. A step of -1 keeps the last one."""
        words = self._words
        words[_MARK] = time.monotonic_ns()
        words[_SECTION] = section
        if step >= 0:
            words[_STEP] = step

    def busy(self, seconds: float) -> None:
        """The own work of one more step."""
        count = self._words[_BUSY_COUNT]
        self._seconds[_BUSY + count % RING] = seconds
        self._words[_BUSY_COUNT] = count + 1

    def tell_run(self, path: str) -> None:
        self._text(_RUN, _RUN_BYTES, path)

    def _text(self, offset: int, room: int, text: str) -> None:
        """Length last: a reader sees all of it or nothing."""
        data = text.encode("utf-8", "surrogateescape")
        if len(data) > room - 8:
            return
        self._words[offset // 8] = 0
        self._bytes[offset + 8 : offset + 8 + len(data)] = data
        self._words[offset // 8] = len(data)


class Beats:
    """The reader's end: all slots of one node."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        with (folder / FILE).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), count * SLOT_BYTES, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        self._seconds = self._bytes.cast("d")

    def read(self, slot: int) -> Beat:
        words, base = self._words, slot * _WORDS
        while True:
            mark = words[base + _MARK]
            section, step = words[base + _SECTION], words[base + _STEP]
            if words[base + _MARK] == mark:
                break
        count = words[base + _BUSY_COUNT]
        kept = range(max(0, count - RING), count)
        return Beat(
            slot=slot,
            pid=words[base + _PID],
            mark_ns=mark,
            section=SECTIONS[section % len(SECTIONS)],
            step=step,
            rank=words[base + _RANK],
            tag=self._text(slot, _TAG, _TAG_BYTES),
            run=self._text(slot, _RUN, _RUN_BYTES),
            dumps=bool(words[base + _FLAGS] & DUMPS),
            busy_count=count,
            busy=tuple(self._seconds[base + _BUSY + number % RING] for number in kept),
        )

    def read_all(self) -> list[Beat]:
        return [self.read(slot) for slot in range(self.count)]

    def close(self) -> None:
        for view in (self._words, self._seconds, self._bytes):
            view.release()
        self._map.close()

    def _text(self, slot: int, offset: int, room: int) -> str:
        length = self._words[slot * _WORDS + offset // 8]
        if not 0 < length <= room - 8:
            return ""
        begin = slot * SLOT_BYTES + offset + 8
        return bytes(self._bytes[begin : begin + length]).decode("utf-8", "surrogateescape")


def create(folder: Path, count: int) -> Beats:
    """A new file of slots whose workers are starting now."""
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, count * SLOT_BYTES)  # on a full disk an error here, not a bus error later
        with mmap.mmap(descriptor, count * SLOT_BYTES) as memory, memoryview(memory) as data, data.cast("q") as words:
            for slot in range(count):
                words[slot * _WORDS + _STEP] = -1
                words[slot * _WORDS + _RANK] = slot
                words[slot * _WORDS + _MARK] = time.monotonic_ns()
    except OSError as error:
        from lockstep import rundir  # late: workers start faster without it

        raise rundir.io_error(error, folder / FILE, doing="starting workers") from error
    finally:
        os.close(descriptor)
    return Beats(folder, count)


def _map(path: Path, slot: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SLOT_BYTES, offset=slot * SLOT_BYTES)
