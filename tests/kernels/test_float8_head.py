"""Gradients of the output matrix in float8, on the CPU: by plain operations; the kernels by Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels import float8_head
from lockstep.kernels import linear_cross_entropy as head
from lockstep.kernels.linear_cross_entropy import IGNORE
from lockstep.models import llama
from lockstep.models.build import build
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve
from tests import interpreted
from tests.float8_head_reference import FACTOR, check_gradients, exactly, gradients, head_case
from tests.float8_reference import error

SIZES = [(16, 16, 16), (37, 64, 96), (200, 32, 304)]  # N, D, V


@pytest.mark.parametrize(("tokens", "width", "words"), SIZES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [15, 16, 50])  # also less than products can have, and no multiple of it
def test_gradients_are_those_of_rounded_numbers(
    tokens: int, width: int, words: int, weighted: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "has_kernel", lambda _x: True)  # else so few tokens are not taken in chunks
    monkeypatch.setattr(float8_head, "has_kernel", lambda _x: False)
    monkeypatch.setattr(head._ChunkedSum, "backward", plain_backward)
    given = head_case(tokens, width, words, weighted=weighted)
    check_gradients(given, gradients(given, chunk=chunk))


@pytest.mark.parametrize("foretold", [FACTOR, 1.0, 0.3, 1e-6, 0.0])
def test_matrices_that_do_not_lie_by_rows(foretold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels, which multiply by what is foretold at once, and by the rest of it later."""
    x, weight, targets, weights = head_case(64, 32, 48, weighted=True)
    expected = gradients((x, weight, targets, weights), chunk=32)
    across = [each.detach().t().contiguous().t().requires_grad_() for each in (x, weight)]
    apart = torch.stack([targets, targets], dim=1)[:, 0]
    with (
        interpreted.module(monkeypatch, "float8_tiles"),
        interpreted.module(monkeypatch, "cross_entropy_rows"),
        monkeypatch.context() as patch,
    ):
        for module in (head, float8_head):
            patch.setattr(module, "has_kernel", lambda _x: True)
        found = gradients((across[0], across[1], apart, weights), chunk=32, foretold=foretold)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other.double()) < 0.005


def plain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Without the kernel that multiplies in place."""
    rest = grad / ctx.ahead  # of what was foretold
    return None, *[None if each is None else each * rest for each in ctx.gradients], *[None] * head.OTHERS


def test_rounding_is_seen_and_rounding_more_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: it is float8 at all, and one digit less, or a wrong scale, does not pass."""
    given = head_case(200, 32, 304, weighted=False)
    for found, right in zip(gradients(given, chunk=64)[1:], exactly(given)[1:], strict=True):
        assert error(found, right) > 0.03
    for found, right in zip(gradients(given, chunk=64, float8=False)[1:], exactly(given)[1:], strict=True):
        assert error(found, right) < 0.015
    right_taken, right_turned = float8_head.taken, float8_head.turned

    def coarse(*args: Tensor) -> tuple[Tensor, float8_head.Delta]:
        losses, (by_tokens, by_words) = right_taken(*args)
        fewer = [((each.view(torch.uint8) & 0xFE).view(each.dtype), scale) for each, scale in (by_tokens, by_words)]
        return losses, float8_head.Delta(*fewer)

    def off(*args: Any) -> float8_head.Cast:
        numbers, scale = right_turned(*args)
        return numbers, scale * 1.02

    for name, wrong in (("taken", coarse), ("turned", off)):
        with monkeypatch.context() as patch:
            patch.setattr(float8_head, name, wrong)
            with pytest.raises(AssertionError):
                check_gradients(given, gradients(given, chunk=64))


def test_small_weights_beside_large_ones() -> None:
    """Weights of 1/p reach 1000: each row of dx has its digits, and dW those of all tokens together."""
    given = head_case(160, 32, 64, weighted=True)
    _, grad_x, grad_weight = gradients(given, chunk=16)
    _, right_x, right_weight = exactly(given)
    for row, right in zip(grad_x, right_x, strict=True):
        assert error(row, right) < 0.15 if right.any() else not row.any()
    assert error(grad_weight, right_weight) < 0.06
    light = (*given[:2], given[2].where(torch.arange(160) >= 80, IGNORE), given[3])  # weights of 1 to 2 alone
    assert error(gradients(light, chunk=16)[2], exactly(light)[2]) < 0.06


