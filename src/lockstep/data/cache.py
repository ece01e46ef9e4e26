"""Prepared datasets on disk: rows of named columns, memory-mapped, built once, checked on every opening.

    <cache_dir>/<key>/          appears whole or not at all (rundir.publishing)
        manifest.json           size and SHA-256 of every file below
        meta.json               for people: source, tokenizer, counts, versions, and what the key was made of
        tokenizer.json  tokenizer_config.json
        train/  validation/     rows.json, and one <column>.npy of shape (rows, width) per column
    <key>.lock                  held while building; the kernel frees it with its process
    <key>.builder               who holds it and how far that one is, for those who wait
    <key>.checked               size, time and sampled hash of each file when its whole content was last checked
    <key>.chunks/ .stream.*     the rest of a stream (data/stream.py)

The content is a pure function of the key, so building twice gives the same bytes. A ragged column fits in beside the
others: its values flat in <column>.npy of shape (total,), and <column>.offsets.npy of shape (rows + 1,) to cut them by.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from filelock import FileLock, Timeout

from lockstep.data.order import Order
from lockstep.errors import DataError, OutputError
from lockstep.rundir import MANIFEST, io_error, publishing, verify, write_json

if TYPE_CHECKING:
    from lockstep.contracts import Array

logger = logging.getLogger(__name__)

FORMAT = 1
KEY_LENGTH = 40  # longer than the md5 names of other people's caches
KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")
BESIDE = r"(\.lock|\.builder|\.checked|\.chunks|\.stream\.lock|\.stream\.json)?(\.tmp-[\w-]+)?"
OURS = re.compile(rf"{KEY.pattern}(?P<beside>{BESIDE})")
SPLITS = ("train", "validation")
REQUIRED = ("meta.json", "tokenizer.json", *(f"{split}/rows.json" for split in SPLITS))
MEMO = "lockstep-hashes.json"  # hashes of large source files, kept by the sources
LOOSE = re.compile(rf"{re.escape(MEMO)}|lockstep-hub\.json(\.lock)?|stdin-[0-9a-f]{{16}}\.(txt|jsonl)")  # of no one key
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
ALWAYS_HASHED_BYTES = 32 << 20  # caches up to this size are hashed whole on every opening: a few hundredths of a second
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 4096
WAIT_MESSAGE_SECONDS = 10.0
POLL_SECONDS = 0.1


class Table:
    """The rows of one split: named columns of equal length, read from disk as they are touched."""

    def __init__(self, folder: Path) -> None:
        try:
            described = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
            self.rows: int = described["rows"]
            self.dtypes: dict[str, str] = described["columns"]
            self.columns: Mapping[str, Array] = {
                name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in self.dtypes
            }
            if lengths := {len(column) for column in self.columns.values()} - {self.rows}:
                raise ValueError(f"columns of {lengths} rows, rows.json says {self.rows}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"not a readable table: {error}", where=str(folder)) from error
        self._plain = {name: np.asarray(column) for name, column in self.columns.items()}  # memmap indexing is slow

    @property
    def epoch_rows(self) -> int:
        """Rows of one epoch."""
        return self.rows

    def order(self, seed: int) -> Order:
        """The order its rows are trained in."""
        return Order(self.rows, seed)

    def close(self) -> None:
        """Nobody ever waits for a row of this table."""

    def take(self, ids: Array) -> dict[str, Array]:
        """Copies of some rows: column -> (n, width), in the type the objective asked for."""
        return {name: column[ids].astype(self.dtypes[name], copy=False) for name, column in self._plain.items()}


def key_of(parts: Mapping[str, Any]) -> str:
    """The name of a cache: a hash of everything that decides its content."""
    canonical = json.dumps({"format": FORMAT, **parts}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_LENGTH]


def write_table(
    folder: Path, blocks: Iterable[Mapping[str, Array]], *, columns: Mapping[str, str], stored: Mapping[str, str]
) -> int:
    """Write blocks of rows as they come and count them; columns: type readers get, stored: a narrower one on disk."""
    folder.mkdir()
    rows = 0
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(_ColumnFile(folder / f"{name}.npy", np.dtype(stored.get(name, dtype))))
            for name, dtype in columns.items()
        }
        for block in blocks:
            assert block.keys() == columns.keys(), (set(block), set(columns))
            lengths = {writers[name].append(array) for name, array in block.items()}
            assert len(lengths) == 1, f"columns of different length: {lengths}"
            rows += lengths.pop()
    with (folder / "rows.json").open("x", encoding="utf-8") as file:
        file.write(json.dumps({"rows": rows, "columns": dict(columns)}, indent=1) + "\n")
    return rows


class _ColumnFile:
    """A .npy file that grows: its header leaves room for the number of rows, known at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype, self.rows, self.width = path, dtype, 0, 0

    def __enter__(self) -> _ColumnFile:
        self.file = self.path.open("xb")
        return self

    def append(self, array: Array) -> int:
        """Add rows of the width all rows have; a value that does not fit the type on disk is our mistake."""
        assert array.ndim == 2, array.shape
        narrow = np.ascontiguousarray(array, self.dtype)
        assert array.dtype == self.dtype or np.array_equal(narrow, array), f"{self.path}: {self.dtype} is too narrow"
        if not self.rows:
            self.width = array.shape[1]
            self._header()
        assert array.shape[1] == self.width, (array.shape, self.width)
        self.file.write(narrow.data)
        self.rows += len(narrow)
        return len(narrow)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if kind is None:
                data_start = self._header()
                assert self.file.seek(0, os.SEEK_END) == data_start + self.rows * self.width * self.dtype.itemsize

    def _header(self) -> int:
        """Write the header at the start of the file, always of the same length; returns that length."""
        self.file.seek(0)
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, self.width)}
        np.lib.format.write_array_header_1_0(self.file, described)
        return self.file.tell()


