"""AdamW with moments in bf16 on a real GPU: one launch for a tensor, rounded with the noise of engine/compact.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine import compact
from lockstep.engine.options import TrainingOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
STEPS = 5


def trained(*, kernel: bool, steps: int = STEPS, skipped: int = -1, seed: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and moments of a matrix of odd sizes, whose rows are cut for the compiler, and of a vector."""
    device, model = torch.device("cuda"), nn.Linear(1031, 20_000, device="cuda")
    options = TrainingOptions.model_validate({"weight_decay": 0.1, "optimizer_states": "bf16"})
    optimizer = compact.make_optimizer(model, options, device, seed=seed)
    optimizer.has_kernel = kernel
    optimizer.lr.fill_(1e-2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel(), device=device).view_as(parameter))
    for step in range(steps):
        generator = torch.Generator(device).manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, device=device, generator=generator)
            if step == skipped:
                parameter.grad[0] = math.nan
        optimizer.step(torch.tensor(3.0, device=device), torch.tensor(float(step == skipped), device=device))
    moments = [each for kept in optimizer.moments().values() for each in kept.values()]
    return [parameter.detach() for parameter in model.parameters()], moments


def test_the_kernel_and_the_compiler_round_alike() -> None:
    """Sums that differ in their last bit are seldom rounded otherwise, and then to a number nearby."""
    weights, moments = trained(kernel=True)
    by_rows, theirs = trained(kernel=False)
    for one, other in zip(weights, by_rows, strict=True):
        assert float((one - other).abs().max()) < 1e-4
        assert float((one - other).abs().mean()) < 1e-7
    for one, other in zip(moments, theirs, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one != other).float().mean()) < 1e-3
        apart = (one.view(torch.int16).int() - other.view(torch.int16).int()).abs()
        assert int(apart.max()) <= 2
    _, others = trained(kernel=True, seed=4)
    assert float((moments[0] != others[0]).float().mean()) > 0.1, "the control: other noise"


def test_bits_repeat_and_a_bad_step_changes_nothing() -> None:
    def everything(**how: int) -> list[Tensor]:
        weights, moments = trained(kernel=True, **how)
        return [*weights, *moments]

    one, again = everything(), everything()
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    before, skipped = everything(steps=STEPS - 1), everything(skipped=STEPS - 1)
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    assert not torch.equal(before[0], one[0]), "the control"
