"""Files packed by bzip2."""

from __future__ import annotations

import bz2
import contextlib
from collections.abc import Generator
from typing import BinaryIO, cast

from lockstep.formats import damaged, is_of_content


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
