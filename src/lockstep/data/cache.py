"""Prepared datasets on disk: rows of named columns, memory-mapped, built once, checked on every opening.

    <cache_dir>/<key>/          appears whole or not at all (rundir.publishing)
        manifest.json           size and SHA-256 of every file below
        meta.json               for people: source, tokenizer, counts, versions, and what the key was made of
        tokenizer.json  tokenizer_config.json
        train/  validation/     rows.json, and one <column>.npy of shape (rows, width) per column
    <key>.lock                  held while building; the kernel frees it with its process
    <key>.builder               who holds it, for those who wait
    <key>.checked               size and times of each file when its whole content was last found good
    <key>.parts/                what a build has fetched of remote files so far: one that was killed goes on with it

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lockstep.data.builders import building, read_json
from lockstep.errors import DataError, LockstepError, OutputError
from lockstep.rundir import MANIFEST, io_error, publishing, verify, write_json
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array

logger = logging.getLogger(__name__)

FORMAT = 2
KEY_LENGTH = 40  # longer than the md5 names of other people's caches
KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")
SPLITS = ("train", "validation")
REQUIRED = ("meta.json", "tokenizer.json", *(f"{split}/rows.json" for split in SPLITS))
MEMO = "lockstep-hashes.json"  # hashes of large source files, kept by the sources
LOOSE = (MEMO, "lockstep-hub.json", "lockstep-hub.json.lock")  # of no one key
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_PLACE = (errno.EEXIST, errno.ENOENT, errno.ENOTDIR)  # where no folder can be made: a file, something below it, /proc
ALWAYS_HASHED_BYTES = 32 << 20  # caches up to this size are hashed whole on every opening: a few hundredths of a second


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
    def row_bytes(self) -> int:
        """Of one row on disk."""
        return sum(column.itemsize * int(np.prod(column.shape[1:])) for column in self._plain.values())

    def take(self, ids: Array, *, as_stored: bool = False, only: Collection[str] = ()) -> dict[str, Array]:
        """Copies of some rows: column -> (n, width), in the type the objective asked for or in that on disk.

        Of all columns, or of those named by `only`.
        """
        taken = {name: self._plain[name].take(ids, 0) for name in only or self._plain}
        if as_stored:
            return taken
        return {name: rows.astype(self.dtypes[name], copy=False) for name, rows in taken.items()}


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

    A small cache is hashed whole, a large one only if its files do not carry the sizes and times of the last check.
    """
    stamp = folder.with_name(f"{folder.name}.checked")
    verify(folder, content=False, required=REQUIRED)
    try:
        large = sum(_sizes(folder)) > ALWAYS_HASHED_BYTES
        if large and not full and read_json(stamp) == _stamp(folder):
            return
    except FileNotFoundError as error:  # taken away while we looked
        raise DataError("missing file", where=str(error.filename)) from error
    with contextlib.suppress(OSError):  # what is found damaged now must not pass for good later
        stamp.unlink()
    verify(folder)
    for split in SPLITS:
        Table(folder / split)
    if large:
        with contextlib.suppress(OSError):  # a read-only place: checked whole again next time
            write_json(stamp, _stamp(folder))


def _stamp(folder: Path) -> dict[str, list[int]]:
    """Size and times of each file: no write can leave them as they were."""
    files = ((path.relative_to(folder).as_posix(), path.stat()) for path in sorted(_files(folder)))
    return {name: [status.st_size, status.st_mtime_ns, status.st_ctime_ns] for name, status in files}


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder; what is still being written there is none."""
    for top, folders, names in os.walk(folder):  # which passes over what vanishes meanwhile
        folders[:] = [name for name in folders if ".tmp-" not in name]
        yield from (Path(top, name) for name in names if ".tmp-" not in name)


def _sizes(folder: Path) -> Iterator[int]:
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_size


def parts_folder(root: Path, key: str) -> Path:
    """Where a build keeps what it has fetched, until the cache is whole."""
    return root / f"{key}.parts"


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
        with building(root, key):
            found, _ = find(key, [root], level=logging.DEBUG)
            if found:  # built while we waited
                return found, False
            for leftover in root.glob(f"{key}.tmp-*"):  # of a builder that died: we hold its lock
                shutil.rmtree(leftover, ignore_errors=True)
            with publishing(root / key) as folder:
                build(folder)
            check(root / key, full=True)
            shutil.rmtree(parts_folder(root, key), ignore_errors=True)
    except OSError as error:
        what = f"the dataset cache is damaged ({damage}) and" if damage else "the dataset cache"
        hint = "data.cache_dir=DIR or DATASET_CACHE_DIR=DIR, a folder you can write to"
        raise _refused(
            error, root, what=f"{what} cannot be written", doing="building the dataset cache", hint=hint
        ) from error
    return root / key, True


def _refused(error: OSError, root: Path, *, what: str, doing: str, hint: str) -> LockstepError:
    """An OSError as a user should read it: a place that may only be read, or is no folder, has its own words."""
    if error.errno not in READ_ONLY and (error.errno not in NO_PLACE or root.is_dir()):
        return io_error(error, root, doing=doing)
    return OutputError(f"{what}: {error.strerror or error}", where=str(root), hint=hint)


@dataclass(frozen=True)
class Entry:
    """One cache, as `lockstep prepare --list` shows it."""

    folder: Path
    bytes: int
    meta: Mapping[str, Any]  # as in meta.json; empty where there is none


def entries(root: Path) -> list[Entry]:
    """The caches in a folder, and what unfinished builds have fetched."""
    here = sorted(root.iterdir()) if root.is_dir() else []
    folders = [path for path in here if _is_ours(path) and path.suffix in ("", ".parts")]
    return [Entry(folder, sum(_sizes(folder)), read_json(folder / "meta.json")) for folder in folders]


def clean(root: Path, *, dry_run: bool = False) -> list[str]:
    """Remove every cache in a folder and what belongs to it, nothing else; one being built stays.

    dry_run: only name what would go.
    """
    try:
        return _cleaned(root, dry_run=dry_run)
    except OSError as error:
        hint = f"as the owner of {root}"
        what, doing = "the dataset cache cannot be removed", "removing the dataset cache"
        raise _refused(error, root, what=what, doing=doing, hint=hint) from error


def _cleaned(root: Path, *, dry_run: bool) -> list[str]:
    here = sorted(root.iterdir()) if root.is_dir() else []
    ours = [path for path in here if _is_ours(path)]
    removed: list[Path] = []

    def remove(paths: list[Path]) -> None:
        removed.extend(paths)
        for path in () if dry_run else paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    for key in sorted({path.name[:KEY_LENGTH] for path in ours}):
        lock = FileLock(root / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            remove([path for path in ours if path.name.startswith(key)])
            if (file := Path(lock.lock_file)) not in ours:  # only there since we asked
                file.unlink(missing_ok=True)
        finally:
            lock.release()
    remove([path for path in here if path.name in LOOSE and path.is_file()])
    return [path.name for path in removed]


def _is_ours(path: Path) -> bool:
    """A folder with our manifest that is called by a key, or anything whose name goes on from a key with a dot."""
    key, beside, _ = path.name.partition(".")
    return bool(KEY.fullmatch(key) and not path.is_symlink() and (beside or (path / MANIFEST).is_file()))
