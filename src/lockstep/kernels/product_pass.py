"""Large products of compiled blocks are those of `products`: a pass over the graphs that the compiler makes.

What the graph widens, such as the gradient of a weight, is asked for in fp32: the sum is in fp32 anyway, so that it is
not rounded to bf16 on the way, nor written, read and written again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lockstep.kernels import products


@torch.library.custom_op("lockstep::product", mutates_args=())
def product(first: Tensor, second: Tensor, widened: bool) -> Tensor:
    """first @ second, in fp32 where it is to be widened."""
    return products.multiply(first, second, result=torch.float32 if widened else first.dtype)


@product.register_fake
def _(first: Tensor, second: Tensor, widened: bool) -> Tensor:
    return first.new_empty(first.shape[0], second.shape[1], dtype=torch.float32 if widened else first.dtype)


def put_in(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        if _is_large(node):
            widening = _widening(node)
            node.target, node.args = torch.ops.lockstep.product.default, (*node.args, widening is not None)
            if widening is not None:
                node.meta["val"] = widening.meta["val"]
                widening.replace_all_uses_with(node)
                graph.erase_node(widening)


def _is_large(node: Node) -> bool:
    given: list[Any] = [each.meta.get("val") for each in node.args if isinstance(each, Node)]
    if [isinstance(each, Tensor) for each in given] != [True, True]:
        return False  # put in by a pass that does not say what it is
    first, second = given
    rows, inner, columns = *first.shape, second.shape[1]
    return (
        first.dtype == torch.bfloat16
        and all(isinstance(size, int) for size in (rows, inner, columns))  # of any length: each would be looked up anew
        and products.is_large(rows, inner, columns)
    )


def _widening(node: Node) -> Node | None:
    """The node that takes this one to fp32, if nothing else takes it."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    is_one = user.target is torch.ops.prims.convert_element_type.default and user.args[1:] == (torch.float32,)
    return user if is_one and "val" in user.meta else None
