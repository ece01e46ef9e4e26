"""AdamW with moments in bf16 and int8: unbiased, close to fp32 over many steps, exact on resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine import compact, moments
from lockstep.engine.compact import CompactAdamW, make_optimizer
from lockstep.engine.moments import FIRST, FIRST_SCALE, SECOND
from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.errors import DataError
from tests.gates.training import FEW_WORDS, run

CPU = torch.device("cpu")
KINDS = ("bf16", "int8")
NEVER = torch.zeros(())
VALUES = moments.second_values(CPU)


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


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_unbiased(kind: str) -> None:
    """Each number becomes one of its two neighbours, as often as its place between them says."""
    torch.manual_seed(0)
    first = torch.randn(4, 300)  # a full block of each row, and one of 44
    second = first.square() * torch.rand(4, 300)
    states, draws, whole = moments.empty_states(first, kind), 600, torch.int32
    decoded: list[tuple[Tensor, Tensor]] = []
    for step in range(draws):
        at, key = torch.tensor(step, dtype=whole), torch.tensor(5, dtype=whole)
        bits = moments.noise(first.shape, first=torch.tensor(0, dtype=whole), key=key, step=at)
        kept = moments.encode(first, second, bits, states, VALUES)
        decoded.append(moments.decode(kept, torch.float32, VALUES))
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


def test_a_small_second_moment_is_never_zero() -> None:
    """Else the first moment beside it would be divided by epsilon."""
    second = torch.tensor([[1.0, 1e-12, 1e-30, 0.0]])
    for step in range(50):
        code, scale = moments.encode_second(second, bits_of(second.shape, step)[0], VALUES)
        assert (code[0, :3] > 0).all()
        assert int(code[0, 3]) == 0
        assert float(moments.decode_second(code, scale, VALUES, torch.float32)[0, 0]) == 1.0


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


@pytest.mark.parametrize(("kind", "bound", "spread"), [("bf16", 0.01, 0.06), ("int8", 0.08, 0.25)])
def test_many_steps_agree_with_fp32(kind: str, bound: float, spread: float, in_fp32: tuple[nn.Linear, AdamW]) -> None:
    """Weights by their way from zero; the second moment on average and in its scatter."""
    model, optimizer = trained(kind)
    theirs, reference = in_fp32
    assert isinstance(optimizer, CompactAdamW)
    way = float((model.weight - theirs.weight).detach().norm() / theirs.weight.detach().norm())
    assert way < bound
    second = moments.decode(optimizer.moments()[id(model.weight)], torch.float32, VALUES)[1]
    ratio = second / reference.moments()[id(theirs.weight)][SECOND]
    assert float(ratio.mean()) == pytest.approx(1, abs=0.02)
    assert float(ratio.std()) < spread
    kept = optimizer.moments()[id(model.weight)]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    assert stored == {"bf16": 4 * 4800, "int8": 2 * 4800 + 2 * 4 * 16 * 2}[kind]


def test_without_rounding_at_random_the_weights_go_another_way(
    in_fp32: tuple[nn.Linear, AdamW], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(moments, "round_to_bf16", nearest)
    model, _ = trained("bf16")
    theirs, _ = in_fp32
    assert float((model.weight - theirs.weight).detach().norm() / theirs.weight.detach().norm()) > 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_changes_nothing(kind: str) -> None:
    model, optimizer = trained(kind, steps=3)
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_a_time_or_all_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the work is cut changes no bit; another seed does."""
    whole, _ = trained(kind, steps=20)
    monkeypatch.setitem(compact.CHUNK, "cpu", 700)
    cut, optimizer = trained(kind, steps=20)
    assert torch.equal(whole.weight, cut.weight)
    assert isinstance(optimizer, CompactAdamW)
    assert {str(value.dtype) for value in optimizer.keys.values()} == {"torch.int32"}
    monkeypatch.setattr(moments, "stream_key", lambda seed, name: seed + len(name))
    other, _ = trained(kind, steps=20)
    assert not torch.equal(whole.weight, other.weight)


def test_a_step_without_the_compiler_still_updates_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked diffusion runs the blocks of some steps as they are; the update is no part of that."""
    from torch._dynamo import eval_frame

    seen: list[str] = []
    monkeypatch.setattr(compact, "COMPILED", ("cpu",))
    monkeypatch.setattr(compact, "_compiled", lambda: lambda *_, **__: seen.append(eval_frame._stance.stance))
    with torch.compiler.set_stance("force_eager"):
        trained("int8", steps=1)
        assert eval_frame._stance.stance == "force_eager", "the blocks may run again"
    assert set(seen) == {"default"}


RUN: dict[str, Any] = {
    "training.max_steps": 4, "training.save_interval": 2, "training.eval_interval": 0, "data.num_workers": 0,
    "report.tensorboard": False, "training.learning_rate": 1e-2, "data.data_path": FEW_WORDS,
    "training.context_length": 32, "training.batch_size": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("shared_cache")
def test_resume_is_exact_and_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    settings = {**RUN, "training.optimizer_states": kind}
    _, through = run(tmp_path / "through", settings)
    point = tmp_path / "through" / "checkpoints" / "step_00000002"
    parts, again = run(tmp_path / "again", settings, point=point)
    assert again.trace == through.trace[2:]
    weight = parts.stepper.model.get_parameter("output.weight")
    assert (FIRST_SCALE in parts.stepper.optimizer.moments()[id(weight)]) == (kind == "int8")
    for other in {"fp32", "bf16", "int8"} - {kind}:
        change = {"training.optimizer_states": other, "checkpoint.allow_mismatch": True}
        with pytest.raises(DataError, match=f"moments in {kind}, this run in {other}"):
            run(tmp_path / other, {**RUN, **change}, point=point)
    _, plain = run(tmp_path / "plain", RUN)
    assert [entry[1] for entry in plain.trace] != [entry[1] for entry in through.trace]
