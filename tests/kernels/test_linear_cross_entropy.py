"""The chunked head and cross-entropy against F.cross_entropy."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.kernels.linear_cross_entropy import linear_cross_entropy, score_next_tokens, score_targets

N, D, V = 50, 16, 37


def case(*, ignored: bool, weighted: bool, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    x = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (N,))
    if ignored:
        targets[::3] = -100
    return x, weight, targets, torch.rand(N, dtype=dtype) * 10 if weighted else None


def reference(x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None) -> Tensor:
    losses = F.cross_entropy(F.linear(x, weight).double(), targets, reduction="none")
    return (losses if token_weights is None else losses * token_weights).sum()


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [7, 16, 50, 1000])
def test_sum_and_gradients(ignored: bool, weighted: bool, chunk: int) -> None:
    x, weight, targets, token_weights = case(ignored=ignored, weighted=weighted)
    expected = reference(x, weight, targets, token_weights)
    total = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert total.dtype == torch.float32
    scaled = torch.autograd.grad(total * 3.5, (x, weight))
    for got, wanted in zip(scaled, torch.autograd.grad(expected * 3.5, (x, weight)), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        again = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk)
    assert float(again) == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none: it came with 2.13")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_torchs_own(biased: bool, dtype: torch.dtype) -> None:
    """Its chunked path, which computes gradients in the forward pass too; it knows no weights of tokens."""
    x, weight, targets, _ = case(ignored=True, weighted=False, dtype=dtype)
    bias = torch.randn(V, dtype=dtype, requires_grad=True) if biased else None
    learnt = (x, weight) if bias is None else (x, weight, bias)
    theirs = F.linear_cross_entropy(
        x, weight, targets, linear_bias=bias, reduction="sum",
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=16, acc_policy="accurate"),
    )  # fmt: skip
    ours = linear_cross_entropy(x, weight, targets, chunk_tokens=16, bias_V=bias)
    accuracy = 1e-6 if dtype == torch.float32 else 0.01
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=accuracy)
    gradients = (torch.autograd.grad(each * 3.5, learnt) for each in (ours, theirs))
    for got, wanted in zip(*gradients, strict=True):
        assert float((got - wanted).float().norm() / wanted.float().norm()) < accuracy


@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(weighted: bool) -> None:
    x, weight, targets, token_weights = case(ignored=True, weighted=weighted, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, targets, token_weights, chunk_tokens=16), (x, weight)
    )


def test_only_what_needs_a_gradient_gets_one_and_nothing_is_written_in_forward() -> None:
    x, weight, targets, _ = case(ignored=False, weighted=False)
    total = linear_cross_entropy(x, weight.detach(), targets, chunk_tokens=16)
    assert x.grad is None
    total.backward()
    assert x.grad is not None
    assert weight.grad is None


def test_all_targets_ignored_is_zero() -> None:
    x, weight, targets, _ = case(ignored=False, weighted=False)
    for chunk in (16, 64):
        total = linear_cross_entropy(x, weight, torch.full_like(targets, -100), chunk_tokens=chunk)
        assert float(total.detach()) == 0
        assert all(not gradient.any() for gradient in torch.autograd.grad(total, (x, weight)))


def test_under_checkpointing_the_gradient_comes_once() -> None:
    x, weight, targets, _ = case(ignored=True, weighted=False)

    def head(a: Tensor) -> Tensor:
        return linear_cross_entropy(a, weight, targets, chunk_tokens=16)

    plain = torch.autograd.grad(head(x), (x, weight))
    head_again = checkpoint(head, x, use_reentrant=False)
    assert isinstance(head_again, Tensor)
    head_again.backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, plain[0])
    assert torch.equal(weight.grad, plain[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_half_precision_with_a_loss_scale(dtype: torch.dtype, weighted: bool) -> None:
    """fp16: the gradient of a SUM, scaled, is right; divided by the count first it would round to zero."""
    torch.manual_seed(0)
    x = torch.randn(64, 32, requires_grad=True)
    weight = (torch.randn(200, 32) * 0.02).requires_grad_()
    targets = torch.randint(0, 200, (64,))
    token_weights = torch.rand(64) * 1000 if weighted else None  # 1/p reaches 1000
    expected = torch.autograd.grad(reference(x, weight, targets, token_weights), (x, weight))
    scale = 65536.0 / 1e6  # the scaler's factor over a million targets
    with torch.autocast("cpu", dtype=dtype):
        total = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=16)
    assert total.dtype == torch.float32
    for got, wanted in zip(torch.autograd.grad(total * scale, (x, weight)), expected, strict=True):
        assert got.dtype == torch.float32
        error = (got / scale - wanted).norm() / wanted.norm()
        assert float(error) < 0.02
    divided = (expected[0] / 1e6).half()  # the control: what dividing inside an fp16 head would have left
    assert weighted or float((divided == 0).float().mean()) > 0.2


@pytest.mark.parametrize("bad", [V, -1, 10_000])
@pytest.mark.parametrize("chunk", [16, 64])
def test_a_target_outside_the_vocabulary_raises(bad: int, chunk: int) -> None:
    x, weight, targets, _ = case(ignored=False, weighted=False)
    targets[3] = bad
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(x, weight, targets, chunk_tokens=chunk)


def test_no_full_logits_ever_exist() -> None:
    """Peak memory of the chunked path stays near one chunk; the plain path's does not (the control)."""

    def largest(chunk: int) -> int:
        x = torch.randn(512, 8, requires_grad=True)
        weight = torch.randn(4096, 8, requires_grad=True)
        targets = torch.randint(0, 4096, (512,))
        with torch.profiler.profile(profile_memory=True) as profile:
            linear_cross_entropy(x, weight, targets, chunk_tokens=chunk).backward()
        return max(event.self_cpu_memory_usage for event in profile.events())

    logits = 512 * 4096 * 4
    assert largest(512) >= logits
    assert largest(64) <= logits // 8


