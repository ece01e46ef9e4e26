"""Every line of the kernel for large tensors, run by numpy beside torch's; Triton itself: tests/gpu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from tests.health import fake_triton

CPU, LARGE = torch.device("cpu"), 100


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_triton.module(monkeypatch, "adamw") as module:
        monkeypatch.setattr(module, "is_for", lambda *row: row[0].numel() >= LARGE)
        monkeypatch.setattr(module, "BLOCK", 64)
        yield module


class Some(nn.Module):
    """Large and small, with and without decay, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        sizes = {"large": (13, 11), "whole": (4, 64), "small": (3, 5), "bias": (150,), "unused": (20, 20)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(size, generator=generator)))


def trained(steps: int, *, with_kernel: bool, skipped: int = -1, beta2: float = 0.999) -> tuple[Some, AdamW]:
    model = Some()
    optimizer = AdamW(model, TrainingOptions(weight_decay=0.1, adam_beta2=beta2), CPU)
    optimizer.has_kernel = with_kernel
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.lr.fill_(1e-2 / (step + 1))
        for name, parameter in model.named_parameters():
            if name != "unused":
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                if step == skipped:
                    parameter.grad[0] = math.nan
        divisor, skip = torch.tensor(1.0 + step), torch.tensor(float(step == skipped))
        optimizer.step(divisor, skip)
    return model, optimizer


def kept(model: Some, optimizer: AdamW) -> list[Tensor]:
    moments = [each for parameter in model.parameters() for each in optimizer.moments()[id(parameter)].values()]
    return [*(parameter.detach() for parameter in model.parameters()), *moments, optimizer.applied]


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_it_computes_what_torchs_does(steps: int, beta2: float) -> None:
    ours = kept(*trained(steps, with_kernel=True, beta2=beta2))
    for got, wanted in zip(ours, kept(*trained(steps, with_kernel=False, beta2=beta2)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=1e-7)


def test_both_moments_have_as_many_digits_as_fp32() -> None:
    """Shares that were taken of betas in fp32 are off in the fifth."""
    model, optimizer = trained(1, with_kernel=True)
    gradient = model.large.grad
    assert gradient is not None
    for kind, share in (("exp_avg", gradient.double() * 0.1), ("exp_avg_sq", gradient.double() ** 2 * 0.001)):
        torch.testing.assert_close(optimizer.moments()[id(model.large)][kind].double(), share, rtol=3e-7, atol=0)


def test_which_tensors_are_whose(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, together = list[int](), list[int]()
    monkeypatch.setattr(kernel, "update", lambda *row, **_: sizes.append(row[0].numel()))
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *row, **_: together.extend(each.numel() for each in row[0]))
    trained(1, with_kernel=True)
    assert sorted(sizes) == [143, 150, 256]
    assert together == [15]


@pytest.mark.parametrize("with_kernel", [False, True])
def test_a_skipped_step_changes_nothing(with_kernel: bool) -> None:
    after = kept(*trained(4, with_kernel=with_kernel, skipped=3))
    before = kept(*trained(3, with_kernel=with_kernel))
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    moved = kept(*trained(4, with_kernel=with_kernel))
    assert not torch.equal(moved[0], before[0]), "the control"


def test_what_the_kernel_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_triton.module(monkeypatch, "adamw") as fresh:
        row = [torch.empty(fresh.LARGE, device="meta") for _ in range(4)]
        assert not fresh.is_for(*row), "there is no GPU"
