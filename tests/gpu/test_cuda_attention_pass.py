"""Flex attention with cuDNN's forward pass on a real GPU: its bits repeat, its gradients are the plain maths'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels import attention_pass, products
from lockstep.models.build import Built, build
from lockstep.models.options import LladaOptions, LlamaOptions
from lockstep.models.shapes import resolve
from lockstep.runtime import determinism

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not products.is_for(torch.device("cuda", 0)), reason="the pass is for Hopper"
    ),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
CUDA = torch.device("cuda", 0)
ROWS, LENGTH, LAYERS = 3, 1024, 2
FAMILIES = {"llama": (LlamaOptions, "lockstep/tiny"), "llada": (LladaOptions, "lockstep/llada-tiny")}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDED = {"bf16": 6e-2, "fp16": 2e-2}  # of a gradient; with the other mask it is off by more than half


@pytest.fixture(autouse=True)
def _repeating() -> Iterator[None]:
    torch.compiler.reset()
    with determinism.mode(CUDA, deterministic=True, threads=0):
        yield
    torch.compiler.reset()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes and masks that cuDNN's forward pass was asked for, while training."""
    asked: list[Any] = []
    forward = attention_pass.FORWARD

    def recording(*arguments: Any, **named: Any) -> Any:
        if len(arguments[0]) > 1:  # one row is a trial
            asked.append((tuple(arguments[0].shape), arguments[6]))
        return forward(*arguments, **named)

    monkeypatch.setattr(attention_pass, "FORWARD", recording)
    return asked


def made(family: str, precision: str, *, plain: bool = False, checkpointing: bool = False) -> Built:
    kind, path = FAMILIES[family]
    options = kind.model_validate(
        {"model_path": path, "num_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64,
         "num_key_value_heads": 2, "init_std": 0.1, "max_position_embeddings": LENGTH,
         "attention_backend": "native_math" if plain else "auto", "compile": "off" if plain else "on"}
    )  # fmt: skip
    return build(
        options, resolve(options, context_length=LENGTH), device=CUDA, dtype_name=precision, seed=5,
        checkpointing=checkpointing, deterministic=True, debug=False,
    )  # fmt: skip


def gradients(built: Built, precision: str, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(500, (ROWS, LENGTH + 1), generator=generator).to(CUDA)
    mixed = torch.autocast("cuda", dtype=PRECISIONS[precision]) if precision in PRECISIONS else nullcontext()
    with mixed:
        loss = built.model(tokens[:, :-1], tokens[:, 1:]) / 64  # fp16 has room for it
    return torch.cat([each.flatten().double() for each in torch.autograd.grad(loss, list(built.model.parameters()))])


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_models_gradients_are_the_plain_maths_and_repeat(
    ran: list[Any], family: str, precision: str, checkpointing: bool
) -> None:
    built, plain = made(family, precision, checkpointing=checkpointing), made(family, "fp64", plain=True)
    assert built.attention == "flex"
    for seed in range(2):
        once, again = gradients(built, precision, seed=seed), gradients(built, precision, seed=seed)
        assert torch.equal(once, again)
        assert distance(once, gradients(plain, "fp64", seed=seed)) < ROUNDED[precision]
    times = LAYERS * (2 if checkpointing else 1)
    assert ran == [((ROWS, 4, LENGTH, 64), family == "llama")] * (4 * times)
    other = gradients(made("llada" if family == "llama" else "llama", "fp64", plain=True), "fp64", seed=1)
    assert distance(once, other) > 0.5, "the control: who sees whom matters"


def test_without_the_pass_flex_attention_computes_the_same(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = gradients(made("llama", "bf16"), "bf16")
    assert len(ran) == LAYERS
    monkeypatch.setattr(attention_pass, "LEAST_TOKENS", 2 * LENGTH)
    torch.compiler.reset()
    without = gradients(made("llama", "bf16"), "bf16")
    assert len(ran) == LAYERS, "the control: its own forward pass"
    assert 0 < distance(with_it, without) < ROUNDED["bf16"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(32, 8, 128), (12, 12, 64)])
def test_the_forward_pass_repeats_its_bits(heads: int, key_heads: int, width: int, causal: bool) -> None:
    torch.manual_seed(2)
    query, key, value = (
        torch.randn(4, 4096, each, width, device=CUDA, dtype=torch.bfloat16).transpose(1, 2)
        for each in (heads, key_heads, key_heads)
    )
    first = attention_pass.attention(query, key, value, causal, width**-0.5)
    for _ in range(20):
        again = attention_pass.attention(query, key, value, causal, width**-0.5)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    scores = width**-0.5 * query[0, -1].float() @ key[0, -1].float().T
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    assert distance(first[1][0, -1].double(), scores.double().exp().sum(-1).log2()) < 1e-5
    assert distance(first[0][0, -1].double(), (scores.softmax(-1) @ value[0, -1].float()).double()) < 1e-2
