"""Files packed by bzip2."""

from __future__ import annotations

import bz2
import contextlib
from collections.abc import Generator
from typing import BinaryIO, cast

from lockstep.formats import damaged, is_of_content

BEGINS = (b"1AY&SY", b"\x17rE8P\x90")  # a block, or the end of a stream without any
MAGIC = tuple(b"BZh%d%b" % (level, begins) for level in range(1, 10) for begins in BEGINS)  # BZh alone may be text


@contextlib.contextmanager
def unpack(file: BinaryIO, where: str) -> Generator[BinaryIO]:
    """The stream inside, unpacked as it is read."""
    try:
        with bz2.BZ2File(file) as unpacked:
            yield cast("BinaryIO", unpacked)
    except (EOFError, OSError) as error:
        if isinstance(error, OSError) and not is_of_content(error):
            raise
        raise damaged(error, where, "bz2") from error