def test_rare_words_learn() -> None:
    """A share of a large vocabulary is a millionth and less, which e4m3, or a smaller ONE, would lose."""
    x, weight, targets, _ = head_case(160, 32, 64, weighted=False)
    with torch.no_grad():
        bias = torch.zeros(64)
        bias[7] = -17.0
        targets[targets == 7] = 8
    wide = x.detach().double(), weight.detach().double()
    logits = wide[0].bfloat16().double() @ wide[1].bfloat16().double().T + bias
    shares = logits.softmax(-1)[:, 7] * (targets != IGNORE)
    assert 0 < float(shares.max()) < 1e-5
    _, _, grad_weight = gradients((x, weight, targets, None), chunk=16, bias=bias)
    assert error(grad_weight[7], shares @ wide[0] / 8) < 0.15


def test_forbidden_words_stay_so_where_tokens_are_filled_up() -> None:
    """Token 0 too, which fills nothing."""
    x, weight, targets, _ = head_case(37, 32, 48, weighted=False)
    bias = torch.zeros(48)
    bias[[0, 11]] = -math.inf
    targets[(targets == 0) | (targets == 11)] = 1
    total, grad_x, grad_weight = gradients((x, weight, targets, None), chunk=16, bias=bias)
    plain = gradients((x, weight, targets, None), chunk=16, bias=bias, float8=False)
    assert float(total) == pytest.approx(float(plain[0]), rel=1e-6)
    assert not grad_weight[[0, 11]].any()
    assert error(grad_x, plain[1].double()) < 0.08
    assert error(grad_weight, plain[2].double()) < 0.08


