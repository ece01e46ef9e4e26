"""Encoders on a real GPU: documents apart, windows, both directions, by flex attention and by the plain maths."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.models.build import Built, build
from lockstep.models.options import EncoderOptions
from lockstep.models.shapes import resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
LENGTHS = [[100, 1, 300, 2, 109], [500], [256, 256], [1, 1, 1, 40]]  # of rows of 512 tokens; the rest is padding
ACCURACY = {"fp32": 1e-4, "bf16": 6e-2}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def made(architecture: str, precision: str, *, backend: str = "auto", apart: bool = True, **values: Any) -> Built:
    options = EncoderOptions.model_validate(
        {"model_path": "lockstep/mlm-tiny", "architecture": architecture, "num_layers": 5, "hidden_size": 128,
         "num_attention_heads": 2, "init_std": 0.1, "dropout": 0.0, "attention_backend": backend, "compile": "off",
         **values}
    )  # fmt: skip
    return build(
        options, resolve(options, context_length=512), device=torch.device("cuda"), dtype_name=precision, seed=5,
        checkpointing=False, deterministic=False, debug=False, documents_apart=apart,
    )  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    documents = torch.zeros(len(LENGTHS), 512, dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        each = [torch.full((length,), number, dtype=torch.int32) for number, length in enumerate(lengths, start=1)]
        documents[row, : sum(lengths)] = torch.cat(each)
    inputs = torch.randint(5, 512, documents.shape, generator=torch.Generator().manual_seed(seed))
    places = (documents.flatten() > 0).nonzero().flatten()[seed::6]
    inputs = torch.where(documents > 0, inputs, 0)
    return inputs.cuda(), inputs.flatten()[places].cuda(), places.cuda(), documents.cuda()


def computed(built: Built, precision: str, *, apart: bool = True, seed: int = 0) -> tuple[float, Tensor]:
    """Loss and all gradients, as the engine computes them."""
    inputs, targets, places, documents = batch(seed)
    with torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
        loss = built.model(inputs, targets, places_M=places, documents_BL=documents if apart else None)
    gradients = torch.autograd.grad(loss, list(built.model.parameters()))
    return float(loss.detach()), torch.cat([gradient.flatten().double() for gradient in gradients])


def error(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> float:
    return float((found[1] - expected[1]).norm() / expected[1].norm())


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("architecture", ["prenorm", "bert", "modern"])
@pytest.mark.parametrize(("precision", "compiled"), [("fp32", "on"), ("bf16", "on"), ("bf16", "off")])
def test_kernels_compute_what_the_plain_maths_does(
    architecture: str, precision: str, compiled: str, apart: bool
) -> None:
    plain = made(architecture, "fp64", backend="native_math", apart=apart)
    built = made(architecture, precision, compile=compiled, apart=apart)
    masked = apart or architecture == "modern" or precision == "fp32"
    assert built.attention == ("flex" if masked else "cudnn")
    for seed in (0, 1):  # a second batch meets what was compiled for the first, with another number of places
        expected = computed(plain, "fp64", apart=apart, seed=seed)
        assert error(computed(built, precision, apart=apart, seed=seed), expected) < ACCURACY[precision]
    assert error(computed(plain, "fp64", apart=not apart, seed=1), expected) > 2 * max(ACCURACY.values())  # control
    inputs, targets, places, documents = batch()
    shown = documents if apart else None
    with torch.no_grad():
        built.model.eval()
        losses, _ = built.model(inputs, targets, places_M=places, documents_BL=shown, per_target=True)
        reference = plain.model(inputs, targets, places_M=places, documents_BL=shown)
    assert float(losses.sum()) == pytest.approx(float(reference), rel=ACCURACY[precision])


def test_the_same_bits_again() -> None:
    """Flex attention, the head at chosen places and the positions of documents repeat themselves."""
    for architecture in ("prenorm", "modern"):
        built = made(architecture, "bf16", compile="on")
        first = computed(built, "bf16")
        for _ in range(5):
            again = computed(built, "bf16")
            assert again[0] == first[0]
            assert torch.equal(again[1], first[1])


def test_heads_of_two_numbers_train() -> None:
    for apart in (True, False):
        built = made("prenorm", "bf16", apart=apart, hidden_size=16, num_attention_heads=8)
        assert built.attention == "native_math"
        assert any("heads of 2 numbers" in notice for notice in built.notices)
        plain = made("prenorm", "fp64", apart=apart, hidden_size=16, num_attention_heads=8)
        found, expected = (computed(each, kind, apart=apart) for each, kind in ((built, "bf16"), (plain, "fp64")))
        assert error(found, expected) < 0.1
