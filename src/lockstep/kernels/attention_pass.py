"""Flex attention's forward pass is cuDNN's, where every token sees the same: a pass over the compiler's graphs.

cuDNN's repeats its bits and takes two thirds of the time; its backward pass does not repeat them, and stays flex
attention's. What a mask means is read from the graph of its function, by which create_block_mask has chosen its blocks:
only two are taken, `query >= key` of LLaMA and agents, and `query >= 0` of LLaDA.

Sizes that the compiler takes for variable are left alone, which are those that differed once. So that the same step has
the same kernels in every process, what is compiled with gradients has the same sizes in all steps of a run (rows that
were cut are not compiled), and validation is compiled for the sizes of each batch.

Shapes: B rows, L tokens, H query heads, K key/value heads (H = K * group), E head width.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention
FORWARD = aten._scaled_dot_product_cudnn_attention
LEAST_TOKENS = 512  # of a row: the least that was measured
MAXIMA = 2  # the result of flex attention that cuDNN does not have


@torch.library.custom_op("lockstep::attention", mutates_args=())
def attention(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(what is seen, log2 of the sum of exponentials): flex attention's results, by cuDNN."""
    seen_BHLE, logsumexp = FORWARD(q_BHLE, k_BKLE, v_BKLE, None, True, 0.0, causal, False, scale=scale)[:2]
    return seen_BHLE, logsumexp.view(q_BHLE.shape[:-1]) * math.log2(math.e)


@attention.register_fake
def _(q_BHLE: Tensor, _k: Tensor, _v: Tensor, _causal: bool, _scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_BHLE), q_BHLE.new_empty(q_BHLE.shape[:-1], dtype=torch.float32)


def put_in(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=FLEX):
        if not _is_as_expected(node):
            continue
        query, key, value, score, mask, scale = node.args[:6]
        causal = _is_causal(graph, score, mask)
        if causal is None or not _fits(node, causal):
            continue
        parts = [score, mask[-1]]
        node.target, node.args = torch.ops.lockstep.attention.default, (query, key, value, causal, scale)
        node.meta["val"] = node.meta["val"][:MAXIMA]
        for user in [user for user in node.users if user.args[1] == MAXIMA]:
            graph.erase_node(user)
        for part in parts:
            if not part.users:
                graph.erase_node(part)


def _is_as_expected(node: Node) -> bool:
    """Whether the compiler has written it down as it does, and each of its results is asked for by its number."""
    if node.kwargs or len(node.args) < 6:
        return False
    _query, _key, _value, score, mask, scale = node.args[:6]
    return (
        isinstance(score, Node)
        and isinstance(mask, tuple | list)
        and isinstance(mask[-1], Node)
        and isinstance(scale, float)
        and all(user.target is operator.getitem for user in node.users)
    )


def _is_causal(graph: Graph, score: Node, mask: Any) -> bool | None:
    """Whether a token sees those up to itself, or all (False). None: neither, or scores are changed."""
    scored, masked = (getattr(graph.owning_module, str(each.target)).graph for each in (score, mask[-1]))
    first, *_ = scored.find_nodes(op="placeholder")
    if _result(scored) is not first:
        return None
    _row, _head, query, key, *_ = masked.find_nodes(op="placeholder")
    seen = _result(masked)
    if _is_call(seen, aten.ge.Tensor, query, key):
        return True
    return False if _is_call(seen, aten.ge.Scalar, query, 0) else None


def _result(graph: Graph) -> Any:
    (output,) = graph.find_nodes(op="output")
    return output.args[0]


def _is_call(node: Any, target: Any, *given: Any) -> bool:
    """Whether it is a call with these arguments."""
    return isinstance(node, Node) and node.target is target and not node.kwargs and node.args == given


def _fits(node: Node, causal: bool) -> bool:
    """Whether cuDNN takes these, and leaves what flex attention would."""
    given: list[Any] = [each.meta.get("val") for each in node.args[:3] if isinstance(each, Node)]
    results: Any = node.meta.get("val")
    if [isinstance(each, Tensor) for each in given] != [True] * 3 or not isinstance(results, tuple):
        return False
    query, key, value = given
    if not all(isinstance(size, int) for each in given for size in each.shape):  # of any length: a plan for each
        return False
    if any(user.args[1] == MAXIMA and user.users for user in node.users):
        return False
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] == key.shape[2] >= LEAST_TOKENS
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape == value.shape
        and results[0].stride() == torch.empty_like(query).stride()
        and runs(query.device, query.dtype, tuple(query.shape[1:]), key.shape[1], causal)
    )


@cache
def runs(device: torch.device, dtype: torch.dtype, heads_HLE: tuple[int, ...], key_heads: int, causal: bool) -> bool:
    """Whether cuDNN has a kernel for a row of this shape, by trying."""
    heads, length, width = heads_HLE
    with unset_fake_temporarily(), torch.no_grad():
        try:
            query = torch.zeros(1, length, heads, width, device=device, dtype=dtype).transpose(1, 2)
            key = torch.zeros(1, length, key_heads, width, device=device, dtype=dtype).transpose(1, 2)
            attention(query, key, key, causal, width**-0.5)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # says nothing about kernels, and all ranks must compute with the same ones
        except RuntimeError:  # also that there is none for a processor
            return False
    return True