def test_who_cannot_is_served_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides that are no multiples of 16, a bias that learns, another precision: the same bits as without."""
    monkeypatch.setattr(float8_head, "chunked_sum", lambda *_, **__: pytest.fail("not for this one"))
    for given in (head_case(50, 24, 32, weighted=False), head_case(50, 32, 24, weighted=False)):
        for one, other in zip(gradients(given, chunk=16), gradients(given, chunk=16, float8=False), strict=True):
            assert torch.equal(one, other)
    given = head_case(50, 32, 32, weighted=True)
    gradients(given, chunk=16, bias=torch.zeros(32, requires_grad=True))
    head.linear_cross_entropy(*given, chunk_tokens=16, float8=True).backward()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        head.linear_cross_entropy(*given, chunk_tokens=16, float8=True)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_the_gradient_that_is_needed_is_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets, weights = head_case(50, 32, 48, weighted=True)
    products: list[tuple[int, ...]] = []
    right = float8_head.product

    def counted(*casts: float8_head.Cast) -> Tensor:
        made = right(*casts)
        products.append(tuple(made.shape))
        return made

    monkeypatch.setattr(float8_head, "product", counted)
    (x if frozen == "x" else weight).requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head.linear_cross_entropy(x, weight, targets, weights, chunk_tokens=32, float8=True).backward()
    assert products == ([(48, 32)] * 2 if frozen == "x" else [(32, 32), (32, 32)])  # 50 tokens are filled up to 64
    assert (x.grad is None, weight.grad is None) == (frozen == "x", frozen == "weight")


@pytest.mark.parametrize("chunk", [16, 25, 1000])
def test_products_are_such_as_a_gpu_takes_and_their_sums_exact(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes any, and knows no others."""
    seen: list[tuple[int, ...]] = []
    right = float8_head.scaled_product

    def asked(left: float8_head.Cast, other: float8_head.Cast, **how: Any) -> Tensor:
        assert how == {"out_dtype": torch.float32, "exact": True}
        assert left[0].is_contiguous()
        assert other[0].t().is_contiguous()
        seen.append((*left[0].shape, other[0].shape[1]))
        return right(left, other, **how)

    monkeypatch.setattr(float8_head, "scaled_product", asked)
    monkeypatch.setattr(head, "has_kernel", lambda _x: True)  # else few tokens are not taken in chunks
    monkeypatch.setattr(float8_head, "has_kernel", lambda _x: False)
    monkeypatch.setattr(head._ChunkedSum, "backward", plain_backward)
    gradients(head_case(70, 32, 48, weighted=False), chunk=chunk)
    assert seen
    assert all(size % 16 == 0 for sizes in seen for size in sizes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_stays_so(bad: float, place: int) -> None:
    given = head_case(50, 32, 48, weighted=False)
    with torch.no_grad():
        given[:2][place][3, 5] = bad
    total, *found = gradients(given, chunk=16)
    assert not total.isfinite()
    assert not any(each.isfinite().all() for each in found)


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (15, 33), (40, 7), (64, 80)])
def test_the_kernels_write_what_plain_operations_do(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.full((rows, columns + 5), math.nan)  # rows further apart than they are long
    logits[:, :columns] = torch.randn(rows, columns, generator=generator) * 4
    logits, targets = logits[:, :columns], torch.randint(columns, (rows,), generator=generator)
    targets[::3] = IGNORE
    scales = torch.rand(rows, generator=generator) * (targets != IGNORE)
    losses, (by_tokens, by_words) = float8_head.taken(logits.clone(), targets, scales)
    known = targets != IGNORE  # the others are of no weight, whatever they are
    with (
        interpreted.module(monkeypatch, "float8_tiles") as tiles,
        interpreted.module(monkeypatch, "cross_entropy_rows") as rows_kernel,
    ):
        monkeypatch.setattr(tiles, "ROWS", 16)
        monkeypatch.setattr(tiles, "COLUMNS", 8)
        monkeypatch.setattr(rows_kernel, "BLOCK", 16)
        monkeypatch.setattr(rows_kernel, "SHORT_BLOCK", 16)
        monkeypatch.setattr(float8_head, "has_kernel", lambda _x: True)
        told, (one, other) = float8_head.taken(logits, targets, scales)
        matrix = torch.randn(rows, columns, generator=generator)
        turned = float8_head.turned(matrix)
    torch.testing.assert_close(told, losses, rtol=1e-5, atol=1e-5)
    for found, plain in ((one, by_tokens), (other, by_words)):
        assert found[0].shape == plain[0].shape
        assert torch.equal(found[1], plain[1])
    assert torch.equal(one[0].float().T, other[0].float()), "the same numbers, turned over"
    apart = one[0].float()[known] != by_tokens[0].float()[known]
    assert float(apart.float().mean()) < 0.01, "exp may differ in its last bit"
    monkeypatch.setattr(float8_head, "has_kernel", lambda _x: False)
    numbers, scale = float8_head.turned(matrix)
    assert torch.equal(turned[0].float(), numbers.float())
    assert torch.equal(turned[1], scale)


@pytest.mark.parametrize(("kind", "expected"), [("fp8", True), ("bf16", False)])
def test_a_model_asks_for_it(kind: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = LlamaOptions(model_path="lockstep/tiny", init_std=0.05)
    built = build(
        options, resolve(options, context_length=64), device=torch.device("cpu"), dtype_name=kind, seed=1,
        checkpointing=False, deterministic=False, debug=False,
    )  # fmt: skip
    made: list[str] = []
    for name, module in (("float8", float8_head), ("plain", head)):
        real = getattr(module, "chunked_sum" if name == "float8" else "_chunked_sum")
        monkeypatch.setattr(
            module,
            real.__name__,
            lambda *args, real=real, name=name, **named: made.append(name) or real(*args, **named),
        )
    monkeypatch.setattr(llama, "chunk_tokens", lambda *_, **__: 32)
    ids = torch.randint(5, 500, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        built.model(ids, ids).backward()
    assert made == ["float8" if expected else "plain"]
    assert all(parameter.grad is not None for parameter in built.model.parameters())
