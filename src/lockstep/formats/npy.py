"""NumPy arrays of token ids: a row of a 2-D array is a record; a 1-D array is cut into records of equal length.

Plain reads, a few rows at a time, are as flat in memory as a map of the file, work on any file object, and turn a file
that is cut short meanwhile into a message instead of a bus error.
"""

from __future__ import annotations

import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from lockstep.contracts import PROMPT
from lockstep.errors import DataError
from lockstep.formats import RECORD_BYTES, Reading
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array

READ_BYTES = 1 << 22
SHARE_OF_DOCUMENT = 40  # as for .txt
MIN_PIECE_IDS, MAX_PIECE_IDS = 1 << 8, 1 << 18
HEADER_ERRORS = (
    ValueError,
    TypeError,
    EOFError,
    SyntaxError,
    RecursionError,
    MemoryError,
    OverflowError,
    tokenize.TokenError,
)
MAX_ID = PROMPT - 1
SAVED = "numpy.save(FILE, ids.astype(numpy.uint32))"


@dataclass(frozen=True)
class _Layout:
    """What the header says: `ids` ids, `length` of them a record (the last may be shorter)."""

    dtype: np.dtype[Any]
    ids: int
    length: int


def read(file: BinaryIO, how: Reading, start: int) -> Iterator[Array]:
    """One uint32 array of ids per record; records before `start` are not read unless the file is packed."""
    layout = _layout(file, how)
    skipped = min(start * layout.length, layout.ids)
    if how.kind.packing:
        _skip(file, skipped * layout.dtype.itemsize)
    else:
        file.seek(skipped * layout.dtype.itemsize, 1)
    left = layout.ids - skipped
    at_once = layout.length * max(1, READ_BYTES // (layout.length * layout.dtype.itemsize))
    while left:
        ids = np.frombuffer(_exactly(file, min(at_once, left) * layout.dtype.itemsize, how), layout.dtype)
        if ids.min() < 0 or ids.max() > MAX_ID:
            wrong = int(np.flatnonzero((ids < 0) | (ids > MAX_ID))[0])
            record = (layout.ids - left + wrong) // layout.length
            raise DataError(
                f"{ids[wrong]} is no token id",
                where=f"{how.where}: record {record}",
                hint="leave out what only fills up or masks: ids[ids >= 0]",
            )
        narrow = ids.astype(np.uint32)
        for place in range(0, len(narrow), layout.length):
            yield narrow[place : place + layout.length].copy()  # not a view that keeps all of them
        left -= len(ids)


def _layout(file: BinaryIO, how: Reading) -> _Layout:
    """The header, judged. Nothing is unpickled: it says so itself if anything were."""
    try:
        with warnings.catch_warnings():  # about headers of Python 2, and about what only looks like one
            warnings.simplefilter("ignore")
            shape, fortran, dtype = _header(file)
    except HEADER_ERRORS as error:
        raise DataError(f"not a readable .npy file: {error}", where=how.where, hint=SAVED) from error
    if dtype.kind not in "iu":
        raise DataError(f"token ids are integers, this array holds {dtype}", where=how.where, hint=SAVED)
    if len(shape) not in (1, 2) or any(size < 1 for size in shape[1:]):
        raise DataError(
            f"an array of documents x ids, or of ids, was expected; its shape is {shape}",
            where=how.where,
            hint="numpy.save(FILE, ids.reshape(-1))",
        )
    if fortran and len(shape) == 2 and min(shape) > 1:
        raise DataError(
            "columns lie together, not rows", where=how.where, hint="save numpy.ascontiguousarray of the array"
        )
    ids = shape[0] * (shape[1] if len(shape) == 2 else 1)
    length = shape[1] if len(shape) == 2 else min(max(ids // SHARE_OF_DOCUMENT, MIN_PIECE_IDS), MAX_PIECE_IDS)
    if ids < 0 or length * dtype.itemsize > RECORD_BYTES:
        raise DataError(
            f"its shape is {shape}: too large for a document", where=how.where, hint="numpy.save(FILE, ids.reshape(-1))"
        )
    return _Layout(dtype, ids, length)


def _header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns lie together, and type."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in headers:
        raise ValueError(f"format version {version}")
    return headers[version](file)


def _exactly(file: BinaryIO, size: int, how: Reading) -> bytes:
    """The next bytes, all of them."""
    parts: list[bytes] = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    if size:
        raise DataError(f"cut short: at least {size} bytes are missing", where=how.where, hint="fetch it again")
    return b"".join(parts)


def _skip(file: BinaryIO, size: int) -> None:
    while size and (part := file.read(min(size, READ_BYTES))):
        size -= len(part)