def test_scores_for_evaluation() -> None:
    x, weight, targets, _ = case(ignored=True, weighted=False)
    keep = targets != -100
    right = int((F.linear(x, weight).argmax(-1) == targets)[keep].sum())
    for chunk in (16, 64):
        total, correct = score_next_tokens(x, weight, targets, chunk_tokens=chunk)
        assert float(total) == pytest.approx(float(reference(x, weight, targets, None).detach()), rel=1e-6)
        assert int(correct) == right


@pytest.mark.parametrize("chunk", [7, 50])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_bias_and_its_gradient(chunk: int, weighted: bool) -> None:
    x, weight, targets, token_weights = case(ignored=True, weighted=weighted)
    bias = torch.randn(V, requires_grad=True)
    losses = F.cross_entropy(F.linear(x, weight, bias).double(), targets, reduction="none")
    expected = (losses if token_weights is None else losses * token_weights).sum()
    total = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk, bias_V=bias)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    without = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk)
    assert float(without.detach()) != pytest.approx(float(expected.detach()), rel=1e-3)
    learnt = (x, weight, bias)
    for got, wanted in zip(
        torch.autograd.grad(total * 3.5, learnt), torch.autograd.grad(expected * 3.5, learnt), strict=True
    ):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        again = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk, bias_V=bias)
    assert float(again) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_gradcheck_of_the_bias_and_of_the_bias_alone() -> None:
    x, weight, targets, _ = case(ignored=True, weighted=False, dtype=torch.float64)
    x, targets = x[:7].detach().requires_grad_(), targets[:7]
    bias = torch.randn(V, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a, b, c: linear_cross_entropy(a, b, targets, chunk_tokens=3, bias_V=c), (x, weight, bias)
    )
    linear_cross_entropy(x.detach(), weight.detach(), targets, chunk_tokens=3, bias_V=bias).backward()
    assert bias.grad is not None
    assert weight.grad is None


