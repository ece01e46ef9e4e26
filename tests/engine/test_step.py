"""One optimizer step: sums and weights, clipping, and bad steps that change nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.contracts import Batch
from lockstep.engine.optimizer import AdamW
from lockstep.engine.options import TrainingOptions
from lockstep.engine.step import Stepper
from lockstep.kernels import linear_cross_entropy as head
from lockstep.runtime import faults
from lockstep.runtime.precision import Precision

CPU = torch.device("cpu")


class Regression:
    """A sum of squared errors over the rows that have a target; the weight is their count."""

    columns: Mapping[str, str] = {}
    terms: Mapping[str, float] = {"loss": 1.0}

    def loss(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        error = (model(batch.tensors["x"]) - batch.tensors["y"]).square().sum(1)
        return {"loss": (error * batch.tensors["valid"]).sum()}


def make_batch(rows: int, *, seed: int, valid: list[int] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor(valid if valid is not None else [1] * rows).float()
    x, y = (torch.randn(rows, 4, generator=generator) for _ in range(2))
    return Batch({"x": x, "y": y, "valid": mask}, {"loss": int(mask.sum())}, rows, rows)


def split(batch: Batch, size: int) -> list[Batch]:
    parts = []
    for start in range(0, batch.rows, size):
        tensors = {name: tensor[start : start + size] for name, tensor in batch.tensors.items()}
        parts.append(Batch(tensors, {"loss": int(tensors["valid"].sum())}, len(tensors["x"]), len(tensors["x"])))
    return parts


def make_stepper(fault: str = "", precision: str = "fp32", **settings: Any) -> Stepper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
    options = TrainingOptions.model_validate({"learning_rate": 0.01, "max_steps": 50, **settings})
    return Stepper(model, Regression(), options, precision=Precision(precision, CPU), seed=0, faults=faults.plan(fault))


def weights(stepper: Stepper) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in stepper.model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_micro_batches_do_not_change_a_step_even_when_ragged(size: int) -> None:
    batch = make_batch(8, seed=1, valid=[1, 0, 0, 0, 1, 1, 1, 0])
    whole, parts = make_stepper(), make_stepper()
    for step in range(3):
        one = whole.launch(step, [batch]).read()
        many = parts.launch(step, split(batch, size)).read()
        assert many.loss == pytest.approx(one.loss, rel=1e-5)
        assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Listening(Regression):
    """Keeps what its sums are said to be multiplied by."""

    def __init__(self, terms: Mapping[str, float]) -> None:
        self.terms, self.heard = terms, list[float]()

    def loss(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        self.heard.append(head._AHEAD.get())
        return dict.fromkeys(self.terms, super().loss(model, batch)["loss"])


@pytest.mark.parametrize(
    ("precision", "terms", "expected"),
    [("fp32", {"loss": 3.0}, 3 / 7), ("fp32", {"loss": 3.0, "more": 1.0}, 1.0), ("fp16", {"loss": 3.0}, 1.0)],
)
def test_a_sum_is_told_what_it_is_multiplied_by(precision: str, terms: dict[str, float], expected: float) -> None:
    """Its share of the whole step, where there is one and it is known: a loss scale lies on the device."""
    stepper, objective = make_stepper(precision=precision), Listening(terms)
    stepper.objective = objective
    whole = make_batch(8, seed=3, valid=[1, 1, 1, 1, 0, 1, 1, 1])
    stepper.accumulate(0, split(whole, 4), dict.fromkeys(terms, 7))
    assert objective.heard == [expected] * 2
    assert head._AHEAD.get() == 1.0


def test_a_mean_of_means_would_be_seen() -> None:
    """Negative control: dividing each micro-batch by its own count gives another loss on ragged rows."""
    batch = make_batch(8, seed=1, valid=[1, 0, 0, 0, 1, 1, 1, 0])
    stepper = make_stepper()
    parts = split(batch, 4)
    means = [(stepper.objective.loss(stepper.model, part)["loss"] / part.weights["loss"]).item() for part in parts]
    assert sum(means) / 2 != pytest.approx(stepper.launch(0, parts).read().loss, rel=1e-2)


def torch_adamw(ours: AdamW, model: nn.Module, theirs: nn.Module) -> torch.optim.AdamW:
    """torch's own optimizer over a copy of the model, in the same groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    copies = dict(theirs.named_parameters())
    options = ours.options
    return torch.optim.AdamW(
        [
            {"params": [copies[names[id(p)]] for p in group.parameters], "weight_decay": group.weight_decay}
            for group in ours.groups
        ],
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_epsilon,
    )


