"""What compiled layers keep for the backward pass, and that they compute what plain ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.models import layers
from lockstep.models.layers import Linear, SwiGLU
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler has its own
WIDTH, INNER, TOKENS = 16, 48, 7


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(layer: nn.Module) -> Any:
    """Its graphs as a GPU's would be cut, run as they are."""
    return torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)


def trained(layer: Callable[[Tensor], Tensor], module: nn.Module, dtype: torch.dtype) -> tuple[list[Tensor], list[Any]]:
    """(result and gradients, what was kept for the backward pass)."""
    kept: list[Any] = []
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)

    def noted(saved: Tensor) -> Tensor:
        kept.append((tuple(saved.shape), saved.dtype))
        return saved

    module.zero_grad()
    with saved_tensors_hooks(noted, lambda saved: saved):
        with torch.autocast("cpu", dtype=dtype):
            out = layer(x)
        out.float().square().sum().backward()
    gradients = [each.grad for each in (x, *module.parameters()) if each.grad is not None]
    return [out.detach(), *(each.clone() for each in gradients)], kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_compiled_layer_keeps_no_copy_of_its_weight(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, plain = Linear(WIDTH, INNER, bias=bias), nn.Linear(WIDTH, INNER, bias=bias)
    plain.load_state_dict(ours.state_dict())
    results, kept = trained(compiled(ours), ours, dtype)
    wanted, kept_by_plain = trained(compiled(plain), plain, dtype)
    as_it_is, _ = trained(ours, ours, dtype)
    for got, same, eager in zip(results, wanted, as_it_is, strict=True):
        assert got.dtype == same.dtype == eager.dtype
        assert torch.equal(got, same)
        assert torch.equal(got, eager)
    copies = [(INNER, WIDTH), (WIDTH, INNER)]
    assert not [each for each in kept if each[0] in copies and each[1] == dtype]
    assert [each for each in kept_by_plain if each[0] in copies and each[1] == dtype], "the control"


def test_a_compiled_mlp_keeps_gate_and_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LlamaOptions.model_validate(
        {"model_path": "lockstep/tiny", "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": WIDTH}
    )  # fmt: skip
    torch.manual_seed(0)
    mlp = SwiGLU(resolve(options, context_length=8))

    def wide() -> tuple[list[Tensor], int]:
        torch.compiler.reset()
        results, kept = trained(compiled(mlp), mlp, torch.bfloat16)
        return results, sum(
            shape[-1] == INNER and shape != (INNER, WIDTH) and shape != (WIDTH, INNER) for shape, _ in kept
        )

    results, count = wide()
    monkeypatch.setattr(layers, "made_again", lambda function, *args: function(*args))
    wanted, more = wide()
    assert count == 2
    assert more > 2, "the control"
    assert all(torch.equal(got, same) for got, same in zip(results, wanted, strict=True))
