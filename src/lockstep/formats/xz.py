"""Files packed by xz."""

from __future__ import annotations

import contextlib
import lzma
from collections.abc import Generator
from typing import BinaryIO, cast

from lockstep.formats import damaged

MAGIC = b"\xfd7zXZ\x00"


@contextlib.contextmanager
def unpack(file: BinaryIO, where: str) -> Generator[BinaryIO]:
    """The stream inside, unpacked as it is read."""
    try:
        with lzma.LZMAFile(file) as unpacked:
            yield cast("BinaryIO", unpacked)
    except (EOFError, lzma.LZMAError) as error:
        raise damaged(error, where, "xz") from error