def test_equals_torch_adamw_with_clipping() -> None:
    ours = make_stepper(max_grad_norm=0.5, warmup_steps=2, weight_decay=0.1)
    model = copy.deepcopy(ours.model)
    reference = torch_adamw(ours.optimizer, ours.model, model)
    for step in range(6):
        batch = make_batch(8, seed=step)
        reading = ours.launch(step, [batch]).read()
        for group in reference.param_groups:
            group["lr"] = reading.lr
        reference.zero_grad()
        (Regression().loss(model, batch)["loss"] / 8).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference.step()
        assert reading.grad_norm == pytest.approx(norm.item(), rel=1e-5), "the norm shown is the one before clipping"
    for a, b in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    loaded = torch_adamw(ours.optimizer, ours.model, model)
    loaded.load_state_dict(ours.optimizer.state_dict())  # the documented file holds what torch itself can load
    for place, state in reference.state_dict()["state"].items():
        torch.testing.assert_close(
            loaded.state_dict()["state"][place]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-6
        )
        assert loaded.state_dict()["state"][place]["step"] == 6


def test_the_rate_shown_is_the_rate_used() -> None:
    """Item 8: recover the rate from Adam's first update, whose size is lr for every element."""
    stepper = make_stepper(warmup_steps=4, max_grad_norm=0.0)
    before = weights(stepper)
    reading = stepper.launch(0, [make_batch(8, seed=0)]).read()
    moved = (weights(stepper)[0] - before[0]).abs()
    assert moved.median().item() == pytest.approx(reading.lr, rel=1e-3)
    assert stepper.launch(1, [make_batch(8, seed=0)]).read().lr > reading.lr


def test_no_decay_on_norms_biases_and_embeddings() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(3, 4), "n": nn.LayerNorm(4), "l": nn.Linear(4, 4)})
    decayed, plain = AdamW(model, TrainingOptions(weight_decay=0.5), CPU).groups
    assert decayed.weight_decay == 0.5
    assert [tuple(p.shape) for p in decayed.parameters] == [(4, 4)]
    assert plain.weight_decay == 0.0
    assert len(plain.parameters) == 4


def test_a_parameter_without_gradient_is_left_alone() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4, bias=False), "idle": nn.Linear(4, 4, bias=False)})
    optimizer = AdamW(model, TrainingOptions(weight_decay=0.5), CPU)
    optimizer.lr.fill_(0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model["used"](torch.ones(1, 4)).sum().backward()
    optimizer.step(torch.ones(()), torch.zeros(()))
    assert torch.equal(model["idle"].weight, before["idle.weight"])
    assert not torch.equal(model["used"].weight, before["used.weight"])


BAD = ["nan_loss@step=2", "inf_loss@step=2", "nan_grad@step=2", "inf_grad@step=2", "nan_weight@step=1,tensor=0.weight"]


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_step_changes_nothing_and_stays_bad(fault: str, clip: float) -> None:
    stepper = make_stepper(fault, max_grad_norm=clip)
    for step in range(2):
        assert not stepper.launch(step, [make_batch(8, seed=step)]).read().fatal
    before = weights(stepper)
    moments = {key: slot["exp_avg"].clone() for key, slot in stepper.optimizer.moments().items()}
    bad = stepper.launch(2, [make_batch(8, seed=2)]).read()
    assert bad.fatal
    stepper.launch(3, [make_batch(8, seed=3)]).read()  # what was in flight when the host had not looked yet
    for a, b in zip(before, weights(stepper), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for key, slot in stepper.optimizer.moments().items():
        assert torch.equal(slot["exp_avg"], moments[key])
    assert stepper.optimizer.applied.item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "bad"),
    [(3e38, False), (-3e38, False), (float("inf"), True), (float("-inf"), True), (float("nan"), True)],
)
def test_a_weight_is_bad_if_it_is_not_finite_and_not_for_being_large(
    value: float, bad: bool, dtype: torch.dtype
) -> None:
    """Wherever it lies in the tensor; the square of a large one would be infinite."""
    stepper = make_stepper()
    for place in (0, 17, 1000, -1):
        weight = torch.linspace(-1, 1, 1027, dtype=dtype)
        weight[place] = value
        stepper.parameters = [nn.Parameter(weight)]
        seen = stepper.look_at_weights(0, stepper.zero).item()
        assert math.isnan(seen) == bad
        assert bad or seen == 0
    stepper.parameters = [nn.Parameter(torch.empty(0, 4))]  # the part of a rank that has no row of it
    assert stepper.look_at_weights(0, stepper.zero).item() == 0


def test_without_the_gate_a_bad_step_would_spoil_the_weights() -> None:
    """Negative control for the test above."""
    stepper = make_stepper("nan_grad@step=0")

    gated = stepper.optimizer.step
    stepper.optimizer.step = lambda divisor, skip: gated(divisor, torch.zeros_like(skip))
    stepper.launch(0, [make_batch(8, seed=0)])
    assert any(torch.isnan(weight).any() for weight in weights(stepper))


