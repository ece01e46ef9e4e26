"""AdamW with moments in bf16: unbiased, close to fp32 over many steps, exact on resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine import compact, moments
from lockstep.engine.compact import CompactAdamW, make_optimizer
from lockstep.engine.moments import FIRST, SECOND
from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.errors import DataError
from tests.gates.training import FEW_WORDS, run

CPU = torch.device("cpu")
NEVER = torch.zeros(())


def bits_of(shape: torch.Size, step: int) -> tuple[Tensor, Tensor]:
    first, key, at = (torch.tensor(value, dtype=torch.int32) for value in (0, 77, step))
    return moments.halves(moments.noise(shape, first=first, key=key, step=at))


def nearest(x: Tensor, _bits: Tensor) -> Tensor:
    return x.to(torch.bfloat16)


def after_decay(rounding: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A second moment whose gradients fall from 1 to 0.1, kept in bf16, relative to what fp32 would hold."""
    kept = torch.ones(512, dtype=torch.bfloat16)
    exact = 1.0
    for step in range(1500):
        exact = 0.999 * exact + 0.001 * 0.01
        kept = rounding(kept.float() * 0.999 + 0.001 * 0.01, bits_of(kept.shape, step)[0])
    return kept.float() / exact


def test_a_second_moment_in_bf16_follows_and_rounded_to_the_nearest_it_stalls() -> None:
    """The second is the negative control: 0.1 % is less than half of what bf16 can tell apart."""
    followed, stalled = after_decay(moments.round_to_bf16), after_decay(nearest)
    assert float(followed.mean()) == pytest.approx(1, abs=0.02)
    assert float(stalled.min()) > 4


def test_rounding_is_unbiased() -> None:
    """Each number becomes one of its two neighbours, as often as its place between them says."""
    torch.manual_seed(0)
    first = torch.randn(4, 300)
    second = first.square() * torch.rand(4, 300)
    draws, whole = 600, torch.int32
    decoded: list[tuple[Tensor, Tensor]] = []
    for step in range(draws):
        at, key = torch.tensor(step, dtype=whole), torch.tensor(5, dtype=whole)
        bits = moments.noise(first.shape, first=torch.tensor(0, dtype=whole), key=key, step=at)
        low, high = moments.halves(bits)
        decoded.append((moments.round_to_bf16(first, low).float(), moments.round_to_bf16(second, high).float()))
    for exact, found in zip((first, second), zip(*decoded, strict=True), strict=True):
        stacked = torch.stack(found).double()
        low, high = stacked.amin(0), stacked.amax(0)
        assert ((stacked == low) | (stacked == high)).all()
        both = low < high
        assert both.double().mean() > 0.9
        chance = ((exact - low) / (high - low))[both]
        share = (stacked == high).double().mean(0)[both]
        error = (chance * (1 - chance) / draws).clamp(min=0).sqrt()
        assert float(((share - chance).abs() - 5 * error).max()) < 2 / draws


def trained(kind: str, steps: int = 700, **changed: Any) -> tuple[nn.Linear, AdamW]:
    """A matrix under gradients of very different sizes with a little drift, that become smaller, as in training."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp(torch.randn(16, 300, generator=generator))
    model = nn.Linear(300, 16)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    options = TrainingOptions.model_validate({"optimizer_states": kind, "weight_decay": 0.01, **changed})
    optimizer = make_optimizer(model, options, CPU, seed=1)
    optimizer.lr.fill_(1e-3)
    for step in range(steps):
        noise = torch.randn(16, 300, generator=generator)
        model.weight.grad = spread * (noise + 0.3) * (1 if step < 200 else 0.1)
        model.bias.grad = noise[:, 0].clone()
        optimizer.step(torch.ones(()), NEVER)
    return model, optimizer


@pytest.fixture(scope="module")
def in_fp32() -> tuple[nn.Linear, AdamW]:
    return trained("fp32")


def test_many_steps_agree_with_fp32(in_fp32: tuple[nn.Linear, AdamW]) -> None:
    """Weights by their way from zero; the second moment on average and in its scatter."""
    model, optimizer = trained("bf16")
    theirs, reference = in_fp32
    assert isinstance(optimizer, CompactAdamW)
    way = float((model.weight - theirs.weight).detach().norm() / theirs.weight.detach().norm())
    assert way < 0.01
    second = optimizer.moments()[id(model.weight)][SECOND].float()
    ratio = second / reference.moments()[id(theirs.weight)][SECOND]
    assert float(ratio.mean()) == pytest.approx(1, abs=0.02)
    assert float(ratio.std()) < 0.06
    kept = optimizer.moments()[id(model.weight)]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    assert stored == 4 * 4800


def test_without_rounding_at_random_the_weights_go_another_way(
    in_fp32: tuple[nn.Linear, AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(moments, "round_to_bf16", nearest)
    model, _ = trained("bf16")
    theirs, _ = in_fp32
    assert float((model.weight - theirs.weight).detach().norm() / theirs.weight.detach().norm()) > 0.03


def test_a_bad_step_changes_nothing() -> None:
    model, optimizer = trained("bf16", steps=3)
    kept = {name: value.clone() for name, value in optimizer.moments()[id(model.weight)].items()}
    weight, applied = model.weight.detach().clone(), float(optimizer.applied)
    model.weight.grad = torch.full_like(model.weight, torch.nan)
    optimizer.step(torch.ones(()), torch.ones(()))
    assert torch.equal(model.weight, weight)
    assert float(optimizer.applied) == applied
    assert all(torch.equal(value, kept[name]) for name, value in optimizer.moments()[id(model.weight)].items())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step(torch.ones(()), NEVER)
    assert not torch.equal(model.weight, weight)
    assert not torch.equal(optimizer.moments()[id(model.weight)][FIRST], kept[FIRST])


def test_rows_at_a_time_or_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How the work is cut changes no bit; another seed does."""
    whole, _ = trained("bf16", steps=20)
    monkeypatch.setitem(compact.CHUNK, "cpu", 700)
    cut, optimizer = trained("bf16", steps=20)
    assert torch.equal(whole.weight, cut.weight)
    assert isinstance(optimizer, CompactAdamW)
    assert {str(value.dtype) for value in optimizer.keys.values()} == {"torch.int32"}
    monkeypatch.setattr(moments, "stream_key", lambda seed, name: seed + len(name))
    other, _ = trained("bf16", steps=20)
    assert not torch.equal(whole.weight, other.weight)


RUN: dict[str, Any] = {
    "training.max_steps": 4, "training.save_interval": 2, "training.eval_interval": 0, "data.num_workers": 0,
    "report.tensorboard": False, "training.learning_rate": 1e-2, "data.data_path": FEW_WORDS,
    "training.context_length": 32, "training.batch_size": 2,
}  # fmt: skip


@pytest.mark.usefixtures("shared_cache")
def test_resume_is_exact_and_another_kind_is_refused(tmp_path: Path) -> None:
    settings = {**RUN, "training.optimizer_states": "bf16"}
    _, through = run(tmp_path / "through", settings)
    point = tmp_path / "through" / "checkpoints" / "step_00000002"
    _, again = run(tmp_path / "again", settings, point=point)
    assert again.trace == through.trace[2:]
    with pytest.raises(DataError, match="moments in bf16, this run in fp32"):
        run(tmp_path / "other", {**RUN, "checkpoint.allow_mismatch": True}, point=point)
    _, plain = run(tmp_path / "plain", RUN)
    assert [entry[1] for entry in plain.trace] != [entry[1] for entry in through.trace]
