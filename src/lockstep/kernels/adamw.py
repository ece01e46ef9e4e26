"""AdamW on one large tensor: weights and both moments are read and written once, the gradient is only read. Triton.

The plain reference is torch's fused kernel, which also writes every gradient back, divided: a seventh of the traffic.
Import this only where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports] - comes with torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

LARGE = 1 << 20  # elements: below, one launch for many tensors is quicker than one each
BLOCK, WARPS = 2048, 8


@triton.jit
def _adamw(  # noqa: PLR0913 - Triton takes no structures
    weights, gradients, firsts, seconds, numbers, count, decay, fresh1, beta2, fresh2, epsilon, BLOCK: tl.constexpr
):  # Triton reads the body; types are the caller's
    """One block of one tensor."""
    if tl.load(numbers + 4) > 0.0:  # skip: nothing is read, nothing changes
        return
    lr, rate = tl.load(numbers), tl.load(numbers + 1)
    root, divisor = tl.load(numbers + 2), tl.load(numbers + 3)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    gradient = tl.load(gradients + index, mask=inside, other=0.0) / divisor
    weight = tl.load(weights + index, mask=inside, other=0.0)
    first = tl.load(firsts + index, mask=inside, other=0.0)
    second = tl.load(seconds + index, mask=inside, other=0.0)
    first = first + (gradient - first) * fresh1
    second = second * beta2 + gradient * gradient * fresh2
    weight = weight - lr * decay * weight
    weight = weight - rate * first / (tl.sqrt(second) / root + epsilon)
    tl.store(weights + index, weight, mask=inside)
    tl.store(firsts + index, first, mask=inside)
    tl.store(seconds + index, second, mask=inside)


def is_for(*tensors: Tensor) -> bool:
    """Whether these (weights, gradient, moments) are what the kernel is made for."""
    return tensors[0].numel() >= LARGE and all(
        each.dtype == torch.float32 and each.device.type == "cuda" and each.is_contiguous() for each in tensors
    )


def numbers(lr: Tensor, applied: Tensor, divisor: Tensor, skip: Tensor, betas: tuple[float, float]) -> Tensor:
    """What all tensors of a step share, on the device: corrections for the young moments in fp64, as they cancel."""
    count = applied.double()
    rate, root = lr.double() / (1 - betas[0] ** count), (1 - betas[1] ** count).sqrt()
    return torch.stack((lr.double(), rate, root, divisor.double(), skip.double())).float()


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
) -> None:
    """One step in place; `shared` is from `numbers`."""
    count, (beta1, beta2) = weights.numel(), betas
    shares = 1.0 - beta1, beta2, 1.0 - beta2  # here in fp64: of an fp32 0.999 the difference to 1 has few digits left
    kernel: Any = _adamw
    with torch.cuda.device(weights.device):
        kernel[(triton.cdiv(count, BLOCK),)](
            weights, gradient, first, second, shared, count, decay, *shares, epsilon, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip
