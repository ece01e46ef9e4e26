"""The kernel for rows of logits by Triton's interpreter; compiled: tests/gpu/test_cuda_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.kernels import linear_cross_entropy as head
from lockstep.kernels.linear_cross_entropy import IGNORE, linear_cross_entropy
from tests import interpreted

BLOCK = 16
ROUNDED = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # of what is computed in chunks, at most


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(head, "has_kernel", lambda _x: True)
    with interpreted.module(monkeypatch, "cross_entropy_rows") as module:
        monkeypatch.setattr(module, "BLOCK", BLOCK)
        monkeypatch.setattr(module, "SHORT_BLOCK", BLOCK // 2)
        yield module


def given(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * 5
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[::4] = IGNORE
    scales = torch.rand(rows, generator=generator) * 100
    scales[1::4] = 0.0
    return logits, targets, scales * (targets != IGNORE), torch.rand(rows, generator=generator)


def expected(logits: Tensor, targets: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide, targets, reduction="none", ignore_index=IGNORE) * scales
    return losses.detach(), torch.autograd.grad(losses.sum(), wide)[0]


@pytest.mark.parametrize("columns", [1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 3])
def test_losses_and_gradients_of_rows(kernel: Any, columns: int) -> None:
    logits, targets, scales, _ = given(9, columns, seed=columns)
    losses, gradient = expected(logits, targets, scales)
    padded = torch.full((9, columns + 5), math.nan)  # rows further apart than they are long
    padded[:, :columns] = logits
    for each in (logits.clone(), padded[:, :columns]):
        before = each.clone()
        told = kernel.take_rows(each, targets, scales, ignored=IGNORE, gradient_factor=None)
        assert torch.equal(each, before), "nobody asked for a gradient"
        again = kernel.take_rows(each, targets, scales, ignored=IGNORE, gradient_factor=1.0)
        assert torch.equal(told, again)
        torch.testing.assert_close(told.double(), losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(each.double(), gradient, rtol=1e-4, atol=1e-5)
    assert padded[:, columns:].isnan().all(), "nothing is written beside the rows"


def test_forbidden_tokens_and_targets_outside(kernel: Any) -> None:
    logits, targets, scales, _ = given(8, 40, seed=1)
    scales += targets != IGNORE
    logits[:, :20], targets[targets != IGNORE] = -math.inf, 33
    losses, gradient = expected(logits, targets, scales)
    told = kernel.take_rows(logits, targets, scales, ignored=IGNORE, gradient_factor=1.0)
    torch.testing.assert_close(told.double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-4, atol=1e-5)
    assert not logits[:, :20].any()
    for outside in (40, -1):
        fresh, _, _, _ = given(8, 40, seed=2)
        wrong = torch.full_like(targets, outside)
        told = kernel.take_rows(fresh, wrong, scales + 1, ignored=IGNORE, gradient_factor=1.0)
        assert told.isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(kernel: Any, bad: float) -> None:
    logits, targets, scales, _ = given(8, 40, seed=3)
    logits[2, 39] = bad
    told = kernel.take_rows(logits, targets, scales + 1, ignored=IGNORE, gradient_factor=1.0)
    assert not told[2].isfinite()
    assert told[[1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 5, 23])
@pytest.mark.parametrize("dtype", list(ROUNDED))
def test_the_head_with_it_computes_what_it_does_without(
    monkeypatch: pytest.MonkeyPatch, tokens: int, dtype: torch.dtype
) -> None:
    """Chunks that do not divide the tokens, targets that lie apart in memory, weights beyond what fp16 could hold."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 12, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(45, 12, generator=generator).to(dtype).requires_grad_()
    apart = torch.randint(45, (tokens, 3), generator=generator)
    apart[::4] = IGNORE
    shares = torch.rand(tokens, 2, generator=generator) * 1000
    learnt = (x, weight)

    def computed() -> list[Tensor]:
        total = linear_cross_entropy(x, weight, apart[:, 1], shares[:, 0], chunk_tokens=4)
        return [total.detach(), *torch.autograd.grad(total * 0.001, learnt)]

    found = computed()
    monkeypatch.setattr(head, "has_kernel", lambda _x: False)
    for got, wanted in zip(found, computed(), strict=True):
        assert got.dtype == wanted.dtype
        assert (got.double() - wanted.double()).norm() <= ROUNDED[dtype] * wanted.double().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_tokens_are_a_sum_and_gradients_of_zero(dtype: torch.dtype) -> None:
    """As without the kernel: a weight without a gradient would keep its moments, and ranks would differ."""
    x, weight = torch.empty(0, 12, dtype=dtype).requires_grad_(), torch.randn(45, 12).to(dtype).requires_grad_()
    total = linear_cross_entropy(x, weight, torch.empty(0, dtype=torch.int64), chunk_tokens=4)
    total.backward()
    assert float(total.detach()) == 0
    assert weight.grad is not None
    assert not weight.grad.any()
    with torch.no_grad():
        assert float(linear_cross_entropy(x, weight, torch.empty(0, dtype=torch.int64), chunk_tokens=4)) == 0


@pytest.mark.parametrize("announced", [1.0, 0.001, 0.003, -2.0, 0.0])
def test_a_factor_that_is_known_before_is_in_the_gradients_once(kernel: Any, announced: float) -> None:
    """Whether the sum is then multiplied by it or by another one; the sum itself knows nothing of it."""
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(rows, 12, generator=generator, requires_grad=True) for rows in (23, 45))
    bias = torch.randn(45, generator=generator, requires_grad=True)
    targets, learnt = torch.randint(45, (23,), generator=generator), (x, weight, bias)

    def computed() -> list[Tensor]:
        total = linear_cross_entropy(x.t().contiguous().t(), weight, targets, chunk_tokens=4, bias_V=bias)
        return [total.detach(), *torch.autograd.grad(total * 0.001, learnt)]

    wanted = computed()
    with head.summands_of(announced):
        found = computed()
    assert torch.equal(found[0], wanted[0])
    for got, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-8)
    assert torch.equal(computed()[1], wanted[1]), "it ends with its block"


def test_a_second_backward_pass_is_refused() -> None:
    """The first has multiplied the gradients where they lie, and given them away."""
    x, weight = torch.randn(9, 12, requires_grad=True), torch.randn(45, 12)
    total = linear_cross_entropy(x, weight, torch.randint(45, (9,)), chunk_tokens=4)
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        total.backward()


def test_what_is_multiplied_already_is_left_as_it_is(kernel: Any) -> None:
    numbers = torch.randn(3 * BLOCK + 5)
    before = numbers.clone()
    kernel.multiply(numbers, torch.tensor(0.1), done=0.1)
    assert torch.equal(numbers, before)
    kernel.multiply(numbers, torch.tensor(0.1), done=0.2)
    torch.testing.assert_close(numbers, before / 2)
    kernel.multiply(numbers, torch.tensor(math.nan), done=math.nan)
    assert numbers.isnan().all(), "a loss that is not finite is seen"