def check(folder: Path, *, full: bool = False) -> None:
    """Raise DataError, naming the file, unless the cache is intact and can be opened.

    Small caches are hashed whole. Of a large one whose files carry the sizes and times of the last whole check, only
    sampled blocks are read again.
    """
    verify(folder, content=False, required=REQUIRED)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    large = sum(path.stat().st_size for path in files) > ALWAYS_HASHED_BYTES
    stamp = folder.with_name(f"{folder.name}.checked")
    if large and not full and _read_json(stamp) == _stamp(folder, files):
        return
    verify(folder)
    for split in SPLITS:
        Table(folder / split)
    if large:
        with contextlib.suppress(OSError):  # a read-only place: checked whole again next time
            write_json(stamp, _stamp(folder, files))


def _stamp(folder: Path, files: list[Path]) -> dict[str, list[Any]]:
    """Size, time and a hash of evenly spread blocks of each file."""
    seen: dict[str, list[Any]] = {}
    for path in files:
        status, sample = path.stat(), hashlib.sha256()
        with path.open("rb") as file:
            for block in range(SAMPLE_BLOCKS):
                file.seek(max(0, status.st_size - SAMPLE_BYTES) * block // (SAMPLE_BLOCKS - 1))
                sample.update(file.read(SAMPLE_BYTES))
        seen[path.relative_to(folder).as_posix()] = [status.st_size, status.st_mtime_ns, sample.hexdigest()]
    return seen


def find(key: str, roots: Iterable[Path], *, level: int = logging.WARNING) -> tuple[Path | None, str]:
    """The first intact cache of this key, and what is wrong with the last damaged one, which is left to be rebuilt."""
    damage = ""
    for root in roots:
        folder = root / key
        if folder.is_dir():
            try:
                check(folder)
            except (DataError, OSError) as error:
                damage = str(error)
                logger.log(level, "[Cache] damaged, will be rebuilt: %s", damage)
            else:
                return folder, damage
    return None, damage


def open_or_build(key: str, roots: list[Path], build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The cache of this key in one of the folders, or a new one in the first; and whether it was built just now.

    `build` fills a folder. Of several processes one builds, the others wait for it and then open what it made.
    """
    assert KEY.fullmatch(key), key
    root, damage = roots[0], ""
    try:
        found, damage = find(key, roots)
        if found:
            return found, False
        root.mkdir(parents=True, exist_ok=True)
        with _building(root, key):
            found, _ = find(key, [root], level=logging.DEBUG)
            if found:  # built while we waited
                return found, False
            for leftover in root.glob(f"{key}.tmp-*"):  # of a builder that died: we hold its lock
                shutil.rmtree(leftover, ignore_errors=True)
            (root / f"{key}.builder.tmp-note").unlink(missing_ok=True)
            with publishing(root / key) as folder:
                build(folder)
            check(root / key, full=True)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise io_error(error, root, doing="building the dataset cache") from error
        what = f"the dataset cache is damaged ({damage}) and" if damage else "the dataset cache"
        raise OutputError(
            f"{what} cannot be written: {error.strerror or error}",
            where=str(root),
            hint="data.cache_dir=DIR or DATASET_CACHE_DIR=DIR, a folder you can write to",
        ) from error
    return root / key, True


@contextlib.contextmanager
def _building(root: Path, key: str) -> Generator[None]:
    """Hold the lock of a key, saying meanwhile who else holds it."""
    lock, builder = FileLock(root / f"{key}.lock"), root / f"{key}.builder"
    told = -WAIT_MESSAGE_SECONDS
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            if time.monotonic() - told >= WAIT_MESSAGE_SECONDS:
                told = time.monotonic()
                who, how_far = _read_builder(builder)
                logger.info("[Cache] waiting for %s, who is building %s%s", who, root / key, how_far)
            time.sleep(POLL_SECONDS)
    try:
        write_json(builder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        builder.unlink(missing_ok=True)
        lock.release()


def note_progress(folder: Path, progress: str) -> None:
    """Tell those who wait for a folder that is being filled how far it is. Nobody's build fails for want of a note."""
    key, _, staged = folder.name.partition(".tmp-")
    if staged:
        builder = folder.with_name(f"{key}.builder")
        temporary = builder.with_name(f"{builder.name}.tmp-note")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "progress": progress}
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(note) + "\n", encoding="utf-8")
            temporary.replace(builder)


