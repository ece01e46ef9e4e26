"""What a float8 layer must compute: by fp64, and by fp64 of numbers that were rounded to float8 before."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models import float8
from lockstep.models.lora import LoraLinear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDED = 0.004  # what bf16 rounds
# What the casts round: e4m3 keeps 4 bits, 2.6 % on average, e5m2 3 bits, 5.2 %; each product has two of them.
CAST = {"y": (0.02, 0.05), "dx": (0.03, 0.08), "dw": (0.03, 0.08)}
SIZES = [(64, 48, 32), (1, 16, 16), (37, 256, 80), (128, 32, 176)]  # M, K, N


def drawn(*shape: int, seed: int = 0, kind: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """Gaussian, each row of another size, 2^-2 to 2^2: one scale for all must hold them too."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-2, 3, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(*shape, generator=generator) * sizes).to(device, kind)


def computed(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = float8.linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), grad)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, x.dtype, weight.dtype)
    return {"y": y.detach(), "dx": dx, "dw": dw}


def exact(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x, weight, grad = x.double(), weight.double(), grad.double()
    return {"y": x @ weight.T, "dx": grad @ weight, "dw": grad.T @ x}


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """What is left of a matrix in float8, in fp64."""
    peak = x.double().abs().amax()
    peak = torch.where(peak == 0, 1.0, peak)
    factor = torch.exp2((torch.finfo(kind).max / peak).log2().floor())
    return (x.double() * factor).float().to(kind).double() / factor


def of_rounded(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The same products of numbers that were rounded to float8 before, in fp64."""
    x, weight, grad = rounded(x, E4M3), rounded(weight, E4M3), rounded(grad, E5M2)
    return {"y": x @ weight.T, "dx": grad @ weight, "dw": grad.T @ x}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check_products(x: Tensor, weight: Tensor, grad: Tensor, *, sums: float = 0.0) -> None:
    """All three products; `sums`: what adding them up may lose beside."""
    found = computed(x, weight, grad)
    for name, expected in of_rounded(x, weight, grad).items():
        assert error(found[name], expected) < ROUNDED + sums, name
    if x.numel() < 1000:
        return  # too few numbers for an average
    for name, expected in exact(x, weight, grad).items():
        least, most = CAST[name]
        assert least < error(found[name], expected) < most, name


class _ByReference(torch.autograd.Function):
    """A layer by `of_rounded`: nothing of lockstep's own casts or products is in it."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, noise: float) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.noise = noise
        nothing = x_MK.new_zeros(x_MK.shape[0], weight_NK.shape[0])
        return of_rounded(blurred(x_MK, noise), weight_NK, nothing)["y"].to(torch.bfloat16)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *args
        ctx: Any, *grads: Any
    ) -> tuple[Tensor, Tensor, None, None]:
        x_MK, weight_NK = ctx.saved_tensors
        given = (blurred(x_MK, ctx.noise), weight_NK, blurred(grads[0], ctx.noise))
        found = of_rounded(*given)
        return found["dx"].to(x_MK.dtype), found["dw"].to(weight_NK.dtype), None, None


def blurred(x: Tensor, noise: float) -> Tensor:
    return x.double() * (1 + noise * torch.randn(x.shape, dtype=torch.float64, device=x.device))


def by_reference(model: nn.Module, *, noise: float = 0.0) -> None:
    """Let the linear layers of a model's blocks, which are in bf16, compute what float8 layers must.

    `noise`: what goes into a layer is blurred by so much before it is rounded.
    """

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y_MN: Any = _ByReference.apply(input.flatten(0, -2), weight, noise)
        y = y_MN.view(*input.shape[:-1], -1)
        return y if bias is None else y + bias.to(y.dtype)

    blocks: Any = model.layers
    for layer in blocks.modules():
        if isinstance(layer, LoraLinear):
            layer.product = linear
        elif isinstance(layer, nn.Linear):
            layer.forward = partial(linear, weight=layer.weight, bias=layer.bias)
