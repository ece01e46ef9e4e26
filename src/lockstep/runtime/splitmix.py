"""A hash of numbers for numbers: randomness that is a pure function of where it is drawn. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    U64 = np.ndarray[Any, np.dtype[np.uint64]]


def splitmix64(x: U64) -> U64:
    """A well-mixed 64-bit hash of each element (Steele, Lea and Flood 2014)."""
    mixed = x.copy()
    mix_in_place(mixed, np.empty_like(x))
    return mixed


def mix_in_place(x: U64, scratch: U64) -> None:
    """The same in place: fresh memory for each intermediate would cost as much as the arithmetic."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= np.right_shift(x, np.uint64(30), out=scratch)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=scratch)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=scratch)
