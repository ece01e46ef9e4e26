"""Which elements of a tensor are wrong: from two dumps, or, where none was kept, from two digests alone. Torch-free.

A digest is (sum x_i, sum k(i) x_i) mod 2^64, see health/fingerprint.py. If one element differs by d, the two sums
differ by d and by k(i) d: the element is the one whose key fits. A bit that flipped once, long ago, is found that way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.check.outcome import Difference
from lockstep.check.records import Work
from lockstep.errors import DataError

CHUNK_ELEMENTS = 1 << 18  # of keys at a time: they stay in the processor's cache
SHOWN = 8  # elements a report tells of
WORD_BITS = 64
WORD = (1 << WORD_BITS) - 1
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Element:
    """The one element that differs, and by how much: its bits as an integer, wrong minus right."""

    index: int  # flat
    change: int


@dataclass(frozen=True)
class Elements:
    """Where two tensors differ: how many elements, and of the first ones flat index and bits."""

    count: int
    indices: tuple[int, ...] = ()
    right: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def single(right: str, wrong: str, *, elements: int, element_bytes: int) -> Element | None:
    """The element that alone explains the difference of two digests in hex; None: more than one, or nobody can say."""
    plain, keyed = ((b - a) & WORD for a, b in zip(_sums(right), _sums(wrong), strict=True))
    change = _as_signed(plain)
    if change == 0 or abs(change) >> (8 * element_bytes):
        return None
    shift = (change & -change).bit_length() - 1  # the power of two in it: so many high bits of the key are lost
    if keyed & ((1 << shift) - 1):
        return None
    modulus = 1 << (WORD_BITS - shift)
    key = (keyed >> shift) * pow(plain >> shift, -1, modulus) % modulus
    fits = _with_key(key, modulus - 1, elements)
    return Element(fits[0], change) if len(fits) == 1 else None


def compare(right: bytes, wrong: bytes, *, element_bytes: int) -> Elements:
    """All elements of two dumps of one tensor, bit by bit."""
    if len(right) != len(wrong):
        raise DataError(f"two dumps of one tensor have {len(right)} and {len(wrong)} bytes")
    kind = np.dtype(f"<u{element_bytes}")
    a, b = np.frombuffer(right, kind), np.frombuffer(wrong, kind)
    count, first = 0, list[int]()
    for start in range(0, a.size, CHUNK_ELEMENTS):
        stop = start + CHUNK_ELEMENTS
        places = np.flatnonzero(a[start:stop] != b[start:stop])
        count += places.size
        first += [start + int(place) for place in places[: SHOWN - len(first)]]
    shown = [(_hex(int(a[i]), element_bytes), _hex(int(b[i]), element_bytes)) for i in first]
    return Elements(count, tuple(first), tuple(pair[0] for pair in shown), tuple(pair[1] for pair in shown))


def describe(
    difference: Difference, *, right: Work, wrong: Work, right_dump: bytes | None, wrong_dump: bytes | None = None
) -> Difference:
    """A difference with its elements: how many, where, and both values, as far as what was kept can tell.

    `right_dump` is of a healthy card. Without `wrong_dump` (the fault did not come back) the two digests tell of a
    single element.
    """
    if difference.tensor not in right.tensors:
        return difference  # loss or norm: the value is in the record
    place = right.tensors.index(difference.tensor)
    shape, element_bytes = right.shapes[place], bytes_of(right.dtypes[place])
    if right_dump is not None and wrong_dump is not None:
        found = compare(right_dump, wrong_dump, element_bytes=element_bytes)
        return _filled(difference, found, shape) if found.count else difference
    a, b = (_sum_at(work, difference.step, place) for work in (right, wrong))
    element = single(a, b, elements=math.prod(shape), element_bytes=element_bytes) if a and b else None
    if element is None:
        return difference
    if right_dump is None:
        return dataclasses.replace(difference, elements=1, positions=(unravel(element.index, shape),))
    raw = right_dump[element.index * element_bytes : (element.index + 1) * element_bytes]
    value = int.from_bytes(raw, "little", signed=True)
    found = Elements(1, (element.index,), (_hex(value, element_bytes),), (_hex(value + element.change, element_bytes),))
    return _filled(difference, found, shape)


def bytes_of(dtype: str) -> int:
    """The size of one element, from the name torch gives its type: the digits in it are bits."""
    name = dtype.removeprefix("torch.")
    if name == "bool":
        return 1
    digits = name.removeprefix("bfloat").lstrip("abcdefghijklmnopqrstuvwxyz").partition("_")[0]  # float8_e4m3fn
    if not digits.isdecimal() or int(digits) not in (8, 16, 32, 64):
        raise DataError(f"no digest is taken of elements of type {dtype!r}")
    return int(digits) // 8


def read_dump(path: Path) -> bytes:
    """The bytes of the one tensor in a safetensors file, whatever its type."""
    from safetensors import SafetensorError, deserialize

    try:
        held = deserialize(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from None
    except SafetensorError as error:
        raise DataError(f"is no dump of a tensor: {error}", where=str(path)) from None
    if len(held) != 1:
        raise DataError(f"holds {len(held)} tensors, a dump holds one", where=str(path))
    return bytes(held[0][1]["data"])


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A flat index as one for each dimension."""
    place: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    return tuple(place)


def keys(start: int, stop: int) -> Words:
    """k(i) for start <= i < stop, the same words as health.fingerprint.keys."""
    z = np.arange(start, stop, dtype=np.uint64)
    z += np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    z |= np.uint64(1)
    return z


def _with_key(key: int, mask: int, elements: int) -> list[int]:
    """The elements whose key has these bits under the mask; two are enough to know that nobody can say."""
    fits: list[int] = []
    wanted, kept = np.uint64(key), np.uint64(mask)
    for start in range(0, elements, CHUNK_ELEMENTS):
        found = np.flatnonzero((keys(start, min(start + CHUNK_ELEMENTS, elements)) & kept) == wanted)
        fits += [start + int(place) for place in found]
        if len(fits) > 1:
            break
    return fits


def _filled(difference: Difference, found: Elements, shape: Sequence[int]) -> Difference:
    return dataclasses.replace(
        difference,
        elements=found.count,
        positions=tuple(unravel(index, shape) for index in found.indices),
        right=found.right,
        wrong=found.wrong,
    )


def _sum_at(work: Work, step: int, place: int) -> str:
    return next((stamp.sum_of(place) for stamp in work.stamps if stamp.step == step), "")


def _sums(digest: str) -> tuple[int, int]:
    return int(digest[:16], 16), int(digest[16:], 16)


def _as_signed(word: int) -> int:
    return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word


def _hex(value: int, element_bytes: int) -> str:
    return f"0x{value & ((1 << 8 * element_bytes) - 1):0{2 * element_bytes}x}"
