"""Masked diffusion on a real GPU: the kernels look both ways, the first bound is what it must be, bits repeat."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.contracts import Batch, Draw, Rows, Vocabulary
from lockstep.models.build import Built, build
from lockstep.models.options import LladaOptions
from lockstep.models.shapes import resolve
from lockstep.objectives.diffusion import Diffusion
from lockstep.objectives.diffusion import build as build_objective
from lockstep.objectives.options import DiffusionOptions
from tests.counting import graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
ACCURACY = {"fp32": 1e-4, "bf16": 6e-2}
ROWS, LENGTH = 8, 256


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def made(precision: str, *, deterministic: bool = False, bidirectional: bool = True, **values: Any) -> Built:
    options = LladaOptions.model_validate({"model_path": "lockstep/llada-tiny", "init_std": 0.1, **values})
    shape = resolve(options, context_length=LENGTH)
    object.__setattr__(shape, "bidirectional", bidirectional)  # the control
    return build(
        options, shape, device=torch.device("cuda"), dtype_name=precision, seed=5,
        checkpointing=False, deterministic=deterministic, debug=False,
    )  # fmt: skip


def objective(size: int, **options: Any) -> Diffusion:
    plain = build_objective(DiffusionOptions.model_validate(options), documents="separated")
    return plain.with_vocabulary(Vocabulary(size, {}, np.zeros(size, bool)))


def batch(learnt: Diffusion, step: int, *, rows: int = ROWS, length: int = LENGTH, size: int = 500) -> Batch:
    tokens = np.random.default_rng(step).integers(0, size, (rows, length)).astype(np.int32)
    ids = np.arange(rows)
    return learnt.collate(Rows(ids, ids * 0, ids, {"tokens": tokens}), Draw(3, step, rows, 100)).to(
        torch.device("cuda")
    )


def computed(built: Built, precision: str, *, step: int = 0, **options: Any) -> tuple[float, Tensor]:
    learnt = objective(500, **({"random_length_probability": 0.0} | options))
    with torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
        loss = learnt.loss(built.model, batch(learnt, step))["loss"]
    gradients = torch.autograd.grad(loss, list(built.model.parameters()))
    return float(loss.detach()), torch.cat([gradient.flatten().double() for gradient in gradients])


def error(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> float:
    return float((found[1] - expected[1]).norm() / expected[1].norm())


@pytest.mark.parametrize(
    ("precision", "compiled", "deterministic", "kernel"),
    [("fp32", "on", False, "flex"), ("bf16", "on", False, "cudnn"), ("bf16", "on", True, "flex"),
     ("bf16", "off", False, "cudnn")],
)  # fmt: skip
def test_kernels_compute_what_the_plain_maths_does(
    precision: str, compiled: str, deterministic: bool, kernel: str
) -> None:
    plain = made("fp64", attention_backend="native_math", compile="off")
    built = made(precision, deterministic=deterministic, compile=compiled)
    assert built.attention == kernel
    for step in (0, 1):  # with another number of places
        expected = computed(plain, "fp64", step=step)
        assert error(computed(built, precision, step=step), expected) < ACCURACY[precision]
    causal = made("fp64", attention_backend="native_math", compile="off", bidirectional=False)
    assert error(computed(causal, "fp64", step=1), expected) > 2 * max(ACCURACY.values())  # the control


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_that_are_cut_cost_no_compiling(deterministic: bool) -> None:
    """1 % of the batches have a length of their own, down to one token."""
    plain = made("fp64", attention_backend="native_math", compile="off")
    built = made("bf16", deterministic=deterministic, compile="on")
    before = graphs()
    computed(built, "bf16")
    seen = graphs()
    assert seen > before
    for step in range(4):
        expected = computed(plain, "fp64", step=step, random_length_probability=1.0)
        found = computed(built, "bf16", step=step, random_length_probability=1.0)
        assert error(found, expected) < 2 * ACCURACY["bf16"]
    assert graphs() == seen


def test_the_same_bits_again() -> None:
    built = made("bf16", deterministic=True, compile="on")
    first = computed(built, "bf16")
    for _ in range(5):
        again = computed(built, "bf16")
        assert again[0] == first[0]
        assert torch.equal(again[1], first[1])


def test_the_first_bound_of_the_width_of_8b() -> None:
    """Science G6: two layers of LLaDA-8B, bf16, the real mask id: ln 126464 + 4096 * 0.02^2 / 2 = 12.567."""
    built = made("bf16", model_path="GSAI-ML/LLaDA-8B-Base", num_layers=2, init_std=0.02, compile="on")
    assert built.model.shape.mask == 126336
    learnt = objective(126464, mask_token_id=126336, random_length_probability=0.0)
    whole = batch(learnt, 1, rows=16, length=512, size=126_000)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = learnt.loss(built.model, whole)["loss"]
    loss.backward()
    bound = float(loss.detach()) / whole.weights["loss"]
    print(f"first bound {bound:.4f}")
    assert bound == pytest.approx(12.567, abs=0.3)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in built.model.parameters())
    counted = float(loss.detach()) / len(whole.tensors["places"])  # seed D's normaliser, which must not pass
    assert abs(counted - 12.567) > 3
