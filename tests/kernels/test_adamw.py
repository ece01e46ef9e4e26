"""The kernel for large tensors beside torch's, by Triton's interpreter; compiled: tests/gpu/test_cuda_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.compact import make_optimizer
from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from tests import interpreted

CPU, LARGE = torch.device("cpu"), 100


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with interpreted.module(monkeypatch, "adamw") as module:
        monkeypatch.setattr(
            module, "is_for", lambda *row, least=LARGE: row[0].numel() >= least and row[2].is_floating_point()
        )
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


def trained(
    steps: int, *, with_kernel: bool, skipped: int = -1, states: str = "fp32", seed: int = 1, **settings: float
) -> tuple[Some, AdamW]:
    model = Some()
    options = TrainingOptions.model_validate({"weight_decay": 0.1, "optimizer_states": states, **settings})
    optimizer = make_optimizer(model, options, CPU, seed=seed)
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
@pytest.mark.parametrize("settings", [{"adam_beta2": 0.95}, {"adam_beta2": 0.999}, {"adam_epsilon": 0.1}])
def test_it_computes_what_torchs_does(steps: int, settings: dict[str, float]) -> None:
    ours = kept(*trained(steps, with_kernel=True, **settings))
    for got, wanted in zip(ours, kept(*trained(steps, with_kernel=False, **settings)), strict=True):
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


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("with_kernel", [False, True])
def test_a_skipped_step_changes_nothing(with_kernel: bool, states: str) -> None:
    after = kept(*trained(4, with_kernel=with_kernel, skipped=3, states=states))
    before = kept(*trained(3, with_kernel=with_kernel, states=states))
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
    moved = kept(*trained(4, with_kernel=with_kernel, states=states))
    assert not torch.equal(moved[0], before[0]), "the control"


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_moments_in_bf16_are_rounded_with_the_same_noise(steps: int) -> None:
    """As engine/compact.py rounds them, whole tensors at once instead of rows; another seed rounds otherwise."""
    model, optimizer = trained(steps, with_kernel=True, states="bf16")
    ours = kept(model, optimizer)
    assert optimizer.moments()[id(model.large)]["exp_avg"].dtype == torch.bfloat16
    for got, wanted in zip(ours, kept(*trained(steps, with_kernel=False, states="bf16")), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6 if got.dtype == torch.float32 else 0, atol=1e-7)
    others = kept(*trained(steps, with_kernel=True, states="bf16", seed=2))
    same = [torch.equal(one, other) for one, other in zip(ours, others, strict=True) if one.dtype == torch.bfloat16]
    assert not all(same), "the control"


def test_a_part_of_a_tensor_is_rounded_as_in_the_whole(kernel: Any) -> None:
    """Rows 3 to 9 of 13, as a shard has them; without its place, other numbers."""
    generator = torch.Generator().manual_seed(0)
    weights, gradient = (torch.randn(13, 11, generator=generator) for _ in range(2))
    key = torch.tensor(-77).int()
    on = torch.ones(())
    shared = kernel.numbers(on * 0.01, on, on, on * 0, (0.9, 0.999))

    def updated(rows: slice, begin: int) -> list[Tensor]:
        parts = [weights[rows].clone(), gradient[rows], *(torch.zeros(13, 11)[rows].bfloat16() for _ in range(2))]
        kernel.update(*parts, shared, decay=0.1, betas=(0.9, 0.999), epsilon=1e-8, key=key, begin=begin)
        return [parts[0], *parts[2:]]

    whole, part, misplaced = updated(slice(0, 13), 0), updated(slice(3, 10), 33), updated(slice(3, 10), 0)
    assert all(torch.equal(one[3:10], other) for one, other in zip(whole, part, strict=True))
    assert not torch.equal(part[1], misplaced[1])


def test_what_the_kernel_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted.module(monkeypatch, "adamw") as fresh:
        row = [torch.empty(fresh.LARGE, device="meta") for _ in range(4)]
        assert not fresh.is_for(*row), "there is no GPU"
