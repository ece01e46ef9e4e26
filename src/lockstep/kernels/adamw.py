"""AdamW on one tensor: weights and both moments are read and written once, the gradient is only read. Triton.

The plain reference is torch's fused kernel, which also writes every gradient back, divided: a seventh of the traffic.
Of moments in bf16 it is engine/compact.py.
Import this only where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # comes with torch for CUDA
import triton.language as tl
from torch import Tensor

LARGE = 1 << 20  # elements: below, one launch for many tensors is quicker than one each
BLOCK, WARPS = 2048, 8


@triton.jit
def _mixed(x):
    """The hash of engine/moments.py, of 32 bits without a sign."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(places, key, step):
    """32 random bits for each place, as engine/moments.py draws them."""
    one, other = _mixed(key + _mixed(step)), _mixed((key ^ 0x9E3779B1) + _mixed(step + 1))
    return _mixed(_mixed(places * 0x9E3779B1 + one) ^ other)


@triton.jit
def _widened(bits):
    """fp32 of the 16 bits of a bf16."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(x, noise):
    """The 16 bits of one of both neighbours in bf16; `noise` has 16 bits, too."""
    return ((x.to(tl.uint32, bitcast=True) + noise) >> 16).to(tl.int16)


@triton.jit
def _adamw(  # noqa: PLR0913 - Triton takes no structures
    weights, gradients, firsts, seconds, numbers, key, begin, count, decay, fresh1, beta2, fresh2, epsilon,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor; types are the caller's."""
    if tl.load(numbers + 4) > 0.0:  # skip: nothing is read, nothing changes
        return
    lr, rate = tl.load(numbers), tl.load(numbers + 1)
    root, divisor = tl.load(numbers + 2), tl.load(numbers + 3)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    gradient = tl.load(gradients + index, mask=inside, other=0.0) / divisor
    weight = tl.load(weights + index, mask=inside, other=0.0)
    first = tl.load(firsts + index, mask=inside, other=0)
    second = tl.load(seconds + index, mask=inside, other=0)
    if NARROW:
        first, second = _widened(first), _widened(second)
    first = first + (gradient - first) * fresh1
    second = second * beta2 + gradient * gradient * fresh2
    weight = weight - lr * decay * weight
    weight = weight - rate * first / (tl.sqrt(second) / root + epsilon)
    if NARROW:
        places = (index + begin).to(tl.uint32)
        bits = _noise(places, tl.load(key).to(tl.uint32), tl.load(numbers + 5).to(tl.uint32))
        first, second = _narrowed(first, bits & 0xFFFF), _narrowed(second, bits >> 16)
    tl.store(weights + index, weight, mask=inside)
    tl.store(firsts + index, first, mask=inside)
    tl.store(seconds + index, second, mask=inside)


def is_for(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, least: int = LARGE) -> bool:
    """Whether these are what the kernel is made for: fp32, but for the moments, which may be bf16."""
    return (
        weights.numel() >= least
        and weights.dtype == gradient.dtype == torch.float32
        and first.dtype == second.dtype
        and first.dtype in (torch.float32, torch.bfloat16)
        and all(each.device.type == "cuda" and each.is_contiguous() for each in (weights, gradient, first, second))
    )


def numbers(lr: Tensor, applied: Tensor, divisor: Tensor, skip: Tensor, betas: tuple[float, float]) -> Tensor:
    """What all tensors of a step share, on the device: corrections for the young moments in fp64, as they cancel."""
    count = applied.double()
    rate, root = lr.double() / (1 - betas[0] ** count), (1 - betas[1] ** count).sqrt()
    return torch.stack((lr.double(), rate, root, divisor.double(), skip.double(), count)).float()


def update(  # noqa: PLR0913 - a tensor's four parts and what AdamW is, by name
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    shared: Tensor,
    *,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
    key: Tensor | None = None,
    begin: int = 0,
) -> None:
    """One step in place; `shared` is from `numbers`.

    Moments in bf16 are rounded at random: `key` begins the noise of this tensor, `begin` is its place in the whole.
    """
    count, (beta1, beta2) = weights.numel(), betas
    shares = 1.0 - beta1, beta2, 1.0 - beta2  # here in fp64: of an fp32 0.999 the difference to 1 has few digits left
    narrow = first.dtype == torch.bfloat16
    kernel: Any = _adamw
    if narrow:
        assert key is not None, "without noise a moment in bf16 never moves"
        first, second = first.view(torch.int16), second.view(torch.int16)
    with torch.cuda.device(weights.device):
        kernel[(triton.cdiv(count, BLOCK),)](
            weights, gradient, first, second, shared, shared if key is None else key, begin, count, decay, *shares,
            epsilon, NARROW=narrow, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
