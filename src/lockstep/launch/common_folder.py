"""The folder that workers of a foreign launcher share on one node: made by the first, kept by all, swept when left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from lockstep.errors import OutputError

ALIVE = "alive"  # locked by everyone who needs the folder, until his end


def hold(folder: Path) -> None:
    """Make the folder, or find it, and keep it from being swept away as long as this process lives."""
    while True:
        own(folder)
        with contextlib.suppress(FileNotFoundError):  # swept between two lines
            if keep(folder, os.O_CREAT):
                return


def keep(folder: Path, flags: int = 0) -> bool:
    """Hold a folder that is there. False: it was swept away meanwhile."""
    alive = os.open(folder / ALIVE, flags | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(alive, fcntl.LOCK_SH)
    if os.fstat(alive).st_nlink:
        return True  # open from here on
    os.close(alive)
    return False


def own(folder: Path) -> None:
    """Make the folder, or make sure that nobody else did: it is in a place where everyone may write."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            hint = "set TMPDIR to a folder of your own"
            raise OutputError("this folder of workers is not ours", where=str(folder), hint=hint) from None


def sweep() -> None:
    """Remove what is left of launchers that are gone. One that we cannot see may live in another PID namespace."""
    prefix = f"lockstep-{os.getuid()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        parent = folder.name.removeprefix(prefix).partition("-")[0]
        if parent.isdigit() and not Path(f"/proc/{parent}").exists() and not folder.is_symlink():
            discard(folder)


def discard(folder: Path) -> None:
    """Remove it, unless somebody who needs it lives."""
    with contextlib.suppress(OSError):
        alive = os.open(folder / ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(alive)
