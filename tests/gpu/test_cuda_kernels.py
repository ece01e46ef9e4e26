"""Kernels of our own on a real GPU beside their plain references: cross-entropy of rows, AdamW of large tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.kernels import linear_cross_entropy as head
from lockstep.kernels.linear_cross_entropy import IGNORE, linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACCURACY = {"fp32": 1e-5, "bf16": 8e-3, "fp16": 1e-3}
CHUNK = 512
Case = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def case(rows: int, vocabulary: int, *, weighted: bool, biased: bool, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    x = torch.randn(rows, 256, device=CUDA).requires_grad_()
    weight = (torch.randn(vocabulary, 256, device=CUDA) * 0.1).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), device=CUDA)
    targets[::5] = IGNORE
    bias = torch.randn(vocabulary, device=CUDA).requires_grad_() if biased else None
    return x, weight, targets, torch.rand(rows, device=CUDA) * 100 if weighted else None, bias


def computed(given: Case, precision: str) -> list[Tensor]:
    """The sum and its gradients, scaled as a step scales them."""
    x, weight, targets, weights, bias = given
    learnt = [x, weight] if bias is None else [x, weight, bias]
    with torch.autocast("cuda", dtype=DTYPES[precision], enabled=precision != "fp32"):
        total = linear_cross_entropy(x, weight, targets, weights, chunk_tokens=CHUNK, bias_V=bias)
    return [total.detach(), *torch.autograd.grad(total * 0.125, learnt)]


def expected(given: Case) -> list[Tensor]:
    x, weight, targets, weights, bias = given
    learnt = [x, weight] if bias is None else [x, weight, bias]
    wide = [each.detach().double().requires_grad_() for each in learnt]
    logits = nn.functional.linear(*wide)
    losses = nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)
    total = (losses if weights is None else losses * weights).sum()
    return [total.detach(), *torch.autograd.grad(total * 0.125, wide)]


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "vocabulary"), [(100, 37), (CHUNK + 3, 1000), (2 * CHUNK + 77, 20_011)])
def test_rows_of_logits(precision: str, weighted: bool, biased: bool, rows: int, vocabulary: int) -> None:
    given = case(rows, vocabulary, weighted=weighted, biased=biased)
    for got, wanted in zip(computed(given, precision), expected(given), strict=True):
        assert got.dtype == torch.float32
        assert distance(got, wanted) < ACCURACY[precision]


@pytest.mark.parametrize("precision", list(DTYPES))
def test_bits_repeat_and_the_plain_operations_agree(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(700, 5003, weighted=True, biased=False)
    first, second = computed(given, precision), computed(given, precision)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    monkeypatch.setattr(head, "has_kernel", lambda _x: False)
    for got, wanted in zip(first, computed(given, precision), strict=True):
        assert distance(got, wanted.double()) < ACCURACY[precision]


def test_a_wrong_row_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one weight in a thousand off by a tenth is beyond the tolerance of fp32."""
    given = case(1000, 1000, weighted=True, biased=False)
    wanted = expected(given)
    weights = given[3]
    assert weights is not None
    weights[501] *= 1.1
    assert any(
        distance(got, right) > ACCURACY["fp32"] for got, right in zip(computed(given, "fp32"), wanted, strict=True)
    )


def test_a_forbidden_token_has_no_share_and_a_target_outside_is_no_number() -> None:
    x, weight, targets, _, _ = case(64, 300, weighted=False, biased=False)
    forbidden = torch.zeros(300, device=CUDA)
    forbidden[0] = -math.inf
    targets[targets == 0] = 1
    _, gradient = torch.autograd.grad(
        linear_cross_entropy(x, weight, targets, chunk_tokens=CHUNK, bias_V=forbidden), (x, weight)
    )
    assert not gradient[0].any()
    assert gradient[1:].isfinite().all()
    targets[3] = 300
    assert linear_cross_entropy(x, weight, targets, chunk_tokens=CHUNK).isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x, weight, targets, _, _ = case(64, 9000, weighted=False, biased=False)
    with torch.no_grad():
        x[1, 7] = bad
    total = linear_cross_entropy(x, weight, targets, chunk_tokens=CHUNK)
    (gradient,) = torch.autograd.grad(total, weight)
    assert not total.isfinite()
    assert not gradient.isfinite().all()


def test_without_gradients_the_sum_is_the_same() -> None:
    given = case(900, 2000, weighted=True, biased=True)
    with torch.no_grad():
        x, weight, targets, weights, bias = given
        total = linear_cross_entropy(x, weight, targets, weights, chunk_tokens=CHUNK, bias_V=bias)
    assert torch.equal(total, computed(given, "fp32")[0])