def test_fp16_overflow_is_a_skip_that_halves_the_scale_and_keeps_the_schedule() -> None:
    stepper = make_stepper("inf_grad@step=1", precision="fp16", warmup_steps=10)
    assert stepper.precision.scaler
    stepper.precision.scaler.scale.fill_(128.0)  # low enough that only the injected overflow happens
    first = stepper.launch(0, [make_batch(8, seed=0)]).read()
    before = weights(stepper)
    skipped = stepper.launch(1, [make_batch(8, seed=1)]).read()
    assert (skipped.fatal, skipped.overflow) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(stepper), strict=True))
    assert stepper.precision.scaler.scale.item() == first.loss_scale / 2
    after = stepper.launch(2, [make_batch(8, seed=2)]).read()
    assert after.lr == skipped.lr > first.lr, "the schedule waits for a step that counts"
    assert stepper.optimizer.applied.item() == 2
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(stepper), strict=True))


def test_fp16_really_overflows_at_a_large_scale() -> None:
    stepper = make_stepper(precision="fp16")
    assert stepper.precision.scaler
    stepper.precision.scaler.scale.fill_(2.0**40)
    assert stepper.launch(0, [make_batch(8, seed=0)]).read().overflow


def test_fp16_loss_that_is_nan_is_fatal_not_an_overflow() -> None:
    reading = make_stepper("nan_loss@step=0", precision="fp16").launch(0, [make_batch(8, seed=0)]).read()
    assert (reading.fatal, reading.overflow) == (True, False)


def test_a_rehearsal_changes_nothing() -> None:
    for precision in ("fp32", "fp16"):
        rehearsed, plain = make_stepper(precision=precision), make_stepper(precision=precision)
        before = weights(rehearsed)
        first = rehearsed.rehearse([make_batch(8, seed=0)])
        assert all(torch.equal(a, b) for a, b in zip(before, weights(rehearsed), strict=True))
        a, b = (stepper.launch(0, [make_batch(8, seed=0)]).read() for stepper in (rehearsed, plain))
        assert a == b
        assert first.loss == pytest.approx(a.loss)


# ------------------------------------------------------------------------------------------------- watched measures


class Watching(Regression):
    """Also tells how many rows were over the mark, an integer, and the sum of another term's targets."""

    terms: Mapping[str, float] = {"loss": 1.0, "more": 0.5}
    watched: Mapping[str, str] = {"over": "loss", "more": "more"}

    def loss(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        x = batch.tensors["x"]
        over = ((x[:, 0] > 0) * batch.tensors["valid"]).sum().long()
        return {**super().loss(model, batch), "more": model(x).abs().sum(), "over": over}


def watching(precision: str = "fp32") -> Stepper:
    plain = make_stepper(precision=precision)
    options = TrainingOptions(learning_rate=0.01, max_steps=50)
    model = plain.model.double() if precision == "fp64" else plain.model
    return Stepper(model, Watching(), options, precision=Precision(precision, CPU), seed=0, faults=faults.plan(""))


def with_more(batch: Batch, *, each: int) -> Batch:
    return batch._replace(weights={**batch.weights, "more": batch.rows * each})


@pytest.mark.parametrize("size", [1, 3, 8])
def test_watched_measures_are_means_over_the_whole_step(size: int) -> None:
    batch = make_batch(8, seed=1, valid=[1, 0, 0, 0, 1, 1, 1, 0])
    stepper = watching()
    sums = stepper.objective.loss(stepper.model, batch)
    more, over = float(sums["more"].detach()) / 24, float(sums["over"]) / 4
    parts = [with_more(part, each=3) for part in split(batch, size)]
    reading = stepper.launch(0, parts).read()
    assert list(reading.measures) == ["over", "more"]
    assert reading.measures["over"] == pytest.approx(over, abs=1e-7)
    assert reading.measures["more"] == pytest.approx(more, rel=1e-6)
    loss = float(sums["loss"].detach()) / 4 + 0.5 * more
    assert reading.loss == pytest.approx(loss, rel=1e-6)
    again = stepper.launch(1, parts).read()
    assert again.measures["over"] == pytest.approx(over, abs=1e-7), "of this step alone"
    assert again.measures["more"] != reading.measures["more"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_watching_changes_no_bit_of_training(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(8, seed=1)
    if precision == "fp64":
        batch = batch._replace(tensors={name: tensor.double() for name, tensor in batch.tensors.items()})
    batch, results = with_more(batch, each=1), []
    for watched in (Watching.watched, {}):
        monkeypatch.setattr(Watching, "watched", watched)
        stepper = watching(precision)
        readings = [stepper.launch(step, [batch, batch]).read() for step in range(3)]
        results.append(([(each.loss, each.grad_norm) for each in readings], weights(stepper)))
        assert [set(each.measures) for each in readings] == [set(watched)] * 3
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_who_watches_nothing_is_told_nothing() -> None:
    assert make_stepper().launch(0, [make_batch(8, seed=0)]).read().measures == {}


def test_a_rehearsal_tells_them_too() -> None:
    assert set(watching().rehearse([with_more(make_batch(8, seed=0), each=1)]).measures) == {"over", "more"}
