"""Files packed by zstd, which pyarrow unpacks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from importlib import import_module
from typing import BinaryIO

from lockstep.errors import LockstepError
from lockstep.formats import damaged, is_of_content


@contextlib.contextmanager
def unpack(file: BinaryIO, where: str) -> Generator[BinaryIO]:
    """The stream inside, unpacked as it is read."""
    try:
        arrow = import_module("pyarrow")
    except ImportError as error:
        raise LockstepError(
            "pyarrow, which unpacks .zst, is not installed", where=where, hint="pip install pyarrow"
        ) from error
    try:
        with arrow.CompressedInputStream(file, "zstd") as unpacked:
            yield unpacked
    except OSError as error:
        if not is_of_content(error):
            raise
        raise damaged(error, where, "zst") from error
