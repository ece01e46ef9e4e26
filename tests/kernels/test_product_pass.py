"""The pass that puts large products into compiled graphs: what it takes, widens and leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.kernels import products
from tests.kernels.test_products import BF16, FP32, distance


def traced(work: Callable[..., Any], *given: Tensor, symbolic: bool = False) -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return make_fx(work, select_decomp_table(), tracing_mode="symbolic" if symbolic else "fake")(*given)


def passed_over(graph_module: Any) -> list[bool]:
    """Whether each product that the pass put in is widened."""
    from lockstep.kernels import product_pass

    product_pass.put_in(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    nodes = graph_module.graph.find_nodes(op="call_function", target=torch.ops.lockstep.product.default)
    return [node.args[2] for node in nodes]


def backward(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the compiler sees a layer's: the product, the gradient of what went in, that of an fp32 weight."""
    return x @ weight.T, grad @ weight, (grad.T @ x).float()


def test_the_pass_takes_large_products_and_widens_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    given = torch.randn(32, 16, dtype=BF16), torch.randn(8, 16, dtype=BF16), torch.randn(32, 8, dtype=BF16)
    graph = traced(backward, *given)
    before = graph(*given)
    assert passed_over(graph) == []  # none is large
    monkeypatch.setattr(products, "LEAST_FLOPS", 2.0 * 32 * 16 * 8)
    assert passed_over(graph) == [False, False, True]
    asked: list[torch.dtype | None] = []
    multiply = products.multiply

    def asking(first: Tensor, second: Tensor, *, result: torch.dtype | None = None) -> Tensor:
        asked.append(result)
        return multiply(first.double(), second.double(), result=result)  # as a GPU sums: not rounded on its way

    monkeypatch.setattr(products, "multiply", asking)
    after = graph(*given)
    assert asked == [BF16, BF16, FP32]
    x, _, grad = (each.double() for each in given)
    assert distance(after[2], grad.T @ x) < 1e-6 < distance(before[2], grad.T @ x)
    for got, wanted in zip(after, before, strict=True):
        assert got.dtype == wanted.dtype
        assert distance(got, wanted) < 4e-3


def shared(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ weight.T
    return product, product.float()


def halved(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight.T).half()


@pytest.mark.parametrize(
    ("work", "dtype", "symbolic", "expected"),
    [
        (shared, BF16, False, [False]),  # somebody wants the rounded one as well
        (halved, BF16, False, [False]),
        (shared, FP32, False, []),
        (shared, BF16, True, []),  # of any length
    ],
)
def test_what_the_pass_leaves_alone(
    monkeypatch: pytest.MonkeyPatch, work: Any, dtype: torch.dtype, symbolic: bool, expected: list[bool]
) -> None:
    monkeypatch.setattr(products, "LEAST_FLOPS", 0.0)
    given = torch.randn(32, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    graph = traced(work, *given, symbolic=symbolic)
    assert passed_over(graph) == expected


def strange(kind: str) -> Graph:
    """Graphs as another pass may leave them: a product, and what widens it."""
    graph, mode = Graph(), FakeTensorMode()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    how = ((first,), {"mat2": second}) if kind == "a factor by its name" else ((first, second), {})
    product = graph.call_function(torch.ops.aten.mm.default, *how)
    named = kind == "a type by its name"
    wider = ((product,), {"dtype": FP32}) if named else ((product, FP32), {})
    widened = graph.call_function(torch.ops.prims.convert_element_type.default, *wider)
    for node, shape in ((first, (16, 8)), (second, (8, 24)), (product, (16, 24)), (widened, (16, 24))):
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=FP32 if node is widened else BF16)
    if kind == "nobody takes it":
        graph.erase_node(widened)
    undescribed = {"a factor that nobody describes": second, "a result that nobody describes": widened}.get(kind)
    if undescribed is not None:
        del undescribed.meta["val"]
    graph.output(first if kind == "nobody takes it" else widened)
    return graph


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("as it should be", [True]),
        ("nobody takes it", [False]),
        ("a type by its name", [False]),
        ("a result that nobody describes", [False]),
        ("a factor that nobody describes", []),
        ("a factor by its name", []),
    ],
)
def test_the_pass_harms_no_graph(monkeypatch: pytest.MonkeyPatch, kind: str, expected: list[bool]) -> None:
    monkeypatch.setattr(products, "LEAST_FLOPS", 0.0)
    assert passed_over(GraphModule({}, strange(kind))) == expected
