"""Tables of few rows: the gradient as a product is the one torch adds up row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.models.embedding import SummedRows, sum_table

ROWS, WIDTH = 45, 16


def looked_up(seed: int, dtype: torch.dtype, *, features: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh ids, among them one that half of the tokens have and one that comes twice in a token; weights; weighing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS - 1, (7, 23, features), generator=generator)  # the last row is never looked up
    ids[:, ::2, 0], ids[3, 5] = 4, 9
    weight = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    return ids, weight, torch.randn(7, 23, WIDTH, generator=generator, dtype=dtype)


@pytest.mark.parametrize("features", [1, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_single_rows(seed: int, features: int) -> None:
    ids, weight, weighing = looked_up(seed, torch.float64, features=features)
    expected = F.embedding(ids, weight).sum(-2)
    found = SummedRows.apply(ids, weight)
    assert isinstance(found, Tensor)
    assert torch.equal(found, expected)
    (wanted,) = torch.autograd.grad((expected * weighing).sum(), weight)
    (got,) = torch.autograd.grad((found * weighing).sum(), weight)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert not got[-1].any()
    ids[0, 0, 0] = (ids[0, 0, 0] + 1) % (ROWS - 1)  # the control: one id of all is another
    other = SummedRows.apply(ids, weight)
    assert isinstance(other, Tensor)
    (off,) = torch.autograd.grad((other * weighing).sum(), weight)
    assert not torch.allclose(off, wanted)


def test_a_table_computes_the_same_with_and_without_it() -> None:
    ids, weight, _ = looked_up(5, torch.float32)
    table = sum_table(ROWS, WIDTH)
    with torch.no_grad():
        table.weight.copy_(weight)
    assert torch.equal(table(ids), SummedRows.apply(ids, weight))
    assert [name for name, _ in table.named_parameters()] == ["weight"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's own compiler
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_compiled_table_has_its_gradient_in_fp32_whatever_the_blocks_compute_in(precision: torch.dtype) -> None:
    """The compiler lets the backward pass multiply in what the forward pass did; sums in fp16 would overflow too."""
    ids, weight, weighing = looked_up(6, torch.float32)
    weighing = weighing * 65536
    (wanted,) = torch.autograd.grad((F.embedding(ids, weight).sum(-2) * weighing).sum(), weight)
    compiled: Any = torch.compile(SummedRows.apply, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=precision):
        found = compiled(ids, weight)
    (got,) = torch.autograd.grad((found * weighing).sum(), weight)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-1)
