"""Randomness of a stream as a pure function of (seed, task, stream, purpose, time): no generator, no order of drawing.

So a history does not depend on which others are made beside it, on the device, or on an interruption.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

ACTION, EXPLORE, TARGET, ORDER, WEIGHTS, SHUFFLE, WALK = 1, 2, 4, 5, 6, 7, 8  # purposes: no hash is used twice


def _signed(value: int) -> int:
    """The 64-bit pattern as torch's int64 spells it."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


GAMMA, MIX_1, MIX_2 = (_signed(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(numbers: Tensor) -> Tensor:
    """A well-mixed 64-bit hash of each element (splitmix64). int64 wraps; >> copies the sign, so it is masked off."""
    z = numbers + GAMMA
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= MIX_1
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= MIX_2
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def keys(tasks: Tensor, streams: Tensor, *, seed: int) -> Tensor:
    """One number per stream, from which all its randomness comes."""
    first = mix(torch.full_like(tasks, _signed(seed)))
    return mix(mix(first ^ tasks) ^ streams)


def bits(keys: Tensor, purpose: int, time: int | Tensor) -> Tensor:
    """64 random bits per stream, for a purpose at a time."""
    if isinstance(time, int):
        return mix(keys ^ (_signed(purpose * GAMMA) ^ _signed(time * MIX_2)))
    return mix(keys ^ (time * MIX_2 ^ _signed(purpose * GAMMA)))


def uniform(bits: Tensor) -> Tensor:
    """float32 in [0, 1), from the upper 24 bits."""
    return ((bits >> 40) & 0xFFFFFF).float() * 2.0**-24


def heights(shares: Tensor) -> Tensor:
    """Running sums over the last dimension, in double: torch's own have no kernel on a GPU that repeats its bits."""
    return torch.stack(list(accumulate(shares.double().unbind(-1))), -1)


def below(bits: Tensor, limit: int) -> Tensor:
    """A whole number below a small limit, from the lower 32 bits."""
    return (bits & 0xFFFFFFFF) * limit >> 32


def pick(mask: Tensor, bits: Tensor) -> Tensor:
    """(...,): one of the places that are set in (..., n), each as likely; 0 where none is."""
    counts = mask.cumsum(-1, dtype=torch.int32)
    total = counts[..., -1]
    rank = ((bits & 0xFFFFFFFF) * total >> 32).to(torch.int32)
    return torch.searchsorted(counts, (rank + 1)[..., None]).squeeze(-1).clamp_(max=mask.shape[-1] - 1)
