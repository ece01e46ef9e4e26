"""The pass that gives flex attention cuDNN's forward pass: what it takes, what it leaves alone, and its results.

cuDNN's own kernel needs a GPU (tests/gpu/test_cuda_attention_pass.py); a stand-in has its arguments and its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lockstep.kernels import attention_pass, graph_pass
from lockstep.models.attention import FLEX_KERNEL, causal_block_mask, document_mask, everyones_block_mask, window_mask
from lockstep.models.build import compile_blocks, forget_compiled, lay_out
from lockstep.models.encoder import Encoder
from lockstep.models.options import EncoderOptions, LladaOptions, LlamaOptions
from lockstep.models.shapes import resolve
from tests.kernels.test_products import BF16, FP32, distance

CPU = torch.device("cpu")
ROWS, LENGTH, HEADS, KEY_HEADS, WIDTH = 2, 512, 4, 2, 16
SCALE = 0.2  # not the usual one
FLEX = attention_pass.FLEX


def score(each: Tensor, *_: Tensor) -> Tensor:
    return each


def capped(each: Tensor, *_: Tensor) -> Tensor:
    return each.tanh()


def given(dtype: torch.dtype = BF16, *, length: int = LENGTH, by_heads: bool = False) -> list[Tensor]:
    """Queries, keys and values as a block has them: a token's heads lie together."""
    torch.manual_seed(3)
    sizes = [(ROWS, length, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(size).to(dtype).transpose(1, 2) for size in sizes]
    return [each.contiguous() if by_heads else each for each in tensors]


@dataclass(frozen=True)
class Traced:
    """Flex attention as the compiler has it: what its mask holds goes in beside queries, keys and values."""

    module: GraphModule
    tensors: list[Tensor]

    def __call__(self) -> Any:
        return self.module(*self.tensors)

    @property
    def node(self) -> Node:
        (node,) = self.module.graph.find_nodes(op="call_function", target=FLEX)
        return node


def flex(
    mask: Any, tensors: list[Tensor], *, buffers: Sequence[Tensor] = (), score: Callable[..., Tensor] = score,
    wanted: int = 2, symbolic: bool = False,
) -> Traced:  # fmt: skip
    parts = mask.as_tuple()
    everything = [*tensors, *(each for each in parts if isinstance(each, Tensor)), *buffers]

    def work(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Any:
        left = iter(others)
        block = tuple(next(left) if isinstance(each, Tensor) else each for each in parts)
        return FLEX(query, key, value, score, block, SCALE, {}, (), tuple(left))[:wanted]

    return Traced(make_fx(work, tracing_mode="symbolic" if symbolic else "fake")(*everything), everything)


def passed_over(traced: Traced) -> list[bool]:
    """Whether each attention that the pass put in is causal."""
    graph = traced.module.graph
    attention_pass.put_in(graph)
    graph.lint()
    traced.module.recompile()
    nodes = graph.find_nodes(op="call_function", target=torch.ops.lockstep.attention.default)
    return [node.args[3] for node in nodes]


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: None, wants_sums: bool, dropout: float, causal: bool, debug: bool,
    *, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Its results by the plain maths in fp64; sums of exponentials as natural logarithms with a last side of one."""
    assert (bias, wants_sums, dropout, debug) == (None, True, 0.0, False)
    group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(group, dim=1) for each in (key, value))
    scores = scale * query.double() @ key.transpose(-2, -1)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    seen = torch.empty_like(query).copy_(scores.softmax(-1) @ value)
    return seen, scores.logsumexp(-1, keepdim=True).float(), None, None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine whose cuDNN takes everything; what it was asked."""
    answers: list[Any] = []
    monkeypatch.setattr(attention_pass, "runs", lambda *facts: answers.append(facts) or True)
    monkeypatch.setattr(attention_pass, "FORWARD", cudnn)
    return answers


def everyones_mask(*, causal: bool, length: int = LENGTH) -> Any:
    return (causal_block_mask if causal else everyones_block_mask)(length, CPU)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_what_every_token_sees_alike_is_cudnns(asked: list[Any], causal: bool, dtype: torch.dtype) -> None:
    tensors = given(dtype)
    graph = flex(everyones_mask(causal=causal), tensors)
    before, node = graph(), graph.node
    assert passed_over(graph) == [causal]
    assert asked == [(CPU, dtype, (HEADS, LENGTH, WIDTH), KEY_HEADS, causal)]
    assert len(node.meta["val"]) == 2
    after = graph()
    for got, wanted, limit in zip(after, before, (4e-3, 1e-6), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert distance(got, wanted) < limit
    other = cudnn(*tensors, None, True, 0.0, not causal, False, scale=SCALE)
    assert distance(other[0], before[0]) > 0.1, "the control: the other mask"
    natural = cudnn(*tensors, None, True, 0.0, causal, False, scale=SCALE)[1].squeeze(-1)
    assert distance(natural, before[1]) > 0.1, "the control: flex attention's are logarithms to the base of two"


def test_what_it_is_called_with_tells_what_it_returns(asked: list[Any]) -> None:
    query, key, value = given()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention_pass.attention, (query, key, value, True, SCALE), test_utils=tests)


def test_nothing_of_flex_attention_is_left_behind(asked: list[Any]) -> None:
    traced = flex(causal_block_mask(LENGTH, CPU), given(), wanted=1)
    assert passed_over(traced) == [True]
    assert traced.module.graph.find_nodes(op="get_attr") == []
    assert traced.module.graph.find_nodes(op="call_function", target=FLEX) == []


def test_documents_are_left_alone(asked: list[Any]) -> None:
    documents = torch.arange(LENGTH).expand(ROWS, -1) // 100
    mask = document_mask(documents, backend="flex")

    def looked_up(row: Tensor, _head: Tensor, query: Tensor, key: Tensor, documents: Tensor) -> Tensor:
        return (documents[row, query] == documents[row, key]) & (query >= key)

    mask.mask_mod = looked_up  # the compiler hands on what a mask looks things up in
    assert passed_over(flex(mask, given(), buffers=[documents])) == []
    assert asked == []


def before_the_next(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key + 1


def turned_round(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key >= query


def without_the_first(_row: Tensor, _head: Tensor, query: Tensor, _key: Tensor) -> Tensor:
    return query >= 1


def of_later_rows(row: Tensor, _head: Tensor, query: Tensor, _key: Tensor) -> Tensor:
    return row >= 0


def of_keys(_row: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
    return key >= 0


def nobody(_row: Tensor, _head: Tensor, query: Tensor, _key: Tensor) -> Tensor:
    return query <= 0


def made(mask: Callable[..., Tensor]) -> Any:
    return create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")


@pytest.mark.parametrize(
    "mask",
    [
        lambda: window_mask(LENGTH, CPU, backend="flex", window=64),
        lambda: window_mask(LENGTH, CPU, backend="flex", window=0),
        lambda: made(before_the_next),
        lambda: made(turned_round),
        lambda: made(without_the_first),
        lambda: made(of_later_rows),
        lambda: made(of_keys),
        lambda: made(nobody),
    ],
)
def test_other_masks_are_left_alone(asked: list[Any], mask: Callable[[], Any]) -> None:
    assert passed_over(flex(mask(), given())) == []
    assert asked == []


@pytest.mark.parametrize(
    ("work", "tensors", "symbolic"),
    [
        ({}, {"dtype": FP32}, False),
        ({}, {"length": 511}, False),  # rows that nobody measured
        ({"score": capped}, {}, False),
        ({"wanted": 3}, {}, False),  # the greatest scores are wanted as well
        ({}, {}, True),  # of any length
    ],
)
def test_what_cudnn_does_not_have_is_left_alone(
    asked: list[Any], work: dict[str, Any], tensors: dict[str, Any], symbolic: bool
) -> None:
    length = tensors.get("length", LENGTH)
    assert passed_over(flex(causal_block_mask(length, CPU), given(**tensors), symbolic=symbolic, **work)) == []
    assert asked == []


def test_keys_that_are_longer_or_shared_by_rows_are_left_alone(asked: list[Any]) -> None:
    query, key, value = given()
    mask = causal_block_mask(LENGTH, CPU)
    assert passed_over(flex(mask, [query, key[:1], value[:1]])) == []
    query, key, value = given(length=2 * LENGTH)
    wider = create_block_mask(lambda _b, _h, query, key: query >= key, None, None, LENGTH, 2 * LENGTH, device="cpu")
    assert passed_over(flex(wider, [query[:, :, :LENGTH], key, value])) == []
    assert asked == []


def test_keys_and_values_that_differ_are_left_alone(asked: list[Any]) -> None:
    _, key, value = given()
    for others in ([key, value[..., :8]], [key, value[:1]], [key[..., :8], value[..., :8]], [key.half(), value]):
        traced = flex(causal_block_mask(LENGTH, CPU), given())
        for place, other in enumerate(others, start=1):
            described: Any = traced.node.args[place]
            described.meta["val"] = FakeTensorMode().from_tensor(other)
        assert passed_over(traced) == []
    assert asked == []


def test_a_call_that_the_compiler_does_not_write_is_left_alone(asked: list[Any]) -> None:
    def changed(how: str) -> Traced:
        traced = flex(causal_block_mask(LENGTH, CPU), given())
        node = traced.node
        if how == "a part by its name":
            node.args, node.kwargs = node.args[:7], {"score_mod_other_buffers": (), "mask_mod_other_buffers": ()}
        elif how == "no scale":
            node.args = (*node.args[:5], None, *node.args[6:])
        elif how == "too little":
            node.args = node.args[:5]
        else:
            (output,) = traced.module.graph.find_nodes(op="output")
            output.args = (node,)
        return traced

    for how in ("a part by its name", "no scale", "too little", "all results at once"):
        attention_pass.put_in((traced := changed(how)).module.graph)
        assert traced.node.target is FLEX, how
    assert asked == []


def test_another_layout_of_the_result_is_left_alone(asked: list[Any]) -> None:
    traced = flex(causal_block_mask(LENGTH, CPU), given())
    seen, sums, maxima = traced.node.meta["val"]
    traced.node.meta["val"] = (seen.contiguous(), sums, maxima)
    assert passed_over(traced) == []
    assert passed_over(flex(causal_block_mask(LENGTH, CPU), given(by_heads=True))) == [True]


def test_a_graph_that_nobody_describes_is_left_alone(asked: list[Any]) -> None:
    for of_result in (True, False):
        traced = flex(causal_block_mask(LENGTH, CPU), given())
        described: Any = traced.node if of_result else traced.node.args[0]
        del described.meta["val"]
        assert passed_over(traced) == []
    assert asked == []


def test_whether_cudnn_has_a_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = (CPU, BF16, (HEADS, LENGTH, WIDTH), KEY_HEADS, True)
    attention_pass.runs.cache_clear()
    assert not attention_pass.runs(*facts), "a processor has none"
    attention_pass.runs.cache_clear()
    tried: list[Any] = []

    def trying(*arguments: Any, **named: Any) -> tuple[Any, ...]:
        tried.append(([tuple(each.shape) for each in arguments[:3]], arguments[6]))
        return cudnn(*arguments, **named)

    monkeypatch.setattr(attention_pass, "FORWARD", trying)
    with FakeTensorMode():  # as in the compiler
        assert attention_pass.runs(*facts)
    query, key = (1, HEADS, LENGTH, WIDTH), (1, KEY_HEADS, LENGTH, WIDTH)
    assert tried == [([query, key, key], True)]
    attention_pass.runs.cache_clear()
    for fault in (torch.OutOfMemoryError, torch.AcceleratorError):  # which say nothing about kernels

        def failing(*_: Any, fault: Any = fault, **__: Any) -> None:
            raise fault("a fault of the card")

        monkeypatch.setattr(attention_pass, "FORWARD", failing)
        with pytest.raises(fault):
            attention_pass.runs(*facts)


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize(
    ("how", "taken"),
    [
        ("causal", [True]),
        ("two windows", []),  # as the layers of a ModernBERT have them: a width is a number of any size then
        ("two lengths", [False]),  # the second is one of any length
    ],
)
def test_the_compiler_takes_it(asked: list[Any], monkeypatch: pytest.MonkeyPatch, how: str, taken: list[bool]) -> None:
    """Its own graphs, whose parts it then compiles; without a gradient, which flex attention has on a GPU alone."""
    calls: list[bool] = []
    monkeypatch.setattr(attention_pass, "FORWARD", lambda *given, **how: calls.append(given[6]) or cudnn(*given, **how))
    turns = [(given(), everyones_mask(causal=how == "causal"))]
    if how == "two windows":
        turns = [(given(), window_mask(LENGTH, CPU, backend="flex", window=window)) for window in (0, 64, 32)]
    if how == "two lengths":
        turns += [(given(length=640), everyones_mask(causal=False, length=640))]
    torch.compiler.reset()
    with inductor.patch(post_grad_custom_post_pass=graph_pass.GraphPass()):
        compiled = torch.compile(flex_attention, fullgraph=True)
        for tensors, mask in turns:
            got = compiled(*tensors, block_mask=mask, enable_gqa=True, kernel_options=FLEX_KERNEL)
            wanted = flex_attention(*tensors, block_mask=mask, enable_gqa=True)
            assert got.stride() == wanted.stride()
            assert distance(got, wanted) < 6e-3
    torch.compiler.reset()
    assert calls == taken


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize(
    ("kind", "path", "taken"),
    [
        (LlamaOptions, "lockstep/tiny", [True]),
        (LladaOptions, "lockstep/llada-tiny", [False]),
        (EncoderOptions, "lockstep/mlm-tiny", []),
    ],
)
def test_models_train_with_it(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, kind: Any, path: str, taken: list[bool]
) -> None:
    """Blocks as the compiler cuts them, forward and backward; what it would then make of them runs as it is."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # no gradient on a CPU
    found: list[bool] = []

    def forward(graph: Any, _inputs: Any) -> Any:
        attention_pass.put_in(graph.graph)
        graph.recompile()
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.lockstep.attention.default)
        found.extend(node.args[3] for node in nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    known = {"architecture": "modern"} if kind is EncoderOptions else {"max_position_embeddings": LENGTH}
    shape = resolve(kind.model_validate({"model_path": path, "init_std": 0.1, **known}), context_length=LENGTH)
    inputs = torch.randint(10, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    gradients: list[Tensor] = []
    torch.compiler.reset()
    for kernel in ("flex", "native_math"):
        model = lay_out(shape, attention=kernel)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
        model.rebuild_buffers()
        if kernel == "flex":
            compile_blocks(model, CPU, sharded=False, backend=backend)
        with torch.autocast("cpu", dtype=BF16):
            seen = model.hidden(inputs) if isinstance(model, Encoder) else model._hidden(inputs, None)
        parts = torch.autograd.grad(seen.float().square().sum(), list(model.parameters()), allow_unused=True)
        gradients.append(torch.cat([each.flatten() for each in parts if each is not None]))
    forget_compiled()
    assert found == taken
    assert distance(*gradients) < 0.005
