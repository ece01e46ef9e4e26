"""Fingerprints of tensors: exact, independent of the order of summation, additive over shards.

The digest of a tensor is (sum x_i, sum k(i) x_i) mod 2^64: x_i are the bits of element i read as a signed integer of
the same width, k(i) = splitmix64(i) | 1, and i is the flat index in the whole tensor. A sum of integers does not depend
on how the work is cut; keyed by a hash of the position it sees what plain position weights miss, such as equal flips at
the corners of a rectangle. dtype and shape belong to a tensor's name and enter at the end.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence

import torch

CHUNK_ELEMENTS = 1 << 20  # bounds the memory of the temporaries to about 40 MiB
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = (1 << 64) - 1


def digest_tensor(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The two sums as (2,) int64 on the tensor's device, without waiting for it.

    For a shard, `offset` is the flat index of its first element; the digests of all shards add up to the whole's.
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        x = bits[start : start + CHUNK_ELEMENTS].to(torch.int64)
        first = offset + start
        sums[0] += x.sum()
        sums[1] += keys(first, first + x.numel(), device=flat.device).mul_(x).sum()
    return sums


@torch.no_grad()
def digest_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The digests of whole tensors of one device, as (n, 2) int64, without waiting for it.

    The same sums as digest_tensor's, sooner: tensors of equal length share their keys, and short ones a call.
    """
    sums = torch.zeros(len(tensors), 2, dtype=torch.int64, device=tensors[0].device)
    alike: dict[tuple[int, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.numel(), tensor.element_size()), []).append(place)
    add = _add_by_kernel if sums.device.type == "cuda" and has_kernel() else _add_in_stacks
    rows = list(sums.unbind())
    for (count, size), places in alike.items():
        if count:
            flat = (tensors[place].detach().reshape(-1).contiguous() for place in places)
            add([each.view(INTEGERS[size]) for each in flat], [rows[place] for place in places])
    return sums


def has_kernel() -> bool:
    return importlib.util.find_spec("triton") is not None


def _add_by_kernel(bits: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
    from lockstep.kernels.digest import TOGETHER, add_digests

    for start in range(0, len(bits), TOGETHER):
        add_digests(bits[start : start + TOGETHER], sums[start : start + TOGETHER])


def _add_in_stacks(bits: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
    """A stack has at most CHUNK_ELEMENTS, so a longer tensor is taken alone, piece by piece."""
    count = bits[0].numel()
    if count > CHUNK_ELEMENTS:
        for each, both in zip(bits, sums, strict=True):
            both += digest_tensor(each)
        return
    key = _first_keys(CHUNK_ELEMENTS, bits[0].device)[:count]
    high = max(1, CHUNK_ELEMENTS // count)
    for start in range(0, len(bits), high):
        x = torch.stack(list(bits[start : start + high])).to(torch.int64)
        found = torch.stack((x.sum(1), x.mul_(key).sum(1)), dim=1)
        torch._foreach_add_(list(sums[start : start + high]), list(found.unbind()))  # pyright: ignore[reportPrivateImportUsage]


@functools.lru_cache(maxsize=2)  # 8 MiB, once for each device
def _first_keys(count: int, device: torch.device) -> torch.Tensor:
    return keys(0, count, device=device)


def keys(start: int, stop: int, *, device: torch.device) -> torch.Tensor:
    """k(i) for start <= i < stop: splitmix64 in 64-bit arithmetic that wraps around."""
    z = torch.arange(start, stop, dtype=torch.int64, device=device).add_(_signed(0x9E3779B97F4A7C15))
    z = z.bitwise_xor_(_shift(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z = z.bitwise_xor_(_shift(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(_shift(z, 31)).bitwise_or_(1)


def digest_model(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One hex string for named tensors, whatever their order. Waits for the device once per device."""
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        by_device.setdefault(tensor.device, []).append((name, tensor))
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    for here in by_device.values():
        sums = torch.stack([digest_tensor(tensor) for _, tensor in here]).tolist()
        for (name, tensor), (plain, keyed) in zip(here, sums, strict=True):
            entries.append((name, str(tensor.dtype), tuple(tensor.shape), plain, keyed))
    return combine(entries)


def combine(entries: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> str:
    """SHA-256 over (name, dtype, shape of the whole tensor, both sums), in the order of the names."""
    digest = hashlib.sha256()
    for name, dtype, shape, plain, keyed in sorted(entries):
        digest.update(f"{name}\0{dtype}\0{shape}\0{plain & WORD:016x}{keyed & WORD:016x}\n".encode())
    return digest.hexdigest()


def _signed(word: int) -> int:
    """A 64-bit word as torch's int64 takes it."""
    return word - (1 << 64) if word >> 63 else word


def _shift(z: torch.Tensor, places: int) -> torch.Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (z >> places).bitwise_and_((1 << (64 - places)) - 1)