@pytest.mark.parametrize("bucket", [False, True])
def test_gradients_of_several_micro_batches_add_up_in_a_head_that_is_the_table_too(bucket: bool) -> None:
    """What becomes .grad without a copy is nobody else's; where .grad lies in a bucket, it stays there."""
    _, weight, _, _, _ = case(1, 3000, weighted=False, biased=False)
    flat = torch.zeros(weight.numel() + 64, device=CUDA)
    weight.grad = flat[64:].view_as(weight) if bucket else None
    wide = weight.detach().double().requires_grad_()
    for seed in range(3):
        generator = torch.Generator(CUDA).manual_seed(seed)
        ids = torch.randint(3000, (CHUNK + 9, 2), device=CUDA, generator=generator)
        total = linear_cross_entropy(nn.functional.embedding(ids[:, 0], weight), weight, ids[:, 1], chunk_tokens=CHUNK)
        (total * 0.5).backward()
        logits = nn.functional.linear(nn.functional.embedding(ids[:, 0], wide), wide)
        (nn.functional.cross_entropy(logits, ids[:, 1], reduction="sum") * 0.5).backward()
        assert weight.grad is not None
        assert wide.grad is not None
        assert distance(weight.grad, wide.grad) < ACCURACY["fp32"]
    if bucket:
        assert weight.grad.data_ptr() == flat[64:].data_ptr()
        assert not flat[:64].any()


@pytest.mark.parametrize("precision", list(DTYPES))
def test_no_tokens_are_a_sum_and_gradients_of_zero(precision: str) -> None:
    x, weight, targets, _, bias = case(0, 300, weighted=False, biased=True)
    total, *gradients = computed((x, weight, targets, None, bias), precision)
    assert float(total) == 0
    assert [gradient.shape for gradient in gradients] == [x.shape, weight.shape, (300,)]
    assert not any(gradient.any() for gradient in gradients)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        # small numbers, as weights are: rounding those of size 1 by itself is more than the distance allowed
        self.large = nn.Parameter(0.02 * torch.randn(1100, 1000, device=CUDA))  # by our kernel, the other by torch's
        self.small = nn.Parameter(0.02 * torch.randn(30, 1000, device=CUDA))


def trained(steps: int, *, kernel: bool, skipped: int = -1, beta2: float = 0.95) -> tuple[Two, AdamW]:
    model = Two()
    options = TrainingOptions(weight_decay=0.1, adam_beta2=beta2)
    optimizer = AdamW(model, options, CUDA)
    optimizer.has_kernel = kernel
    optimizer.lr.fill_(1e-2)
    divisor = torch.tensor(3.0, device=CUDA)
    for step in range(steps):
        generator = torch.Generator(CUDA).manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device=CUDA, generator=generator)
            if step == skipped:
                parameter.grad[0, 0] = math.nan
        optimizer.step(divisor, torch.tensor(float(step == skipped), device=CUDA))
    return model, optimizer


def plainly(steps: int, *, beta2: float) -> dict[str, list[Tensor]]:
    """The same by its formulas in fp64: weights and both moments of the large tensor, then of the small one."""
    found: dict[str, list[Tensor]] = {"weights": [], "exp_avg": [], "exp_avg_sq": []}
    places = [(place, parameter.detach().double()) for place, parameter in enumerate(Two().parameters())]
    for place, weights in places:
        first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        for step in range(steps):
            generator = torch.Generator(CUDA).manual_seed(step)
            drawn = [torch.randn(other.shape, device=CUDA, generator=generator) for _, other in places]
            gradient = drawn[place].double() / 3
            first = 0.9 * first + 0.1 * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            weights = weights * (1 - 1e-2 * 0.1)
            root = (second / (1 - beta2 ** (step + 1))).sqrt()
            weights = weights - 1e-2 * first / (1 - 0.9 ** (step + 1)) / (root + 1e-8)
        for kind, value in (("weights", weights), ("exp_avg", first), ("exp_avg_sq", second)):
            found[kind].append(value)
    return found


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adamw_computes_its_formulas(beta2: float) -> None:
    """Ours in fp32 nearly as in fp64; torch's takes 1 - beta2 in fp32, which is 1.3e-5 off for 0.999."""
    expected, begun = plainly(20, beta2=beta2), Two()
    for kernel, allowed in ((True, 1e-6), (False, 3e-5)):
        model, optimizer = trained(20, kernel=kernel, beta2=beta2)
        parameters = zip(model.parameters(), begun.parameters(), strict=True)
        for place, (own, first) in enumerate(list(parameters)[: 1 if kernel else 2]):
            moved = expected["weights"][place] - first.detach().double()
            assert distance(own.detach() - first.detach(), moved) < allowed
            for kind in ("exp_avg", "exp_avg_sq"):
                assert distance(optimizer.moments()[id(own)][kind], expected[kind][place]) < allowed
    (one, _), (again, _) = (trained(20, kernel=True, beta2=beta2) for _ in range(2))
    assert torch.equal(one.large, again.large)


def test_a_skipped_step_of_adamw_changes_nothing() -> None:
    model, optimizer = trained(6, kernel=True, skipped=5)
    before, kept = trained(5, kernel=True)
    assert torch.equal(model.large, before.large)
    assert torch.equal(optimizer.moments()[id(model.large)]["exp_avg"], kept.moments()[id(before.large)]["exp_avg"])
    assert float(optimizer.applied) == 5
