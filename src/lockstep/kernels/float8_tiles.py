"""Matrices in float8, turned over: tile by tile, each read once. Triton; the plain references are in float8_head.

The tensor cores want both factors of a product stored along what is summed over, so most are wanted turned over, and
the gradient of the logits both ways. Import this only where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # comes with torch for CUDA
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 32, 64, 4  # of a tile; the quickest of 16 that were tried on an H200


@triton.jit
def _cross_entropy_delta(  # noqa: PLR0913 - Triton takes no structures
    logits,
    targets,
    normalisers,
    small,
    small_turned,
    rows,
    columns,
    stride,
    one,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip - Triton reads the body; types are the caller's
    """(softmax - one-hot) * one of one tile of logits, by rows and by columns."""
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row_64, column_64 = row.to(tl.int64), column.to(tl.int64)
    x = tl.load(logits + row_64[:, None] * stride + column[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    normaliser = tl.load(normalisers + row, mask=row < rows, other=0.0)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    share = tl.exp(x - normaliser[:, None])
    delta = tl.where(column[None, :] == target[:, None], share - 1.0, share) * one
    found = delta.to(small.dtype.element_ty)
    tl.store(small + row_64[:, None] * columns + column[None, :], found, mask=inside)
    tl.store(small_turned + column_64[:, None] * rows + row[None, :], tl.trans(found), mask=tl.trans(inside))


@triton.jit
def _turn(matrix, factor, turned, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: PLR0913 - as above
    """One tile times a factor, by columns."""
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(matrix + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    found = (x * tl.load(factor)).to(turned.dtype.element_ty)
    tl.store(turned + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(found), mask=tl.trans(inside))


def deltas(logits_CV: Tensor, targets_C: Tensor, normaliser_C: Tensor, *, one: float) -> tuple[Tensor, Tensor]:
    """(softmax - one-hot) * one in e5m2: (C, V), and (V, C)."""
    assert logits_CV.stride(1) == 1
    assert targets_C.is_contiguous()
    rows, columns = logits_CV.shape
    small_CV = torch.empty(rows, columns, dtype=torch.float8_e5m2, device=logits_CV.device)
    small_VC = torch.empty(columns, rows, dtype=torch.float8_e5m2, device=logits_CV.device)
    kernel: Any = _cross_entropy_delta
    with torch.cuda.device(logits_CV.device):
        kernel[_tiles(rows, columns)](
            logits_CV, targets_C, normaliser_C, small_CV, small_VC, rows, columns, logits_CV.stride(0), float(one),
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return small_CV, small_VC


def turn(matrix: Tensor, factor: Tensor) -> Tensor:
    """matrix^T * factor, a number on the GPU, in e4m3."""
    assert matrix.is_contiguous()
    rows, columns = matrix.shape
    turned = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=matrix.device)
    kernel: Any = _turn
    with torch.cuda.device(matrix.device):
        kernel[_tiles(rows, columns)](
            matrix, factor, turned, rows, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return turned


def _tiles(rows: int, columns: int) -> tuple[int]:
    return (-(-rows // ROWS) * -(-columns // COLUMNS),)
