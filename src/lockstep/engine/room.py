"""Room on the disk for the next checkpoint: taken before the first step, given up to be written to, taken again.

It is held by files without a name beside the checkpoints, one as large as each file to come: limits of a file's size
count for them too, and they are gone with their process, so that nobody ever has to sweep them. Where a file system
sets nothing aside, or would do so in memory, its free space is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lockstep.rundir import NO_ROOM
from lockstep.runtime.parallel import local

logger = logging.getLogger(__name__)

TENSOR_BYTES = 250  # what a header, or an index, says of one, and more
REST_BYTES = 1 << 20  # manifest, folders, the ends of blocks
GROWN_BYTES = REST_BYTES // 2  # what a run may have to tell more since room was taken: that lies in the rest
IN_MEMORY = (0x01021994, 0x858458F6)  # tmpfs, ramfs, as statfs(2) has them
STATFS_BYTES = 256  # more than any system fills

Taken = list[IO[bytes]]


class Room:
    """What one process holds for the files that it will write to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lasting = False  # whether to be taken again after a save: there will be another one
        self._taken: Taken = []
        self._held_bytes = 0
        self._lock = threading.Lock()  # saves are written by a thread of their own
        self._is_told = False

    @property
    def is_held(self) -> bool:
        """Whether something is set aside, and so no longer free."""
        return self._held_bytes > 0

    def take(self, sizes: Sequence[int], *, in_all: int = 0) -> None:
        """Have room for files of these sizes, or raise OSError before anything is written.

        `in_all`: what all processes need together that write there now.
        """
        with self._lock:
            _check_limit(sizes)
            if self._held_bytes and self._held_bytes + GROWN_BYTES >= sum(sizes):
                return
            self._drop()
            self.folder.mkdir(parents=True, exist_ok=True)
            free = free_bytes(self.folder)
            _check_free(free, sum(sizes))
            self._taken = _set_aside(self.folder, sizes)
            self._held_bytes = sum(sizes) if self._taken else 0
            if not self._taken:  # else what the others hold is no longer free
                _check_free(free, in_all)

    def take_again(self, sizes: Sequence[int]) -> None:
        """After a save, for the next one; that there is none now is told once, and may be otherwise by then."""
        if not self.lasting:
            return
        try:
            self.take(sizes)
        except OSError as error:
            if not self._is_told:
                why, size = error.strerror or error, sum(sizes) / 2**20
                logger.warning("No room for the next checkpoint: %s (%.1f MiB needed): %s", why, size, self.folder)
            self._is_told = True

    def give_up(self) -> None:
        """For what it was held for."""
        with self._lock:
            self._drop()

    def close(self) -> None:
        """No more saves are to come."""
        self.lasting = False
        self.give_up()

    def _drop(self) -> None:
        for file in self._taken:
            file.close()
        self._taken, self._held_bytes = [], 0


@dataclass(frozen=True)
class Coming:
    """What a run will write to a folder, if nothing stops it."""

    what: str
    count: int
    size: int  # bytes of each
    kept: int  # of them, the newest; 0: all
    folder: Path
    held: int = 0  # bytes that are set aside for them

    def __str__(self) -> str:
        kept = f"{self.kept} kept, one on its way" if self.kept else "all kept, unless checkpoint.keep_files is set"
        many = f"{self.count} {self.what}{'s'[: self.count != 1]}"
        return f"{many} of {self.size / 2**20:.1f} MiB ({kept}) in {self.folder}"


def foresee(coming: Sequence[Coming]) -> None:
    """Before the first step: a warning for each disk that has no room for all of it."""
    disks: dict[int, list[Coming]] = {}
    for files in coming:
        with contextlib.suppress(OSError):
            disks.setdefault(files.folder.stat().st_dev, []).append(files)
    for together in disks.values():
        free, need = free_bytes(together[0].folder), sum(files.count * files.size for files in together)
        if free is not None and (room := free + sum(files.held for files in together)) < need:
            listed = ", ".join(map(str, together))
            logger.warning("Room for %.1f MiB more, and %.1f are to come: %s", room / 2**20, need / 2**20, listed)


def file_bytes(tensors: Mapping[str, Tensor], names: Iterable[str]) -> int:
    """Of a safetensors file with what lies here of these tensors; rather too much."""
    return sum(local(tensors[name]).nbytes + len(name) + TENSOR_BYTES for name in names)


def free_bytes(folder: Path) -> int | None:
    """What a user without privileges may still write there; None where the file system does not say."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize if about.f_blocks else None


def _check_free(free: int | None, need: int) -> None:
    if free is not None and free < need:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _check_limit(sizes: Sequence[int]) -> None:
    """A limit of this process (ulimit -f) holds for whatever room there is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and max(sizes, default=0) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def _set_aside(folder: Path, sizes: Sequence[int]) -> Taken:
    """Files of these sizes, none where that cannot be; raises OSError if it can be and there is no room."""
    with contextlib.ExitStack() as closing:
        made: Taken = []
        for size in sizes:
            made.append(closing.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0)))
            if not _allocate(made[-1].fileno(), size):
                return []
        closing.pop_all()
        return made


def _allocate(descriptor: int, size: int) -> bool:
    """Set room aside for a file, at once: os.posix_fallocate would write it full of zeros where a disk cannot."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate") or _is_in_memory(libc, descriptor):
        return False
    while libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(max(1, size))):
        code = ctypes.get_errno()
        if code in NO_ROOM:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return False
    return True


def _is_in_memory(libc: Any, descriptor: int) -> bool:
    about = ctypes.create_string_buffer(STATFS_BYTES)  # begins with the kind of file system
    if libc.fstatfs(descriptor, about):
        return False
    return int.from_bytes(about.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in IN_MEMORY