def _read_builder(path: Path) -> tuple[str, str]:
    """Who builds, and how far it is."""
    found = _read_json(path)
    if not found:
        return "another process", ""
    progress = found.get("progress", "")
    return f"process {found.get('pid')} on {found.get('host')}", f" ({progress})" if progress else ""


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is none to be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Entry:
    """One cache, as `lockstep prepare --list` shows it."""

    key: str
    folder: Path
    bytes: int  # with the chunks of a stream
    age_seconds: float
    meta: Mapping[str, Any]  # as in meta.json; empty if that is damaged
    chunks: tuple[Mapping[str, Any], ...] = ()  # of a stream, as each describes itself; the first lies in `folder`

    @property
    def state(self) -> str:
        """`whole`, or what there is of it."""
        if not (self.folder / MANIFEST).is_file():
            return "remains"
        stream: Any = self.meta.get("stream")
        if not isinstance(stream, dict):
            return "whole"
        last = self.chunks[-1] if self.chunks else cast("dict[str, Any]", stream).get("head")
        ended = isinstance(last, Mapping) and cast("Mapping[str, Any]", last).get("last") is True
        return "whole" if ended else f"{1 + len(self.chunks)} chunks so far"


def entries(root: Path) -> list[Entry]:
    """The caches in a folder, unfinished streams among them, newest first."""
    found: list[Entry] = []
    names = {
        path.name.removesuffix(".chunks") for path in (root.iterdir() if root.is_dir() else ()) if _is_folder(path)
    }
    for key in sorted(name for name in names if KEY.fullmatch(name)):
        folder, rest = root / key, root / f"{key}.chunks"
        files = [path for part in (folder, rest) if _is_folder(part) for path in part.rglob("*")]
        size = sum(path.stat().st_size for path in files if path.is_file())
        age = time.time() - max(part.stat().st_mtime for part in (folder, rest) if _is_folder(part))
        chunks = tuple(_read_json(path) for path in sorted(rest.glob("*/chunk.json")))
        found.append(Entry(key, folder, size, max(0.0, age), _read_json(folder / "meta.json"), chunks))
    return sorted(found, key=lambda entry: entry.age_seconds)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def clean(root: Path) -> list[str]:
    """Remove every cache in a folder and what belongs to it, nothing else; one being built or streamed stays."""
    ours = [path for path in (root.iterdir() if root.is_dir() else ()) if _is_ours(path)]
    removed: list[str] = []
    for key in sorted({path.name[:KEY_LENGTH] for path in ours}):
        locks = [FileLock(root / f"{key}{suffix}") for suffix in (".lock", ".stream.lock")]
        try:
            for lock in locks:
                lock.acquire(timeout=0)
        except Timeout:
            continue
        else:
            for path in sorted(path for path in ours if path.name.startswith(key)):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(path.name)
            for lock in locks:
                Path(lock.lock_file).unlink(missing_ok=True)
        finally:
            for lock in locks:
                lock.release()
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if LOOSE.fullmatch(path.name) and path.is_file():
            path.unlink()
            removed.append(path.name)
    return removed


def _is_ours(path: Path) -> bool:
    """Whether we made it: by its name, and a finished folder also by its manifest."""
    match = OURS.fullmatch(path.name)
    if match is None or path.is_symlink():
        return False
    return bool(match["beside"]) or (path / MANIFEST).is_file()
