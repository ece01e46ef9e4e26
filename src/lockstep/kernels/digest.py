"""The digest of tensors of equal length in one launch: each key is computed once and used for all of them. Triton.

The plain reference is health.fingerprint.digest_tensor. Sums of integers wrap around and do not depend on their order,
so the atomics at the end cost no bit: every launch gives the same sums. Import this only where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton  # comes with torch for CUDA
import triton.language as tl
from torch import Tensor

TOGETHER = 4  # tensors of one launch
BLOCK = 1024
WARPS = 4
ROUNDS = 16  # blocks of one program: few programs, so few atomics on the same two words


@triton.jit
def _key(index):  # Triton reads the body; types are the caller's
    """splitmix64 | 1."""
    z = index + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _word(bits, index, inside):
    """The bits of some elements as words of 64 bits, sign and all."""
    return tl.load(bits + index, mask=inside, other=0).to(tl.int64).to(tl.uint64)


@triton.jit
def _add_up(  # noqa: PLR0913 - four tensors and where their sums go
    bits_0, bits_1, bits_2, bits_3, sums_0, sums_1, sums_2, sums_3,
    count, offset, TENSORS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds both sums of each tensor to its two words."""
    plain_0 = tl.zeros((BLOCK,), dtype=tl.uint64)
    plain_1, plain_2, plain_3 = plain_0, plain_0, plain_0
    keyed_0, keyed_1, keyed_2, keyed_3 = plain_0, plain_0, plain_0, plain_0
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    for turn in range(ROUNDS):
        index = first + turn * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        key = _key((index + offset).to(tl.uint64))
        x = _word(bits_0, index, inside)
        plain_0, keyed_0 = plain_0 + x, keyed_0 + key * x
        if TENSORS > 1:
            x = _word(bits_1, index, inside)
            plain_1, keyed_1 = plain_1 + x, keyed_1 + key * x
        if TENSORS > 2:
            x = _word(bits_2, index, inside)
            plain_2, keyed_2 = plain_2 + x, keyed_2 + key * x
        if TENSORS > 3:
            x = _word(bits_3, index, inside)
            plain_3, keyed_3 = plain_3 + x, keyed_3 + key * x
    tl.atomic_add(sums_0, tl.sum(plain_0, axis=0).to(tl.int64), sem="relaxed")
    tl.atomic_add(sums_0 + 1, tl.sum(keyed_0, axis=0).to(tl.int64), sem="relaxed")
    if TENSORS > 1:
        tl.atomic_add(sums_1, tl.sum(plain_1, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums_1 + 1, tl.sum(keyed_1, axis=0).to(tl.int64), sem="relaxed")
    if TENSORS > 2:
        tl.atomic_add(sums_2, tl.sum(plain_2, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums_2 + 1, tl.sum(keyed_2, axis=0).to(tl.int64), sem="relaxed")
    if TENSORS > 3:
        tl.atomic_add(sums_3, tl.sum(plain_3, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(sums_3 + 1, tl.sum(keyed_3, axis=0).to(tl.int64), sem="relaxed")


def add_digests(bits: Sequence[Tensor], sums: Sequence[Tensor], offset: int = 0) -> None:
    """Adds the digest of each of up to TOGETHER contiguous integer tensors of one length to its (2,) int64."""
    count = bits[0].numel()
    assert len(bits) == len(sums) <= TOGETHER
    assert all(each.numel() == count and each.is_contiguous() for each in bits)
    if not count:
        return
    filled = [*bits, *[bits[0]] * (TOGETHER - len(bits)), *sums, *[sums[0]] * (TOGETHER - len(sums))]
    rounds = ROUNDS if count >= BLOCK * ROUNDS else 1
    programs = triton.cdiv(count, BLOCK * rounds)
    kernel: Any = _add_up
    with torch.cuda.device(bits[0].device):
        kernel[(programs,)](
            *filled, count, offset, TENSORS=len(bits), ROUNDS=rounds, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip
