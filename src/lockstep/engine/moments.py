"""AdamW's moments in bf16, rounded at random, unbiased.

With beta2 = 0.999 a step changes the second moment by a thousandth, and bf16 has 256 numbers from one power of two to
the next: rounded to the nearest, a moment never moves again. Rounded up or down with the right chances, its
expectation is what fp32 would hold. The chances come from a hash of (seed, parameter, step, place in the whole
tensor): no generator, the same numbers however the tensor is cut, and after a resume.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MOMENTS = FIRST, SECOND = "exp_avg", "exp_avg_sq"
WORD = 1 << 32


def signed(value: int) -> int:
    """The lowest 32 bits as torch's int32 spells them."""
    value %= WORD
    return value - WORD if value >= WORD >> 1 else value


MIX_1, MIX_2, STRIDE = signed(0x7FEB352D), signed(0x846CA68B), signed(0x9E3779B1)


def stream_key(seed: int, name: str) -> int:
    """Where the noise of one parameter begins."""
    return signed(int.from_bytes(hashlib.sha256(f"rounding\n{seed}\n{name}".encode()).digest()[:4], "little"))


def mixed(x: Tensor) -> Tensor:
    """A well-mixed 32-bit hash of each number (Wellons' lowbias32); int32 wraps, >> copies the sign."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * MIX_1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def noise(shape: torch.Size, *, first: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """32 random bits for each element of a run of rows; `first` is the flat index of its first element in the whole."""
    places = torch.arange(shape.numel(), dtype=torch.int32, device=key.device).view(shape)
    one, other = mixed(key + mixed(step)), mixed((key ^ STRIDE) + mixed(step + 1))
    return mixed(mixed((places + first) * STRIDE + one) ^ other)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """One of the two neighbours, with chances that make the expectation x; `bits` are numbers of 16 bits."""
    return ((x.float().view(torch.int32) + bits) & -65536).view(torch.float32).to(torch.bfloat16)


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of 16 bits."""
    return bits & 0xFFFF, (bits >> 16) & 0xFFFF
