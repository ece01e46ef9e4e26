"""The output matrix and the cross-entropy in one: the sum over all targets, without all the logits at once.

Shapes: N tokens, D width, V vocabulary, C tokens of one chunk.

With a large vocabulary the logits are the largest tensor of the whole step (32k tokens x 128k words x 4 bytes =
16 GB, and their gradient again). The chunked path takes C tokens at a time and computes their gradient at once, in
the forward pass, so that only (C, V) numbers ever exist; on a GPU a kernel of our own makes it in the memory of the
logits. It returns the SUM: a mean taken here would push fp16 gradients below their smallest number before the loss
scaler could lift them. It writes no `.grad`, because under activation checkpointing a forward runs twice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.kernels import products

IGNORE = -100  # a target that is none
OTHERS = 4  # parts of Asked that have no gradient
_AHEAD: ContextVar[float] = ContextVar("what sums are multiplied by before their backward pass", default=1.0)


class Asked(NamedTuple):
    """Of what the sum is; the first three may have gradients."""

    x_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    targets_N: Tensor
    token_weights_N: Tensor | None
    chunk_tokens: int
    dtype: torch.dtype  # of the products


@contextmanager
def summands_of(factor: float) -> Iterator[None]:
    """Sums that are made here will be multiplied by this: where a kernel makes their gradients, it does it at once.

    Otherwise a gradient as large as the output matrix is read and written once more. Any other factor is right too.
    """
    token = _AHEAD.set(factor)
    try:
        yield
    finally:
        _AHEAD.reset(token)


def linear_cross_entropy(  # noqa: PLR0913 - what a head may be asked for, by name
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    token_weights_N: Tensor | None = None,
    *,
    chunk_tokens: int,
    bias_V: Tensor | None = None,
    float8: bool = False,
) -> Tensor:
    """Sum over targets != -100 of token_weight * cross-entropy(x @ weight.T + bias), in fp32.

    A bias of -inf forbids a token; whatever needs no gradient (such a bias, a frozen head) has none computed.
    `float8`: gradients are made by float8 products, where the sizes of the matrix allow it.
    """
    if x_ND.shape[0] <= chunk_tokens and not (len(x_ND) and has_kernel(x_ND)):  # no tokens: gradients of zero
        return _plain_sum(F.linear(x_ND, weight_VD, bias_V), targets_N, token_weights_N)
    asked = Asked(x_ND, weight_VD, bias_V, targets_N, token_weights_N, chunk_tokens, _matmul_dtype(x_ND))
    learnt = (x_ND, weight_VD) if bias_V is None else (x_ND, weight_VD, bias_V)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learnt):
        total = _ChunkedSum.apply(_maker(asked, float8=float8), *asked)
        assert isinstance(total, Tensor)
        return total
    return _chunked_sum(asked)[0]


@torch.no_grad()
def score_next_tokens(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, chunk_tokens: int, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum of cross-entropies, how many targets were the most likely token), for evaluation."""
    total = torch.zeros((), device=x_ND.device, dtype=torch.float64 if x_ND.dtype == torch.float64 else torch.float32)
    correct = torch.zeros((), device=x_ND.device, dtype=torch.int64)
    for x_CD, targets_C in zip(x_ND.split(chunk_tokens), targets_N.split(chunk_tokens), strict=True):
        logits_CV = F.linear(x_CD, weight_VD, bias_V)
        total = total + _plain_sum(logits_CV, targets_C, None)
        correct = correct + (logits_CV.argmax(-1) == targets_C).sum()  # never equal to IGNORE
    return total, correct


@torch.no_grad()
def score_targets(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, chunk_tokens: int, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(cross-entropy of each target, whether it was the most likely token), for evaluation; 0 and no where ignored."""
    losses_N = torch.empty_like(targets_N, dtype=torch.float64 if x_ND.dtype == torch.float64 else torch.float32)
    correct_N = torch.empty_like(targets_N, dtype=torch.bool)
    for start in range(0, x_ND.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits_CV = F.linear(x_ND[rows], weight_VD, bias_V)
        losses_N[rows] = F.cross_entropy(_widen(logits_CV), targets_N[rows], reduction="none")
        correct_N[rows] = logits_CV.argmax(-1) == targets_N[rows]
    return losses_N, correct_N


def _plain_sum(logits_NV: Tensor, targets_N: Tensor, token_weights_N: Tensor | None) -> Tensor:
    logits_NV = _widen(logits_NV)
    if token_weights_N is None:
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
    losses_N = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="none")
    return (losses_N * token_weights_N).sum()


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _matmul_dtype(x: Tensor) -> torch.dtype:
    """What F.linear would compute in: autocast's choice, else the tensor's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _maker(asked: Asked, *, float8: bool) -> Callable[..., Any]:
    """Who makes the gradients of such a head."""
    if float8:
        from lockstep.kernels import float8_head

        if float8_head.fits(asked):
            return float8_head.chunked_sum
    return _chunked_sum


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], *given: Any) -> Tensor:
        asked = Asked(*given)
        ctx.ahead = (_AHEAD.get() or 1.0) if has_kernel(asked.x_ND) else None  # nothing is made of what zero is in
        with torch.autocast(asked.x_ND.device.type, enabled=False):
            total, *ctx.gradients = make(asked, wanted=ctx.needs_input_grad[1:4], ahead=ctx.ahead or 1.0)
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *args
        ctx: Any, *grads: Any
    ) -> tuple[Tensor | None, ...]:
        """By the kernel in place and let go: a gradient that nobody else holds becomes .grad without a copy."""
        (grad,), gradients = grads, ctx.gradients
        if ctx.ahead is None:
            return None, *[None if each is None else each * grad for each in gradients], *[None] * OTHERS
        from lockstep.kernels.cross_entropy_rows import multiply

        assert gradients is not None, "one backward pass for each forward pass"
        ctx.gradients = None
        for each in gradients:
            if each is not None:
                multiply(each, grad, done=ctx.ahead)
        return None, *gradients, *[None] * OTHERS


