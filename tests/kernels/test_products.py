"""Large products: the rule, the plain reference, what is torch's.

The library is a stand-in that multiplies what lies at the addresses it is given; the real one: tests/gpu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.health.watch import OperationWatch, Surroundings
from lockstep.kernels import cublaslt, products
from lockstep.kernels.cublaslt import Kernel, Matrix
from lockstep.kernels.linear_cross_entropy import linear_cross_entropy
from lockstep.kernels.products import EVEN, SLIM, WIDE

BF16, FP32 = torch.bfloat16, torch.float32
OTHER = Kernel(23, 4, 3)


def by_rows(rows: int, columns: int) -> Matrix:
    return Matrix(rows, columns, columns, 1)


def by_columns(rows: int, columns: int) -> Matrix:
    return Matrix(rows, columns, 1, rows)


class StandIn:
    """cublasLt's functions that are called: column by column, as the library counts."""

    def __init__(self, kernels: tuple[Kernel, ...]) -> None:
        self.kernels = kernels
        self.made: dict[int, Any] = {}
        self.destroyed: list[int] = []
        self.ran: list[Kernel] = []

    def _new(self, place: Any, thing: Any) -> int:
        place._obj.value = number = 1 + len(self.made)
        self.made[number] = thing
        return 0

    def cublasLtCreate(self, place: Any) -> int:
        return self._new(place, "handle")

    def cublasLtMatmulDescCreate(self, place: Any, _sums: int, _scale: int) -> int:
        return self._new(place, {})

    def cublasLtMatmulDescSetAttribute(self, described: Any, attribute: int, value: Any, _size: Any) -> int:
        self.made[described.value][attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, place: Any, kind: int, rows: Any, columns: Any, step: Any) -> int:
        return self._new(place, (kind, rows.value, columns.value, step.value))

    def cublasLtMatmulPreferenceCreate(self, place: Any) -> int:
        return self._new(place, "preference")

    def cublasLtMatmulPreferenceSetAttribute(self, *_given: Any) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        found, count = given[-2:]
        for place, number in zip(found, range(len(self.kernels)), strict=False):
            place.algorithm[0] = number
        count._obj.value = len(self.kernels)
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm: Any, attribute: int, value: Any, *_rest: Any) -> int:
        value._obj.value = self.kernels[algorithm._obj[0]][{1: 0, 5: 1, 8: 2}[attribute]]
        return 0

    def _gone(self, thing: Any) -> int:
        self.destroyed.append(thing.value)
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = _gone

    def _read(self, address: Any, layout: Any) -> Tensor:
        """The matrix, (rows, columns), from memory where columns follow each other."""
        kind, rows, columns, step = self.made[layout.value]
        dtype = {0: FP32, 14: BF16}[kind]
        memory = (ctypes.c_byte * (((columns - 1) * step + rows) * dtype.itemsize)).from_address(address.value)
        return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (1, step))

    @_disable_current_modes()  # nobody of torch's sees what a library does
    def cublasLtMatmul(self, *given: Any) -> int:
        _, described, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, *_ = given
        turned = self.made[described.value]
        left, right = self._read(a, a_layout).float(), self._read(b, b_layout).float()
        left, right = (left.T if turned[3] else left), (right.T if turned[4] else right)
        kept = beta._obj.value * self._read(c, c_layout).float() if beta._obj.value else 0.0
        self._read(d, d_layout).copy_(alpha._obj.value * (left @ right) + kept)
        self.ran.append(self.kernels[algorithm._obj[0]])
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A card of the right kind whose library proposes the rule's kernels, but never first; all products are large."""
    made = StandIn((OTHER, WIDE, EVEN, SLIM))
    monkeypatch.setattr(cublaslt, "_library", lambda: made)
    monkeypatch.setattr(cublaslt, "_handle", lambda _device: ctypes.c_void_p(1))
    monkeypatch.setattr(cublaslt, "ALIGNED", 16)
    monkeypatch.setattr(products, "is_for", lambda _device: True)
    monkeypatch.setattr(products, "LEAST_FLOPS", 0.0)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    products._chosen.cache_clear()
    yield made
    products._chosen.cache_clear()


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("first", "second", "result", "kernel"),
    [
        (by_rows(32768, 4096), by_columns(4096, 14336), BF16, SLIM),  # forward, into many columns
        (by_rows(32768, 4096), by_columns(4096, 4096), BF16, EVEN),
        (by_rows(32768, 14336), by_columns(14336, 4096), BF16, WIDE),  # a long sum
        (by_rows(32768, 4096), by_rows(4096, 14336), BF16, EVEN),  # the gradient of what went in
        (by_rows(8192, 128256), by_rows(128256, 4096), BF16, WIDE),
        (by_columns(14336, 32768), by_rows(32768, 4096), FP32, WIDE),  # the gradient of a weight
        (by_columns(128256, 8192), by_rows(8192, 4096), FP32, WIDE),
    ],
)
def test_the_rule(first: Matrix, second: Matrix, result: torch.dtype, kernel: Kernel) -> None:
    assert products.preferred(first, second, result)[0] == kernel


