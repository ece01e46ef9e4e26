"""Cross-entropy of rows of logits, and its gradient in the logits' own memory, in two passes. Triton.

The plain reference is the loop in linear_cross_entropy. One program has one row: it is small enough to lie in the L2
cache between the two passes, and the order of its sums does not depend on how many rows there are, so bits repeat.
Import this only where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # comes with torch for CUDA
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK, WARPS = 4096, 16  # columns at a time
SHORT_BLOCK, SHORT_WARPS = 1024, 4  # for vocabularies that a large block would leave idle


@triton.jit
def _cross_entropy_row(  # noqa: PLR0913 - Triton takes no structures
    logits,
    targets,
    scales,
    losses,
    normalisers,
    columns,
    stride,
    factor,
    ignored: tl.constexpr,
    WANTED: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip - Triton reads the body; types are the caller's
    """One row's weighted loss and, where wanted, factor * scale * (softmax - one-hot) in the place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    scale = tl.load(scales + row)
    known = (target >= 0) & (target < columns)
    chosen = tl.load(logits + tl.where(known, target, 0)).to(tl.float32)
    highs = tl.full((BLOCK,), -1.0e30, dtype=tl.float32)  # not -inf: a forbidden token is one, and inf - inf is nan
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, columns, BLOCK):  # each lane keeps its own maximum: no lane waits for another
        index = first + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highs, x)
        sums = sums * tl.exp(highs - higher) + tl.exp(x - higher)
        highs = higher
    highest = tl.max(highs, axis=0)
    normaliser = highest + tl.log(tl.sum(sums * tl.exp(highs - highest), axis=0))
    loss = tl.where(known, (normaliser - chosen) * scale, float("nan"))  # an id of no row is no loss: let it be seen
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))
    if KEPT:
        tl.store(normalisers + row, normaliser)
    if WANTED:
        scale *= factor
        for first in range(0, columns, BLOCK):
            index = first + tl.arange(0, BLOCK)
            inside = index < columns
            x = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
            share = tl.exp(x - normaliser)
            delta = tl.where(index == target, share - 1.0, share) * scale
            tl.store(logits + index, delta.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _multiply(numbers, gradient, done, count, BLOCK: tl.constexpr):  # types are the caller's
    """One block times gradient / done, which is most often 1: then nothing is read."""
    given = tl.load(gradient)
    if given != done:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        x = tl.load(numbers + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(numbers + index, (x * (given / done)).to(numbers.dtype.element_ty), mask=inside)


def take_rows(
    logits_CV: Tensor,
    targets_C: Tensor,
    scales_C: Tensor,
    *,
    ignored: int,
    gradient_factor: float | None,
    normaliser_C: Tensor | None = None,
) -> Tensor:
    """scale * cross-entropy of each row in fp32, 0 where the target is `ignored`.

    Where there is a factor for gradients the logits are gone afterwards: their memory holds factor * scale *
    (softmax - one-hot). `normaliser_C` is for the logarithms of the rows' sums of exponentials, where they are wanted.
    """
    assert logits_CV.stride(1) == 1
    rows, columns = logits_CV.shape
    losses_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    if not rows:
        return losses_C
    block, warps = (BLOCK, WARPS) if columns >= BLOCK else (SHORT_BLOCK, SHORT_WARPS)
    kernel: Any = _cross_entropy_row
    with torch.cuda.device(logits_CV.device):
        kernel[(rows,)](
            logits_CV, targets_C, scales_C, losses_C, losses_C if normaliser_C is None else normaliser_C, columns,
            logits_CV.stride(0), float(gradient_factor or 0.0), ignored=ignored, WANTED=gradient_factor is not None,
            KEPT=normaliser_C is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return losses_C


def multiply(numbers: Tensor, gradient: Tensor, *, done: float) -> None:
    """Times a number on the GPU in place, of which the factor `done` is in there already."""
    assert numbers.is_contiguous()
    kernel: Any = _multiply
    with torch.cuda.device(numbers.device):
        kernel[(triton.cdiv(numbers.numel(), BLOCK),)](
            numbers, gradient, float(done), numbers.numel(), BLOCK=BLOCK, num_warps=WARPS
        )