def test_a_bias_under_autocast_is_learnt_in_fp32() -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(64, 32), torch.randint(0, 200, (64,))
    weight, bias = (torch.randn(200, 32) * 0.02).requires_grad_(), torch.randn(200).requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, weight, bias), targets, reduction="sum"), (weight, bias))
    for chunk in (16, 64):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = linear_cross_entropy(x, weight, targets, chunk_tokens=chunk, bias_V=bias)
        for got, wanted in zip(torch.autograd.grad(total, (weight, bias)), expected, strict=True):
            assert got.dtype == torch.float32
            assert float((got - wanted).norm() / wanted.norm()) < 0.02


def test_a_weight_in_fp32_is_learnt_in_fp32_from_bf16_tokens() -> None:
    """Of bf16 tokens: what two parts of them add is what all add, to the last digits of fp32 and not of bf16."""
    x, weight, targets, _ = case(ignored=False, weighted=False)
    x = x.detach().bfloat16()

    def gradient(rows: slice) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = linear_cross_entropy(x[rows], weight, targets[rows], chunk_tokens=8)
        return torch.autograd.grad(total, weight)[0]

    whole = gradient(slice(None))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(gradient(slice(0, 24)) + gradient(slice(24, N)), whole, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_bias_is_as_exact_as_its_logits() -> None:
    """bf16 holds these logits exactly, so that nothing but the sum can be off."""
    torch.manual_seed(0)
    x, targets = torch.randint(-1, 2, (N, D)).float(), torch.randint(V, (N,))
    weight, bias = torch.randint(-1, 2, (V, D)) / 4, torch.randint(-4, 5, (V,)).div(4).requires_grad_()
    exact = F.cross_entropy(F.linear(x.double(), weight.double(), bias.double()), targets, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = linear_cross_entropy(x, weight, targets, chunk_tokens=16, bias_V=bias)
    (got,), (wanted,) = (torch.autograd.grad(each, bias) for each in (total, exact))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 50])
@pytest.mark.parametrize("count", [0, 1, N])
def test_targets_one_by_one(chunk: int, count: int) -> None:
    x, weight, targets, _ = case(ignored=False, weighted=False)
    x, targets, bias = x[:count], targets[:count], torch.randn(V)
    losses, correct = score_targets(x, weight, targets, chunk_tokens=chunk, bias_V=bias)
    logits = F.linear(x, weight, bias).detach()
    assert torch.allclose(losses, F.cross_entropy(logits, targets, reduction="none"), atol=1e-5)
    assert torch.equal(correct, logits.argmax(-1) == targets)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    total = linear_cross_entropy(x, weight, targets, chunk_tokens=chunk, bias_V=bias)
    assert float(total.detach()) == pytest.approx(float(losses.sum()), rel=1e-5)


# ----------------------------------------------------------------------------------------------------- forbidden tokens

FORBIDDEN = (0, 5, 30, 36)  # 0 is what an ignored target is replaced by


