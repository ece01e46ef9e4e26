"""The order of rows: a pure function of (seed, epoch, position), so that one integer is the whole state.

Each epoch is a keyed permutation of 0..rows-1: an alternating unbalanced Feistel network on the smallest power of two
that holds them (below 2 * rows), walking along its cycles until the value falls inside the table.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lockstep.runtime.later import numpy as np
from lockstep.runtime.splitmix import mix_in_place, splitmix64

if TYPE_CHECKING:
    from lockstep.runtime.splitmix import U64

    I64 = np.ndarray[Any, np.dtype[np.int64]]

ROUNDS = 12
WINDOW_POSITIONS = 65_536  # permuted at a time: one by one a row costs 37 us, together 60 ns


@cache
def round_keys() -> U64:
    """Far apart: with neighbouring numbers as keys, the small halves of a small table would meet the same hashes again
    in another round, and its rows would not fall evenly."""
    return splitmix64(np.arange(ROUNDS, dtype=np.uint64))


def epoch_keys(seed: int, epochs: U64) -> U64:
    """One key per epoch; equal seeds and epochs give equal keys on every machine."""
    return splitmix64(splitmix64(np.array([seed], np.uint64)) ^ splitmix64(~epochs))


def permute(offsets: U64, keys: U64, *, rows: int) -> U64:
    """Where each offset of its epoch (given by its key) lies in the table."""
    bits = (rows - 1).bit_length()
    low_bits = bits // 2
    low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
    placed, values, key = offsets.copy(), offsets, keys
    outside, rounds = np.arange(len(offsets)), round_keys()
    while len(outside):
        low, high = values & low_mask, values >> np.uint64(low_bits)
        mixed, scratch = np.empty_like(key), np.empty_like(key)
        for turn in range(ROUNDS):
            source, target, mask = (high, low, low_mask) if turn % 2 else (low, high, high_mask)
            np.bitwise_xor(source, np.add(key, rounds[turn], out=mixed), out=mixed)
            mix_in_place(mixed, scratch)
            target ^= np.bitwise_and(mixed, mask, out=mixed)
        values = (high << np.uint64(low_bits)) | low
        placed[outside] = values
        beyond = values >= rows
        outside, values, key = outside[beyond], values[beyond], key[beyond]
    return placed


class Order:
    """Rows of a table in a new random order each epoch. Positions count over all epochs from 0."""

    def __init__(self, rows: int, seed: int) -> None:
        assert rows > 0, "an empty table has no order"
        self.rows = rows
        self.seed = seed
        self._start = -1
        self._ids: I64 = np.empty(0, np.int64)
        self._epochs: I64 = np.empty(0, np.int64)

    def at(self, position: int, count: int) -> tuple[I64, I64]:
        """Row ids and their epochs at positions position .. position + count - 1."""
        start = position - position % WINDOW_POSITIONS
        if position + count <= start + WINDOW_POSITIONS:
            self._load(start)
            part = slice(position - start, position - start + count)
            return self._ids[part], self._epochs[part]
        end = position + count
        cuts = [position, *range(start + WINDOW_POSITIONS, end, WINDOW_POSITIONS), end]
        ids, epochs = zip(*(self.at(left, right - left) for left, right in pairwise(cuts)), strict=True)
        return np.concatenate(ids), np.concatenate(epochs)

    def _load(self, start: int) -> None:
        """Permute the window that begins at `start`, unless it is at hand."""
        if start == self._start:
            return
        positions = np.arange(start, start + WINDOW_POSITIONS, dtype=np.uint64)
        epochs = positions // np.uint64(self.rows)
        offsets = positions - epochs * np.uint64(self.rows)
        first = epochs[0]
        keys = epoch_keys(self.seed, np.arange(first, epochs[-1] + np.uint64(1), dtype=np.uint64))
        ids = permute(offsets, keys[(epochs - first).astype(np.int64)], rows=self.rows)
        self._ids, self._epochs, self._start = ids.astype(np.int64), epochs.astype(np.int64), start
