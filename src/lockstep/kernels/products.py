"""Large products of bf16 matrices by the kernels that need the least energy for them.

A card that multiplies without a pause is held by its power limit, not by its tensor cores: the H200 has 1.98 GHz when
it is cool and 1.45 in a step. There the quickest kernel is the one that takes the least energy. cublasLt proposes it,
but never first. The rule below was found by timing its proposals at steady power (benchmarks/products.py), on the
products of 4 layers of Llama-3.1-8B; it takes 2.4 % off a whole step. As no clock decides, bits are the same in every
run: a kernel of the library repeats them.
Anything else is torch's: other cards and types, small products, what the library does not propose, and what somebody
watches operation by operation (a search for a NaN, tensors without memory): a call of a library is none.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from lockstep.kernels import cublaslt
from lockstep.kernels.cublaslt import Kernel, Matrix, Product

LEAST_FLOPS = 1e12  # below it was not tried
LONG_SUM = 8192  # terms
MANY_COLUMNS = 8192
HOPPER = (9, 0)
WIDE = Kernel(tile=24, variant=7, cluster=5)  # tiles of 256 x 128, clusters of 1 x 2 blocks
EVEN = Kernel(tile=29, variant=1, cluster=3)  # 128 x 160, 2 x 1
SLIM = Kernel(tile=201, variant=2, cluster=5)  # 176 x 128, 1 x 2
CACHED = 256  # products whose sizes differ


def preferred(first: Matrix, second: Matrix, result: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels for such a product, the best one first."""
    if first.columns > LONG_SUM or result != torch.bfloat16:
        return (WIDE,)
    if not second.lies_by_rows and second.columns >= MANY_COLUMNS:
        return SLIM, EVEN, WIDE
    return EVEN, WIDE


def multiply(
    first: Tensor, second: Tensor, *, result: torch.dtype | None = None, total: Tensor | None = None
) -> Tensor:
    """first @ second as `result` (their own type unless said), added to `total` in its memory where there is one."""
    result = total.dtype if total is not None else result or first.dtype
    if not _is_ours(first, second, result, total):
        return plain(first, second, result=result, total=total)
    shapes = cublaslt.matrix(first), cublaslt.matrix(second)
    product, kernel = _chosen(*shapes, result, first.device)
    if kernel is None:
        return plain(first, second, result=result, total=total)
    out = first.new_empty(first.shape[0], second.shape[1], dtype=result) if total is None else total
    product.run(kernel, first, second, out, adds=total is not None)
    return out


def plain(first: Tensor, second: Tensor, *, result: torch.dtype, total: Tensor | None) -> Tensor:
    """The same by torch; a GPU multiplies halves and adds in fp32 by itself."""
    if first.device.type != "cuda" or first.dtype == result:
        product = (first @ second).to(result)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(first, second, out_dtype=result)
    return torch.addmm(total, first, second, out_dtype=result, out=total)


@cache
def is_for(device: torch.device) -> bool:
    """Whether the rule was made for this card."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) == HOPPER
        and cublaslt.is_at_hand()
    )


def is_large(rows: int, inner: int, columns: int) -> bool:
    return 2.0 * rows * inner * columns >= LEAST_FLOPS


def _is_ours(first: Tensor, second: Tensor, result: torch.dtype, total: Tensor | None) -> bool:
    given = (first, second) if total is None else (first, second, total)
    if not first.dim() == second.dim() == 2:
        return False
    (rows, inner), columns = first.shape, second.shape[1]
    return (
        first.dtype == second.dtype == torch.bfloat16
        and result in cublaslt.TYPES
        and is_large(rows, inner, columns)
        and is_for(first.device)
        and not _is_watched()
        and second.shape[0] == inner  # else it is an error, which torch words
        and all(each.device == first.device and _lies_well(each) for each in given)
        and (total is None or (total.shape == (rows, columns) and total.is_contiguous()))
    )


def _lies_well(x: Tensor) -> bool:
    """In memory at all, which other kinds of tensors need not, and as the library supposes."""
    return type(x) in (Tensor, nn.Parameter) and not x.data_ptr() % cublaslt.ALIGNED and cublaslt.matrix(x).is_dense


def _is_watched() -> bool:
    """Whether a mode of torch's sees what runs here; not inside an operation that it has seen as a whole."""
    known: Any = _python_dispatch
    return known._get_current_dispatch_mode() is not None


@lru_cache(maxsize=CACHED)
def _chosen(first: Matrix, second: Matrix, result: torch.dtype, device: torch.device) -> tuple[Product, Kernel | None]:
    product = Product(first, second, result, device)
    return product, next((kernel for kernel in preferred(first, second, result) if kernel in product.proposals), None)
