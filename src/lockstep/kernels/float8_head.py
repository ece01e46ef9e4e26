"""The output matrix and the cross-entropy as in linear_cross_entropy, with gradients from float8 products.

Shapes: N tokens, D width, V vocabulary, C tokens of one chunk.

Logits stay products of bf16: there, rounding hurts. Their gradient, delta_CV = softmax - one-hot, has two products,
which are twice as fast in float8: dx_CD = w_C * delta_CV W_VD and dW_VD = delta_CV^T (w_C * x_CD), w_C being what each
token counts. Without these weights delta lies between -1 and 1: nobody has to look for its scale, and e5m2 reaches down
to shares of 2^-31. The other factors are e4m3, each with one scale: in dx a token of weight 1000 takes no digits from
one of weight 1, in dW it takes some where x has numbers that are far larger than others. Sums are exact, because one
has as many terms as there are words. What is lost: a row of delta no longer adds up to zero, by some thousandths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.float8 import ALIGNMENT, Cast, factor_for, is_aligned, scaled_product
from lockstep.kernels.linear_cross_entropy import IGNORE, Asked, has_kernel, logits_of, plain_rows, weights_of

ONE = 2.0**15  # what 1 is in e5m2, which ends at 57,344


class Delta(NamedTuple):
    """Softmax minus one-hot: a row for each token, and a row for each word."""

    by_tokens: Cast
    by_words: Cast


def fits(asked: Asked) -> bool:
    """Whether this is for such a head; a bias that learns would need sums of delta too."""
    learns_bias = asked.bias_V is not None and asked.bias_V.requires_grad
    return asked.dtype == torch.bfloat16 and not learns_bias and is_aligned(*asked.weight_VD.shape)


def chunked_sum(
    asked: Asked, *, wanted: tuple[bool, bool, bool], ahead: float
) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    """The sum and, where wanted, its gradients times `ahead`; the tokens are filled up to what the products want."""
    x_ND, weight_VD, bias_V, targets_N, token_weights_N, chunk_tokens, dtype = asked
    count, x_low_ND, weight_low_VD = x_ND.shape[0], x_ND.to(dtype), weight_VD.to(dtype)
    scale_N = weights_of(targets_N, token_weights_N, torch.float32)
    if missing := -count % ALIGNMENT:
        x_low_ND, scale_N = F.pad(x_low_ND, (0, 0, 0, missing)), F.pad(scale_N, (0, missing))
        targets_N = F.pad(targets_N, (0, missing), value=IGNORE)
    targets_N = targets_N.contiguous()
    bias_low_V = None if bias_V is None else bias_V.to(dtype)
    total = torch.zeros((), device=x_ND.device, dtype=torch.float32)
    grad_x_ND = torch.empty(x_low_ND.shape, dtype=x_ND.dtype, device=x_ND.device) if wanted[0] else None
    grad_weight_VD: Tensor | None = None
    weight_DV = turned(weight_low_VD) if wanted[0] else None
    chunk_tokens = max(ALIGNMENT, chunk_tokens - chunk_tokens % ALIGNMENT)
    for start in range(0, len(x_low_ND), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        x_CD, scale_C = x_low_ND[rows], scale_N[rows]
        losses_C, delta = taken(logits_of(x_CD, weight_low_VD, bias_low_V), targets_N[rows], scale_C)
        total += losses_C.sum()
        if grad_x_ND is not None and weight_DV is not None:
            torch.mul(product(delta.by_tokens, weight_DV), (scale_C * ahead)[:, None], out=grad_x_ND[rows])
        if wanted[1]:
            weighted = turned(x_CD * scale_C[:, None], ahead)
            grad_weight_VD = _added(grad_weight_VD, product(delta.by_words, weighted))
        del delta  # a gigabyte or two, that the next chunk needs
    grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
    return total, None if grad_x_ND is None else grad_x_ND[:count], grad_weight_VD, None


def _added(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


def product(left: Cast, right_turned: Cast) -> Tensor:
    """In fp32, of two matrices that are both stored along what they are summed over."""
    numbers, scale = right_turned
    return scaled_product(left, (numbers.t(), scale), out_dtype=torch.float32, exact=True)


def turned(x: Tensor, times: float = 1.0) -> Cast:
    """The transpose of a matrix in e4m3, in one piece; what it is multiplied by goes into its scale."""
    factor = factor_for(torch.linalg.vector_norm(x, torch.inf).float(), torch.float8_e4m3fn)
    scale = factor.reciprocal() * times
    if not has_kernel(x):
        return (x.float() * factor).to(torch.float8_e4m3fn).t().contiguous(), scale
    from lockstep.kernels.float8_tiles import turn

    return turn(x.contiguous(), factor), scale


def taken(logits_CV: Tensor, targets_C: Tensor, scale_C: Tensor) -> tuple[Tensor, Delta]:
    """Weighted losses of rows, and delta, which no weight is in."""
    if has_kernel(logits_CV):
        from lockstep.kernels import cross_entropy_rows, float8_tiles

        normaliser_C = torch.empty(len(logits_CV), device=logits_CV.device)
        losses_C = cross_entropy_rows.take_rows(
            logits_CV, targets_C, scale_C, ignored=IGNORE, gradient_factor=None, normaliser_C=normaliser_C
        )
        small_CV, small_VC = float8_tiles.deltas(logits_CV, targets_C, normaliser_C, one=ONE)
    else:
        losses_C, delta_CV = plain_rows(logits_CV.float(), targets_C, scale_C, wants_delta=True)
        assert delta_CV is not None
        small_CV = (delta_CV * ONE).to(torch.float8_e5m2)
        small_VC = small_CV.t().contiguous()
    scale = torch.full((), 1 / ONE, device=logits_CV.device)
    return losses_C, Delta((small_CV, scale), (small_VC, scale))
