"""Files packed by gzip."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Generator
from typing import BinaryIO, cast

from lockstep.formats import damaged


@contextlib.contextmanager
def unpack(file: BinaryIO, where: str) -> Generator[BinaryIO]:
    """The stream inside, unpacked as it is read."""
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast("BinaryIO", unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(error, where, "gz") from error
