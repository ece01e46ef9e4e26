"""The noise of masked diffusion: how much of each row is hidden, and which of its tokens. Torch-free.

Times are drawn for the global batch of a step together. With B rows, slot k gets

    t_k = frac(u + perm(k) / B),      u uniform from (seed, step),

so each t is uniform by itself and every expectation stays exact, while in each step every B-th part of [0, 1) holds
exactly one of them: far less noise than B free draws (Kingma et al. 2021). perm(k) = k * s mod B with s near B over the
golden ratio and prime to B: by the three-distance theorem any run of neighbouring slots, hence each micro-batch of each
rank, spreads over the whole range too.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lockstep.runtime.splitmix import splitmix64

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.runtime.splitmix import U64

GOLDEN = (math.sqrt(5) - 1) / 2
TOKENS, TIMES, CUT, LENGTH = (0x6D6468, 0x6D6474, 0x6D6463, 0x6D646C)  # no hash is used twice
MOST = 1 - 2.0**-53  # of a share, so that it fits 64 bits


def times(slots: Array, *, seed: int, step: int, batch_rows: int) -> Array:
    """t of some slots of the global batch, float64 in [0, 1)."""
    offset, _, _ = of_step(seed, step)
    turned = slots.astype(np.int64) * _stride(batch_rows) % batch_rows
    return (offset + turned / batch_rows) % 1.0


def hidden(ids: Array, epochs: Array, shares: Array, *, seed: int, length: int) -> Array:
    """(n, length) bool: each token of a row with the row's share as its chance, from (seed, epoch, row, position)."""
    of_epoch = splitmix64(_key(TOKENS, seed) + epochs.astype(np.uint64))
    of_row = splitmix64(of_epoch + ids.astype(np.uint64))
    limits = (np.minimum(shares, MOST) * 2.0**64).astype(np.uint64)
    return splitmix64(of_row[:, None] + _positions(length)) < limits[:, None]


def cut_length(length: int, *, seed: int, step: int, probability: float) -> int:
    """How long the rows of a step are: all of it, or with this probability uniform from 1 to all of it."""
    _, drawn, share = of_step(seed, step)
    return length if drawn >= probability else 1 + int(share * length)


@lru_cache(maxsize=64)
def of_step(seed: int, step: int) -> tuple[float, float, float]:
    """Three numbers in [0, 1) for a step: where its times begin, whether its rows are cut, and to which length."""
    keys = np.array([_key(purpose, seed) for purpose in (TIMES, CUT, LENGTH)], np.uint64) + np.uint64(step)
    offset, cut, length = ((splitmix64(splitmix64(keys)) >> np.uint64(11)) * 2.0**-53).tolist()
    return offset, cut, length


@lru_cache(maxsize=64)
def _key(purpose: int, seed: int) -> np.uint64:
    """What all hashes of a purpose begin with."""
    first, second = splitmix64(np.array([purpose, seed & (1 << 64) - 1], np.uint64))
    return first ^ second


@lru_cache(maxsize=64)
def _stride(batch_rows: int) -> int:
    """Near the golden section of the batch and prime to its size."""
    wanted = max(1, round(batch_rows * GOLDEN))
    return next(
        stride
        for distance in range(batch_rows + 1)
        for stride in (wanted + distance, wanted - distance)
        if stride > 0 and math.gcd(stride, batch_rows) == 1
    )


@lru_cache(maxsize=8)
def _positions(length: int) -> U64:
    hashed = splitmix64(np.arange(length, dtype=np.uint64))
    hashed.setflags(write=False)
    return hashed
