"""float64, for proofs: nothing on the way is computed in less."""

from __future__ import annotations

import pytest
import torch

from lockstep.models import layers
from lockstep.models.build import build
from lockstep.models.llama import Llama
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve

STEP = 1e-6
TOKENS = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(0))


def made(dtype_name: str = "fp64", *, checkpointing: bool = False) -> Llama:
    options = LlamaOptions.model_validate({"model_path": "lockstep/tiny", "num_layers": 2, "init_std": 0.1})
    return build(
        options, resolve(options, context_length=64), device=torch.device("cpu"), dtype_name=dtype_name, seed=5,
        checkpointing=checkpointing, deterministic=False, debug=False,
    ).model  # fmt: skip


def loss_of(model: Llama) -> torch.Tensor:
    return model(TOKENS[:, :-1], TOKENS[:, 1:])


def error_of_gradients(model: Llama) -> float:
    """Between the gradients and a central difference along one direction that touches every parameter."""
    loss = loss_of(model)
    assert loss.dtype == torch.float64
    loss.backward()
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    pairs = list(zip(model.parameters(), directions, strict=True))
    slope = sum(float((p.grad * d).sum()) for p, d in pairs if p.grad is not None)
    sides: list[float] = []
    with torch.no_grad():
        for move in (STEP, -2 * STEP):
            for parameter, direction in pairs:
                parameter.add_(direction, alpha=move)
            sides.append(float(loss_of(model)))
    return abs((sides[0] - sides[1]) / (2 * STEP) / slope - 1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_exact_to_the_digits_of_float64(checkpointing: bool) -> None:
    model = made(checkpointing=checkpointing)
    assert all(tensor.dtype == torch.float64 for tensor in (*model.parameters(), *model.buffers()))
    assert error_of_gradients(model) < 1e-7


def test_a_norm_in_fp32_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    plain = layers.RMSNorm.forward
    monkeypatch.setattr(layers.RMSNorm, "forward", lambda self, x: plain(self, x.float()).double())
    assert error_of_gradients(made()) > 1e-6


def test_it_is_the_model_that_fp32_computes() -> None:
    wide, narrow = made(), made("fp32")
    assert loss_of(wide).item() == pytest.approx(loss_of(narrow).item(), rel=1e-6)
    total, correct = wide(TOKENS[:, :-1], TOKENS[:, 1:], count_correct=True)
    assert total.dtype == torch.float64
    assert int(correct) == int(narrow(TOKENS[:, :-1], TOKENS[:, 1:], count_correct=True)[1])
