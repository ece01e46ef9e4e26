"""Float8 numbers: the scale of a matrix, and products of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # numbers: what the common dimension and the columns of a product must be multiples of
EXPONENT = 0x7F800000  # the bits of an fp32 number without its sign and its digits: a power of two
LEAST_PEAK = 2.0**-100  # of a matrix of zeros: its scale is finite, and so is that of a product of two

Cast = tuple[Tensor, Tensor]  # numbers in float8, and what they are to be multiplied by


def is_aligned(*sizes: int) -> bool:
    """Whether the tensor cores take the products of a matrix with such sides."""
    return not any(size % ALIGNMENT for size in sizes)


def factor_for(peak: Tensor, kind: torch.dtype) -> Tensor:
    """The power of two that brings the largest number near the largest that the type has."""
    factor = torch.finfo(kind).max / peak.clamp(min=LEAST_PEAK)
    return (factor.view(torch.int32) & EXPONENT).view(torch.float32)


def scaled_product(left: Cast, right: Cast, *, out_dtype: torch.dtype, exact: bool) -> Tensor:
    """left @ right; rows of the left and columns of the right lie in one piece each.

    Sums that are not exact are left to the tensor cores, which round them to fewer bits than fp32.
    """
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage] - it has no other name
    return multiply(left[0], right[0], scale_a=left[1], scale_b=right[1], out_dtype=out_dtype, use_fast_accum=not exact)
