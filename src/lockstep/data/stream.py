"""A dataset that grows while it is read: chunks of rows, published one after another, in an order fixed by the seed.

    <cache_dir>/<key>/            chunk 0, the tokenizer and the validation rows: a cache like every other
    <key>.chunks/000001/ ...      each appears whole or not at all
        manifest.json             size and SHA-256 of every file below
        chunk.json                which documents it holds, how many rows, and whether it is the last
        rows/                     rows.json, and one <column>.npy per column
    <key>.stream.lock             held by whoever adds chunks
    <key>.stream.json             how far that one is
    <key>.readers.lock            shared by all runs that read it

A chunk is a pure function of the key and its number, so where the last one ends is the whole state of a stream. Row ids
count over all chunks. Position p of an epoch lies in the chunk that holds row p, and is permuted inside it with a key
made of (seed, epoch, chunk): how many chunks there are, who reads them and how fast they come changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.data.cache import Table
from lockstep.data.order import Order
from lockstep.errors import DataError
from lockstep.rundir import MANIFEST, verify
from lockstep.runtime.later import numpy as np
from lockstep.runtime.splitmix import splitmix64

if TYPE_CHECKING:
    from lockstep.contracts import Array, Place
    from lockstep.data.order import I64

T = TypeVar("T")
DESCRIPTION, ROWS = "chunk.json", "rows"
POLL_SECONDS = 0.2
ENDLESS_ROWS = 1 << 62
OPEN_TABLES = 8  # kept open at once: each column of each takes a descriptor


@dataclass(frozen=True)
class Chunk:
    """What one chunk holds."""

    number: int
    start: Place
    end: Place  # where the next one goes on
    documents: int  # used since the beginning of the stream, this chunk's included
    rows: int
    tokens: int
    last: bool  # the stream ends here

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Any) -> Chunk:
        """Raises KeyError, TypeError or ValueError for what is none."""
        (start, start_document), (end, end_document) = found["start"], found["end"]
        return Chunk(
            number=int(found["number"]),
            start=(int(start), int(start_document)),
            end=(int(end), int(end_document)),
            documents=int(found["documents"]),
            rows=int(found["rows"]),
            tokens=int(found["tokens"]),
            last=bool(found["last"]),
        )


def chunks_folder(base: Path) -> Path:
    """Where the chunks of a cache lie that are not in it."""
    return base.with_name(f"{base.name}.chunks")


def chunk_folder(base: Path, number: int) -> Path:
    assert number > 0, "chunk 0 lies in the cache itself"
    return chunks_folder(base) / f"{number:06d}"


@contextlib.contextmanager
def reading(base: Path) -> Generator[None]:
    """Nobody clears a stream away (cache.clean) while somebody reads it: its chunks are opened one after another."""
    path = base.with_name(f"{base.name}.readers.lock")
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # a place we cannot write to
            fcntl.flock(opened.enter_context(path.open("a+b")), fcntl.LOCK_SH)
        yield


def read_head(base: Path) -> Chunk:
    """Chunk 0, as the cache describes it."""
    meta = base / "meta.json"
    try:
        return Chunk.from_json(json.loads(meta.read_text(encoding="utf-8"))["stream"]["head"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"not the beginning of a stream: {type(error).__name__}: {error}", where=str(meta)) from error


def read_chunk(base: Path, number: int) -> Chunk | None:
    """A later chunk; None as long as it is not there."""
    folder = chunk_folder(base, number)
    if not (folder / MANIFEST).is_file():
        return None
    try:
        chunk = Chunk.from_json(json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
        if chunk.number != number:
            raise ValueError(f"it says that it is chunk {chunk.number}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a chunk: {error}", where=str(folder)) from error
    return chunk


def _vouched(_number: int) -> bool:
    return True


class StreamTable:
    """The rows of a stream, those that are there so far; who asks for others waits for them. Threads may share it."""

    is_whole = False  # rows may still come
    row_bytes = 1

    def __init__(self, base: Path) -> None:
        self.base = base
        self.vouched: Callable[[int], bool] = _vouched  # False: somebody is about to mend this chunk, if it is damaged
        self._chunks = [read_head(base)]
        self._first_rows = [0, self._chunks[0].rows]  # of each chunk, and of the one to come
        self._tables: dict[int, Table] = {0: Table(base / "train")}
        self._checked = {0}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def rows(self) -> int:
        """How many there are so far."""
        self._look()
        return self._first_rows[-1]

    @property
    def epoch_rows(self) -> int:
        """Rows of one epoch; more than anybody trains on as long as the end of the stream is not known."""
        return self.rows if self.ended else ENDLESS_ROWS

    @property
    def ended(self) -> bool:
        """Whether the last chunk is there: from then on an epoch has an end."""
        self._look()
        return self._chunks[-1].last

    @property
    def head(self) -> Chunk:
        """The first chunk, which is there before training begins."""
        return self._chunks[0]

    @property
    def is_short(self) -> bool:
        """Whether the first chunk is all there is: known before training begins."""
        return self.head.last

    def epoch_rows_by(self, position: int) -> int | None:
        """Rows of an epoch, if the chunks up to this position tell; None also where they are not there.

        It depends on the position only, never on what has come meanwhile: all who have trained on it know the same. A
        last chunk without rows is not seen before the row after it, which the next epoch begins with.
        """
        found = self._find(position) if position >= 0 else (0, 0, 0)
        if found is None:
            return None
        number, epoch, _ = found
        return self._first_rows[-1] if epoch or self._chunks[number].last else None

    @property
    def chunks(self) -> int:
        """How many there are so far."""
        self._look()
        return len(self._chunks)

    def order(self, seed: int) -> StreamOrder:
        """The order its rows are trained in."""
        return StreamOrder(self, seed)

    def take(self, ids: Array, *, as_stored: bool = False, only: Collection[str] = ()) -> dict[str, Array]:
        """Copies of some rows: column -> (n, width). Waits for those that are not there yet."""
        if not len(ids):
            return self._table(0).take(ids, as_stored=as_stored, only=only)
        self._wait(lambda: self._holds(int(ids.max())) or None)
        number = bisect_right(self._first_rows, int(ids.min())) - 1
        if ids.max() < self._first_rows[number + 1]:
            return self._table(number).take(ids - self._first_rows[number], as_stored=as_stored, only=only)
        numbers: Array = np.searchsorted(self._first_rows, ids, side="right") - 1
        parts: dict[int, dict[str, Array]] = {}
        for number in sorted({int(number) for number in numbers}):
            own = ids[numbers == number] - self._first_rows[number]
            parts[number] = self._table(number).take(own, as_stored=as_stored, only=only)
        taken: dict[str, Array] = {}
        for name, sample in next(iter(parts.values())).items():
            taken[name] = np.empty((len(ids), *sample.shape[1:]), sample.dtype)
            for number, part in parts.items():
                taken[name][numbers == number] = part[name]
        return taken

    def is_ready(self, position: int) -> bool:
        """Whether the row at this position can be had without waiting."""
        found = self._find(position)
        return found is not None and self._open(found[0]) is not None

    def place(self, position: int) -> tuple[int, int, int]:
        """(chunk, epoch, offset in the chunk) of a position that counts over all epochs; waits for the chunk."""
        return self._wait(lambda: self._find(position))

    def span(self, number: int) -> tuple[int, int]:
        """(id of the first row of a chunk that is there, its rows)."""
        return self._first_rows[number], self._chunks[number].rows

    def close(self) -> None:
        """Whoever waits for rows waits no more."""
        self._closed.set()

    def _holds(self, row: int) -> bool:
        if row >= self._first_rows[-1]:
            self._look()
        return row < self._first_rows[-1]

    def _find(self, position: int) -> tuple[int, int, int] | None:
        """Where a position lies; None if that is not known yet."""
        if not self._holds(position) and not self._chunks[-1].last:
            return None
        epoch, row = divmod(position, self._first_rows[-1]) if self._chunks[-1].last else (0, position)
        number = bisect_right(self._first_rows, row) - 1
        return number, epoch, row - self._first_rows[number]

    def _look(self) -> None:
        """Take note of the chunks that have come."""
        with self._lock:
            while not self._chunks[-1].last and (found := self._read(len(self._chunks))):
                self._first_rows.append(self._first_rows[-1] + found.rows)
                self._chunks.append(found)

    def _read(self, number: int) -> Chunk | None:
        try:
            return read_chunk(self.base, number)
        except DataError:
            if self.vouched(number):
                raise
            return None

    def _table(self, number: int) -> Table:
        return self._wait(lambda: self._open(number))

    def _open(self, number: int) -> Table | None:
        """A chunk whose content was compared with its manifest once; None while it is being mended."""
        with self._lock:
            table = self._tables.pop(number, None)  # and put back as the newest
            try:
                table = table or self._checked_table(number)
            except DataError:
                if self.vouched(number):
                    raise
                return None
            self._tables[number] = table
            while len(self._tables) > OPEN_TABLES:
                del self._tables[next(iter(self._tables))]
            return table

    def _checked_table(self, number: int) -> Table:
        if number == 0:
            return Table(self.base / "train")
        folder = chunk_folder(self.base, number)
        if number not in self._checked:
            check_chunk(self.base, number)
            self._checked.add(number)
        return Table(folder / ROWS)

    def _wait(self, find: Callable[[], T | None]) -> T:
        """What is found, as soon as it is."""
        while (found := find()) is None:
            if self._closed.wait(POLL_SECONDS):
                raise DataError("the stream was closed", where=str(self.base))
        return found


def check_chunk(base: Path, number: int) -> None:
    """Raise DataError, naming the file, unless a chunk is what its manifest says."""
    folder = chunk_folder(base, number)
    try:
        verify(folder, required=(DESCRIPTION, f"{ROWS}/rows.json"))
    except DataError as error:
        raise DataError(error.what, where=error.where, hint=f"rm -r {folder}: it is made again") from error


class StreamOrder:
    """Rows of a stream chunk after chunk, each in a new random order each epoch. Positions count from 0."""

    def __init__(self, table: StreamTable, seed: int) -> None:
        self.table, self.seed = table, seed
        self._number = -1
        self._order: Order | None = None  # of the chunk at hand: it keeps a window

    def at(self, position: int, count: int) -> tuple[I64, I64]:
        """Row ids and their epochs at positions position .. position + count - 1; waits for those to come."""
        ids: list[I64] = []
        epochs: list[I64] = []
        while count > 0:
            number, epoch, offset = self.table.place(position)
            first, rows = self.table.span(number)
            part = min(count, rows - offset)
            placed, _ = self._of(number, rows).at(epoch * rows + offset, part)
            ids.append(placed + first)
            epochs.append(np.full(part, epoch, np.int64))
            position, count = position + part, count - part
        return np.concatenate(ids), np.concatenate(epochs)

    def _of(self, number: int, rows: int) -> Order:
        if self._order is None or number != self._number:
            self._number, self._order = number, Order(rows, chunk_seed(self.seed, number))
        return self._order


def chunk_seed(seed: int, number: int) -> int:
    """The seed of the order inside a chunk; with the epoch it makes the key of the permutation."""
    mixed = splitmix64(np.array([seed], np.uint64)) ^ splitmix64(~np.array([number], np.uint64))
    return int(splitmix64(mixed)[0])