def factors(turned: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    first, second = torch.randn(24, 16, dtype=BF16), torch.randn(16, 40, dtype=BF16)
    return (
        first.T.contiguous().T if "first" in turned else first,
        second.T.contiguous().T if "second" in turned else second,
    )


@pytest.mark.parametrize("turned", ["", "first", "second", "first and second"])
@pytest.mark.parametrize("result", [BF16, FP32])
def test_the_library_is_told_how_matrices_lie(library: StandIn, turned: str, result: torch.dtype) -> None:
    first, second = factors(turned)
    wanted = first.double() @ second.double()
    got = products.multiply(first, second, result=result)
    assert got.dtype == result
    assert distance(got, wanted) < (4e-3 if result == BF16 else 1e-6)
    assert library.ran == [WIDE if result == FP32 else EVEN]
    total = torch.ones(24, 40)
    assert products.multiply(first, second, total=total) is total
    assert distance(total, wanted + 1) < 1e-6


def test_rows_with_gaps_between_them(library: StandIn) -> None:
    room = torch.randn(24, 32, dtype=BF16)
    first, second = room[:, :16], factors("second")[1]
    assert distance(products.multiply(first, second), first.double() @ second.double()) < 4e-3
    assert library.ran == [EVEN]


def askew(first: Tensor, second: Tensor) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    room = torch.randn(30, 48, dtype=BF16)
    return {
        "an odd address": lambda: (room.flatten()[1 : 1 + 24 * 16].view(24, 16), second),
        "an odd step": lambda: (torch.randn(24, 17, dtype=BF16)[:, :16], second),
        "every second column": lambda: (room[:24, ::2][:, :16], second),
        "one row for all": lambda: (first[:1].expand(24, 16), second),
        "another type": lambda: (first.float(), second.float()),
        "a wide one of another type": lambda: (first.half(), second.half()),
    }


@pytest.mark.parametrize("name", list(askew(*factors(""))))
def test_what_is_torchs(library: StandIn, name: str) -> None:
    first, second = askew(*factors(""))[name]()
    assert torch.equal(products.multiply(first, second), first @ second)
    assert library.ran == []


def test_small_products_and_other_cards_are_torchs(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = factors("")
    monkeypatch.setattr(products, "LEAST_FLOPS", 2.0 * 24 * 16 * 40 + 1)
    products.multiply(first, second)
    monkeypatch.setattr(products, "LEAST_FLOPS", 2.0 * 24 * 16 * 40)
    monkeypatch.setattr(products, "is_for", lambda _device: False)
    assert torch.equal(products.multiply(first, second), first @ second)
    assert library.ran == []
    monkeypatch.setattr(products, "is_for", lambda _device: True)
    products.multiply(first, second)
    assert library.ran == [EVEN]


def overflowing() -> tuple[Tensor, Tensor]:
    first, second = factors("")
    first[3, 5] = second[5, 7] = 3e38
    return first, second


def watched(work: Callable[[], object]) -> list[str]:
    """Which operations made the first number that is not finite, as a search for a NaN sees them."""
    watch = OperationWatch(Surroundings(torch.nn.Module()), lambda: None)
    with watch:
        work()
    return [origin.operation for origin in watch.made]


def test_who_looks_for_a_nan_sees_the_product_that_made_it(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = overflowing()
    assert watched(lambda: products.multiply(first, second)) == ["mm (aten.mm.default)"]
    assert library.ran == []
    monkeypatch.setattr(products, "_is_watched", lambda: False)
    assert watched(lambda: products.multiply(first, second)) == []  # the control: a call of a library is not seen
    assert library.ran == [EVEN]


def test_who_watches_sees_an_operation_of_ours_as_a_whole(library: StandIn) -> None:
    from lockstep.kernels import product_pass

    first, second = overflowing()
    assert watched(lambda: product_pass.product(first, second, False)) == ["product (lockstep.product.default)"]
    assert library.ran == [EVEN]


def test_tensors_without_memory_are_torchs(library: StandIn) -> None:
    with FakeTensorMode() as mode:
        first, second = (mode.from_tensor(each) for each in factors(""))
        assert products.multiply(first, second, result=FP32).shape == (24, 40)
    assert not products._is_ours(first, second, FP32, None)  # nor where nobody watches any more
    assert library.ran == []


def test_what_does_not_fit_is_an_error_of_torchs(library: StandIn) -> None:
    first, second = factors("")
    with pytest.raises(RuntimeError, match="shape"):
        products.multiply(first, second[:8])
    room = torch.zeros(1024)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        products.multiply(first, second, total=room[:64].view(8, 8))
    assert not room.any()
    assert library.ran == []


def test_the_head_takes_them(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(24, 16, dtype=BF16), torch.randn(40, 16, dtype=BF16)
    targets = torch.randint(40, (24,))

    def computed() -> list[Tensor]:
        given = [each.clone().requires_grad_() for each in (x, weight)]
        total = linear_cross_entropy(*given, targets, chunk_tokens=8)
        return [total.detach(), *torch.autograd.grad(total, given)]

    ours = computed()
    assert library.ran == [EVEN, EVEN, WIDE] * 3  # of each chunk: logits, both gradients
    monkeypatch.setattr(products, "is_for", lambda _device: False)
    for got, wanted in zip(ours, computed(), strict=True):
        assert distance(got, wanted) < 4e-3


@pytest.mark.parametrize("proposed", [(), (OTHER,), (OTHER, SLIM)])
def test_what_is_not_proposed_is_torchs(library: StandIn, proposed: tuple[Kernel, ...]) -> None:
    library.kernels = proposed
    first, second = factors("")
    assert torch.equal(products.multiply(first, second), first @ second)
    assert library.ran == []


def test_descriptions_of_sizes_that_are_gone_are_freed(library: StandIn) -> None:
    second = factors("")[1]
    for rows in range(1, products.CACHED + 12):
        products.multiply(torch.randn(rows, 16, dtype=BF16), second)
    gone = len(library.destroyed) - products.CACHED - 11  # but for one preference of each
    assert gone == 11 * 4  # a product and three matrices each


def test_a_failure_of_the_library_is_told(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *_given: 14, raising=False)
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_INTERNAL_ERROR"):
        products.multiply(*factors(""))


@pytest.mark.parametrize("status", [1, 3, 13, 14, 77])
def test_a_question_that_fails_is_no_answer_that_is_remembered(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(library, "cublasLtMatmulAlgoGetHeuristic", lambda *_given: status, raising=False)
        with pytest.raises(RuntimeError, match=rf"CUBLAS_STATUS_{cublaslt.STATUSES.get(status, status)}$"):
            products.multiply(*factors(""))
    products.multiply(*factors(""))
    assert library.ran == [EVEN]


@pytest.mark.parametrize("status", cublaslt.NOT_FOR_IT)
def test_what_the_library_knows_no_way_for_is_torchs(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(library, "cublasLtMatmulAlgoGetHeuristic", lambda *_given: status, raising=False)
    first, second = factors("")
    assert torch.equal(products.multiply(first, second), first @ second)


def test_no_card_no_library() -> None:
    assert not products.is_for(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16])
def test_the_plain_product(dtype: torch.dtype) -> None:
    first, second = (each.to(dtype) for each in factors("second"))
    wide = torch.float64 if dtype == torch.float64 else FP32
    wanted = first.double() @ second.double()
    got = products.multiply(first, second, result=wide)
    assert got.dtype == wide
    assert distance(got, wanted) < 4e-3
    total = torch.ones(24, 40, dtype=wide)
    assert products.multiply(first, second, total=total) is total
    assert torch.equal(total, got + 1)
