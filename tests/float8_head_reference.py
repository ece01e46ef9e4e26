"""What an output matrix with float8 gradients must compute: by fp64, and by fp64 of numbers that were rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.linear_cross_entropy import IGNORE, linear_cross_entropy, summands_of
from tests.float8_reference import E4M3, E5M2, error, rounded

Given = tuple[Tensor, Tensor, Tensor, Tensor | None]
FACTOR = 0.125  # of the sum, as a step has one
NEIGHBOURS = 0.005  # what logits in bf16 leave to chance: a share at an edge is rounded up or down


def head_case(tokens: int, width: int, words: int, *, weighted: bool, device: str = "cpu", seed: int = 0) -> Given:
    """Hidden states and words that fit together, so that shares reach from nearly 1 to nearly 0; some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(words, width, generator=generator) * (4 / width**0.5)
    targets = torch.randint(words, (tokens,), generator=generator)
    targets[::5] = IGNORE
    weights = 1 / torch.linspace(0.001, 1, tokens) if weighted else None
    x, weight = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    return x, weight, targets.to(device), None if weights is None else weights.to(device)


def gradients(
    given: Given, *, chunk: int, bias: Tensor | None = None, float8: bool = True, foretold: float = FACTOR
) -> tuple[Tensor, ...]:
    """The sum, and what a step makes of it: gradients of x and of the matrix. `foretold`: a factor, right or wrong."""
    x, weight, targets, weights = given
    with torch.autocast(x.device.type, dtype=torch.bfloat16), summands_of(foretold):
        total = linear_cross_entropy(x, weight, targets, weights, chunk_tokens=chunk, bias_V=bias, float8=float8)
    return total.detach(), *torch.autograd.grad(total * FACTOR, (x, weight))


def exactly(given: Given) -> tuple[Tensor, ...]:
    """The same in fp64."""
    x, weight, targets, weights = given
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    losses = F.cross_entropy(F.linear(*wide), targets, reduction="none", ignore_index=IGNORE)
    total = (losses if weights is None else losses * weights).sum()
    return total.detach(), *torch.autograd.grad(total * FACTOR, wide)


def of_rounded(given: Given) -> tuple[Tensor, ...]:
    """Gradients by fp64 of logits in bf16, of softmax - one-hot in e5m2, and of factors in e4m3."""
    x, weight, targets, weights = given
    x_low, weight_low = x.detach().bfloat16(), weight.detach().bfloat16()
    known = targets != IGNORE
    delta = F.linear(x_low, weight_low).double().softmax(-1)
    delta[known, targets[known]] -= 1
    delta = (delta * 2**15).float().to(E5M2).double() / 2**15
    counts = (known.double() if weights is None else known * weights.double())[:, None] * FACTOR
    dx = counts * (delta @ rounded(weight_low, E4M3))
    return dx, delta.T @ rounded(x_low.double() * counts, E4M3)


def check_gradients(given: Given, found: tuple[Tensor, ...]) -> None:
    """As rounded numbers give them, all weights alike; off from the exact ones by what two casts round."""
    total, *exact = exactly(given)
    assert abs(float(found[0]) / float(total) - 1) < 0.01
    for name, one, other, right in zip(("x", "weight"), found[1:], of_rounded(given), exact, strict=True):
        assert error(one, other) < NEIGHBOURS, name
        if one.numel() > 1000:
            assert error(one, right) < 0.09, name
