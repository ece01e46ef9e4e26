"""Linear layers whose three matrix products are of float8 numbers, on Hopper nearly twice as fast as of bf16.

Shapes: M tokens, K inputs, N outputs; y_MN = x_MK w_NK^T.

Weights stay what they are and are cast anew in each pass, as x and the gradient g are; a scale brings the largest
number near the largest that the type has, and is a power of two, so that nothing is rounded but by the cast. (What goes
into it is bf16; the compiler may hand it over before it was rounded to that.) There is
one scale for each matrix. x and w become e4m3; g, whose numbers are further apart, e5m2.

The tensor cores want both factors stored along their common dimension: x and w as they are for y = x w^T, w and g
turned over for dx = g w and dw = g^T x, and x turned over too. Nothing is done by hand for that: the casts are plain
operations, written so that a cast that is wanted twice is the same expression, which the compiler computes once, writes
in both layouts, and joins with the norm, SwiGLU or rotation it follows. Nothing is kept for the backward pass either
but x and w, which are there anyway; the compiler keeps the scales. Without the compiler all of this is slow.

A number that is not finite stays so, although casts saturate: beside an infinity all numbers are multiplied by zero,
which makes NaN of it, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.kernels.float8 import ALIGNMENT, Cast, factor_for, is_aligned, scaled_product


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """As F.linear, in bf16 from float8 products; the gradient of the weight comes in fp32 or as it is kept."""
    x_MK = x.flatten(0, -2)
    tokens = x_MK.shape[0]
    if missing := -tokens % ALIGNMENT:  # tokens are the common dimension of the weight's gradient
        x_MK = F.pad(x_MK, (0, 0, 0, missing))
    y_MN: Any = _Float8Linear.apply(x_MK, weight_NK)
    y = (y_MN[:tokens] if missing else y_MN).view(*x.shape[:-1], -1)
    return y if bias_N is None else y + bias_N.to(y.dtype)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return product(cast(x_MK), turned(cast(weight_NK)))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *args
        ctx: Any, *grads: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        (grad_MN,), (x_MK, weight_NK) = grads, ctx.saved_tensors
        grad_x_MK = grad_weight_NK = None
        if ctx.needs_input_grad[0]:
            grad_x_MK = product(cast(grad_MN, torch.float8_e5m2), cast(weight_NK)).to(x_MK.dtype)
        if ctx.needs_input_grad[1]:
            grad = turned(cast(grad_MN, torch.float8_e5m2))
            grad_weight_NK = product(grad, cast(x_MK), out_dtype=torch.float32).to(weight_NK.dtype)
        return grad_x_MK, grad_weight_NK


def cast(x: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> Cast:
    """A matrix in float8. Its peak is taken by rows first, which the compiler joins with a norm."""
    factor = factor_for(x.abs().amax(-1).amax().float(), kind)
    return (x.float() * factor).to(kind), factor.reciprocal()


def turned(matrix: Cast) -> Cast:
    """Its transpose."""
    numbers, scale = matrix
    return numbers.t(), scale


def product(left: Cast, right: Cast, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of the left times columns of the right, each stored in one piece.

    Sums are left to the tensor cores, which round them to fewer bits than fp32, in the gradients too. That it is less
    than what the casts round is held by tests/gpu/test_cuda_float8.py, the learning by benchmarks/float8_parity.py.
    """
    (numbers, scale), (others, other_scale) = left, right
    stored = (numbers.contiguous(), scale), (others.t().contiguous().t(), other_scale)
    return scaled_product(*stored, out_dtype=out_dtype, exact=False)


class Float8Linear(nn.Linear):
    """A linear layer whose products are of float8 numbers; its parameters are those of the plain one."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def convert(model: nn.Module) -> str:
    """Give the blocks of a model float8 layers where their sizes allow it; the words that say how many there are.

    Embeddings and logits stay: they are where rounding hurts most. The gradients of an output matrix are made in float8
    too (kernels/float8_head.py).
    """
    blocks: Any = model.layers
    places = [
        (module, name, child)
        for block in blocks
        for module in block.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    fitting = [place for place in places if fits(place[2])]
    if not fitting:
        raise ConfigError(
            f"no matrix of this model's blocks has sides that are multiples of {ALIGNMENT}, as float8 needs",
            where="training.precision",
            hint="--precision bf16",
        )
    for module, name, child in fitting:
        setattr(module, name, Float8Linear(child))
    head = hasattr(model, "float8_head")  # an encoder's has a bias that learns
    if head:
        model.float8_head = True  # pyright: ignore[reportArgumentType] - torch declares modules and tensors
    shape: Any = model.shape
    aligned = is_aligned(shape.vocab_size, shape.hidden_size)
    count = len(places) - len(fitting)
    others = " and ".join(filter(None, (str(count or ""), "the output matrix" if head and not aligned else "")))
    stay = "stay" if count else "stays"
    rest = f"; {others} {stay} in bf16, having sides that are no multiples of {ALIGNMENT}" if others else ""
    gradients = ", and the output matrix's gradients" if head and aligned else ""
    return f"float8: {len(fitting)} matrices of the blocks{gradients}, one scale for each matrix{rest}"


def fits(layer: nn.Linear) -> bool:
    """Whether the tensor cores take all three products of it."""
    return is_aligned(layer.in_features, layer.out_features)