def forbidding(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A case with weights up to 1000, as 1/p has, ignored targets, and tokens that no target is."""
    x, weight, targets, _ = case(ignored=True, weighted=False, dtype=dtype)
    bias = torch.zeros(V, dtype=dtype)
    bias[list(FORBIDDEN)] = -torch.inf
    for token in FORBIDDEN:
        targets[targets == token] = 1
    return x, weight, targets, 1 / torch.linspace(0.001, 1, N, dtype=dtype), bias


@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_a_forbidden_token_has_no_share_of_the_sum(chunk: int) -> None:
    x, weight, targets, token_weights, bias = forbidding(torch.float64)
    allowed = [token for token in range(V) if token not in FORBIDDEN]
    renamed = torch.tensor([allowed.index(int(t)) if t >= 0 else -100 for t in targets])
    expected = reference(x, weight[allowed], renamed, token_weights)  # as if they were not in the vocabulary
    total = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk, bias_V=bias)
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    wanted = torch.autograd.grad(expected, (x, weight))
    for got, want in zip(torch.autograd.grad(total, (x, weight)), wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)
    assert not wanted[1][list(FORBIDDEN)].any()
    plain = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk)
    assert float((plain - total).detach()) > 1  # they would have had one


def test_gradcheck_with_forbidden_tokens() -> None:
    x, weight, targets, _, bias = forbidding(torch.float64)
    x = x[:12].detach().requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda a, b: linear_cross_entropy(a, b, targets[:12], chunk_tokens=5, bias_V=bias), (x, weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forbidden_tokens_give_no_nan(dtype: torch.dtype) -> None:
    exact = [each.detach().double() if each.is_floating_point() else each for each in forbidding()]
    outcomes: dict[int, tuple[Tensor, ...]] = {}
    for chunk in (16, 1000):
        x, weight, targets, token_weights, bias = forbidding()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            total = linear_cross_entropy(x, weight, targets, token_weights, chunk_tokens=chunk, bias_V=bias)
            losses, correct = score_targets(x, weight, targets.clamp_min(1), chunk_tokens=chunk, bias_V=bias)
            summed, _ = score_next_tokens(x, weight, targets, chunk_tokens=chunk, bias_V=bias)
        assert total.dtype == torch.float32
        assert torch.isfinite(losses).all()
        assert torch.isfinite(summed)
        assert correct.dtype == torch.bool
        outcomes[chunk] = (total.detach(), *torch.autograd.grad(total, (x, weight)))
        assert all(torch.isfinite(each).all() for each in outcomes[chunk])
    expected = linear_cross_entropy(*exact[:4], chunk_tokens=1000, bias_V=exact[4])
    for outcome in outcomes.values():
        assert float(outcome[0]) == pytest.approx(float(expected), rel=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("needs", ["x", "weight", "bias", "x bias"])
def test_only_the_gradients_that_are_needed_are_computed(needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen head of an 8B model would else cost 2 GB for nothing."""
    from lockstep.kernels import linear_cross_entropy as kernel

    found: list[tuple[bool, ...]] = []
    real = kernel._chunked_sum

    def watched(*args: object, **options: object) -> tuple[Tensor | None, ...]:
        result = real(*args, **options)  # pyright: ignore[reportArgumentType]
        found.append(tuple(each is not None for each in result[1:]))
        return result

    monkeypatch.setattr(kernel, "_chunked_sum", watched)
    x, weight, targets, token_weights, bias = forbidding()
    tensors = {name: each.detach() for name, each in (("x", x), ("weight", weight), ("bias", bias))}
    for name in needs.split():
        tensors[name].requires_grad_(True)
    total = linear_cross_entropy(
        tensors["x"], tensors["weight"], targets, token_weights, chunk_tokens=16, bias_V=tensors["bias"]
    )
    assert found == [tuple(name in needs.split() for name in tensors)]
    total.backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) is (name in needs.split())


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("float8", [False, True])
def test_the_logits_of_a_chunk_are_gone_before_the_next_come(
    float8: bool, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They, and their gradient, which on a GPU lies in their memory: two gigabytes or more."""
    from lockstep.kernels import float8_head
    from lockstep.kernels import linear_cross_entropy as kernel

    made: list[weakref.ref[Any]] = []
    logits_of, rows, taken = kernel.logits_of, kernel._rows, float8_head.taken

    def watched(*given: Any) -> Tensor:
        assert [each for each in made if each() is not None] == []
        logits = logits_of(*given)
        made.append(weakref.ref(logits))
        return logits

    def noted(result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if result[1] is not None:
            made.append(weakref.ref(result[1] if isinstance(result[1], Tensor) else result[1].by_tokens[0]))
        return result

    for module in (kernel, float8_head):
        monkeypatch.setattr(module, "logits_of", watched)
    monkeypatch.setattr(kernel, "_rows", lambda *given, **how: noted(rows(*given, **how)))
    monkeypatch.setattr(float8_head, "taken", lambda *given: noted(taken(*given)))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if float8 else torch.float32  # in bf16 the gradient on a CPU would be a copy
    x, weight = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((64, 32), (48, 32)))
    with torch.set_grad_enabled(trains):
        total = linear_cross_entropy(x, weight, torch.randint(48, (64,)), chunk_tokens=16, float8=float8)
    assert math.isfinite(total.detach())
    assert len(made) == (8 if trains else 4)