def has_kernel(x: Tensor) -> bool:
    """Whether rows of logits have a kernel of their own here."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


def _chunked_sum(
    asked: Asked, *, wanted: tuple[bool, bool, bool] = (False, False, False), ahead: float = 1.0
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The sum and, where wanted, its gradients times `ahead`; only one chunk's logits exist at a time."""
    x_ND, weight_VD, bias_V, targets_N, token_weights_N, chunk_tokens, dtype = asked
    x_low_ND, weight_low_VD = x_ND.to(dtype), weight_VD.to(dtype)
    bias_low_V = None if bias_V is None else bias_V.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale_N = weights_of(targets_N, token_weights_N, wide)
    take_rows = partial(_rows_on_gpu, ahead=ahead) if has_kernel(x_ND) else _rows
    peak: Tensor | None = None
    if take_rows is _rows or dtype == torch.float16:
        peak = scale_N.abs().max().clamp_min(1)  # weights of 1/p reach 1000: divided out, fp16 cannot overflow
    total = torch.zeros((), device=x_ND.device, dtype=wide)
    grad_x_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if wanted[0] else None
    grad_weight_VD: Tensor | None = None
    grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if wanted[2] and bias_V is not None else None
    for start in range(0, x_ND.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        x_CD, scale_C = x_low_ND[rows], scale_N[rows]
        logits_CV = logits_of(x_CD, weight_low_VD, bias_low_V)
        losses_C, delta_CV = take_rows(logits_CV, targets_N[rows], scale_C, peak, wants_gradient=any(wanted))
        del logits_CV  # two gigabytes, or more, that the next chunk needs; a gradient may lie in them
        total += losses_C.sum()
        if delta_CV is None:
            continue
        if grad_bias_V is not None:
            grad_bias_V += delta_CV.sum(0, dtype=wide)
        delta_CV = delta_CV.to(dtype)
        if grad_x_ND is not None:
            grad_x_CD = products.multiply(delta_CV, weight_low_VD)
            grad_x_ND[rows] = grad_x_CD if peak is None else grad_x_CD * peak
        if wanted[1]:
            grad_weight_VD = products.multiply(delta_CV.T, x_CD, result=wide, total=grad_weight_VD)
        del delta_CV
    if grad_weight_VD is not None:
        grad_weight_VD = _times(grad_weight_VD, peak).to(weight_VD.dtype)
    if grad_bias_V is not None and bias_V is not None:
        grad_bias_V = _times(grad_bias_V, peak).to(bias_V.dtype)
    return total, grad_x_ND, grad_weight_VD, grad_bias_V


def weights_of(targets_N: Tensor, token_weights_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What the loss of each token counts."""
    known_N = (targets_N != IGNORE).to(dtype)
    return known_N if token_weights_N is None else known_N * token_weights_N


def logits_of(x_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return products.multiply(x_CD, weight_VD.T) if bias_V is None else F.linear(x_CD, weight_VD, bias_V)


Taken = tuple[Tensor, Tensor | None]  # weighted losses of rows, and the gradient of their logits


def _rows(logits_CV: Tensor, targets_C: Tensor, scale_C: Tensor, peak: Tensor | None, *, wants_gradient: bool) -> Taken:
    """By plain operations; the gradient is divided by the peak."""
    losses_C, delta_CV = plain_rows(_widen(logits_CV), targets_C, scale_C, wants_delta=wants_gradient)
    if delta_CV is None:
        return losses_C, None
    return losses_C, delta_CV.mul_((scale_C if peak is None else scale_C / peak)[:, None])


def plain_rows(logits_CV: Tensor, targets_C: Tensor, scale_C: Tensor, *, wants_delta: bool) -> Taken:
    """Weighted losses, and softmax - one-hot in the logits' own memory, which no weight is in."""
    ignored_C = targets_C == IGNORE
    target_C1 = targets_C.masked_fill(ignored_C, 0)[:, None]
    normaliser_C1 = logits_CV.logsumexp(-1, keepdim=True)
    losses_C = (normaliser_C1 - logits_CV.gather(-1, target_C1)).squeeze(-1)
    losses_C = losses_C.masked_fill(ignored_C, 0) * scale_C  # token 0 may be the one that is forbidden
    if not wants_delta:
        return losses_C, None
    delta_CV = logits_CV.sub_(normaliser_C1).exp_()
    return losses_C, delta_CV.scatter_add_(-1, target_C1, torch.full_like(normaliser_C1, -1.0))


def _rows_on_gpu(
    logits_CV: Tensor, targets_C: Tensor, scale_C: Tensor, peak: Tensor | None, *, wants_gradient: bool, ahead: float
) -> Taken:
    """By one kernel; the gradient is also multiplied by `ahead`."""
    from lockstep.kernels.cross_entropy_rows import take_rows

    scales_C = scale_C if peak is None else scale_C / peak
    gradient_factor = ahead if wants_gradient else None
    losses_C = take_rows(logits_CV, targets_C.contiguous(), scales_C, ignored=IGNORE, gradient_factor=gradient_factor)
    return losses_C if peak is None else losses_C * peak, logits_CV if wants_gradient else None


def _times(total: Tensor, peak: Tensor | None) -> Tensor:
    return total if peak is None else total.mul_(peak)
