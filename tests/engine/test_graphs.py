"""Steps as one graph: the bits of plain steps, what is done before each replay, and when it is chosen.

A tape of operations takes the place of the CUDA graph. On a GPU: tests/gpu/test_cuda_graph.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lockstep.contracts import Batch
from lockstep.engine import graphs
from lockstep.engine import step as step_module
from lockstep.engine.graphs import StepGraph, choose, obstacle
from lockstep.engine.options import TrainingOptions
from lockstep.engine.step import Reading, Stepper
from lockstep.health.finite import GradientWatch
from lockstep.health.prints import Prints
from lockstep.runtime import faults
from lockstep.runtime.precision import Precision
from lockstep.runtime.reduce import Alone
from tests.engine.taped import Taped
from tests.engine.test_step import Regression, make_batch

CPU, ROWS = torch.device("cpu"), 8


class Steady(Regression):
    steady = True
    watched: ClassVar = {"error": "loss"}

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        kind = next(model.parameters()).dtype
        wide = batch._replace(tensors={name: tensor.to(kind) for name, tensor in batch.tensors.items()})
        total = super().loss(model, wide)["loss"]
        return {"loss": total, "error": total.detach().sqrt()}


def failing(*_: Any) -> Taped:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x[:, 0] > 0).long()


def made(precision: str = "fp32", fault: str = "", *, embeds: bool = False, **settings: Any) -> Stepper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))
    if embeds:  # of five tokens only two are ever read
        model = nn.Sequential(Signs(), nn.Embedding(5, 8), nn.Linear(8, 4))
    if precision == "fp64":
        model.double()
    options = TrainingOptions.model_validate(
        {"learning_rate": 0.01, "max_steps": 50, "warmup_steps": 3, "max_grad_norm": 0.5, **settings}
    )
    objective: Any = Steady()
    named = Precision(precision, CPU)
    return Stepper(model, objective, options, precision=named, seed=7, faults=faults.plan(fault))


def graphed(precision: str = "fp32", **settings: Any) -> Stepper:
    stepper = made(precision, **settings)
    stepper.rehearse([make_batch(ROWS, seed=99)])
    stepper.graph = StepGraph(stepper, make_batch(ROWS, seed=99), Taped)
    return stepper


def state(stepper: Stepper) -> list[Tensor]:
    moments = [each for kept in stepper.optimizer.moments().values() for each in kept.values()]
    scaler = stepper.precision.scaler
    scale = [scaler.scale, scaler.growth_tracker] if scaler else []
    kept = [*stepper.model.parameters(), *moments, stepper.optimizer.applied, *scale]
    return [tensor.detach().clone() for tensor in kept]


def same(one: Stepper, other: Stepper) -> bool:
    return all(map(torch.equal, state(one), state(other)))


def trained(stepper: Stepper, steps: int = 12, *, first: int = 0) -> list[Reading]:
    return [stepper.launch(step, [make_batch(ROWS, seed=step)]).read() for step in range(first, first + steps)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_a_graph_makes_the_bits_of_plain_steps(precision: str) -> None:
    plain, graph, other = made(precision), graphed(precision), graphed(precision)
    other.seed = 8  # the control: other noise
    expected = str(trained(plain))  # as text: an overflow's norm is no number
    assert str(trained(graph)) == expected
    assert same(plain, graph)
    assert str(trained(other)) != expected
    assert not same(plain, other)


def test_a_run_goes_on_with_and_without_a_graph() -> None:
    plain, mixed = made(), made()
    expected = trained(plain, 12)
    found = trained(mixed, 4)
    mixed.graph = StepGraph(mixed, make_batch(ROWS, seed=3), Taped)
    found += trained(mixed, 4, first=4)
    mixed.graph = None
    found += trained(mixed, 4, first=8)
    assert found == expected
    assert same(plain, mixed)


def test_a_rehearsal_and_the_recording_change_nothing() -> None:
    fresh, stepper = made(), graphed("fp32")
    assert same(fresh, stepper)
    before = fresh.rehearse([make_batch(ROWS, seed=4)])
    assert stepper.rehearse([make_batch(ROWS, seed=4)]) == before
    assert same(fresh, stepper)
    assert float(stepper.halted) == 0
    assert not stepper.updating
    assert all(parameter.grad is None for parameter in stepper.model.parameters())
    assert 0 < stepper.rehearsed[0] <= stepper.rehearsed[1]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_found_again(precision: str) -> None:
    stepper = graphed(precision)
    trained(stepper, 3)
    batch = make_batch(ROWS, seed=3)
    batch.tensors["x"][2, 1] = math.nan
    before = state(stepper)
    pending = stepper.launch(3, [batch])
    after = stepper.launch(4, [make_batch(ROWS, seed=4)])  # one step is always in flight
    assert pending.read().fatal
    assert math.isnan(pending.read().loss)
    assert after.read().loss > 0
    kept = len(before) - (2 if precision == "fp16" else 0)  # the scale may count good steps
    assert all(map(torch.equal, state(stepper)[:kept], before[:kept]))
    assert math.isnan(stepper.again(3, [batch], batch.weights).item())
    assert math.isfinite(stepper.again(4, [make_batch(ROWS, seed=4)], batch.weights).item())


def test_a_weight_that_is_not_finite_is_seen_in_its_turn() -> None:
    plain, graph = made(), graphed()
    for stepper in (plain, graph):
        trained(stepper, 2)
        next(stepper.model.parameters()).data[0, 0] = math.nan
    found, expected = (trained(stepper, 1, first=2)[0] for stepper in (graph, plain))
    assert found.fatal
    assert str(found) == str(expected)


def test_a_weight_that_no_batch_reads_is_seen_in_its_turn() -> None:
    plain, graph = made(embeds=True), graphed(embeds=True)
    for stepper in (plain, graph):
        next(stepper.model.parameters()).data[4, 0] = math.inf
    found, expected = (trained(stepper, 3) for stepper in (graph, plain))
    assert [reading.fatal for reading in found].count(True) == 1, "of three steps, which look at a tensor each"
    assert all(math.isfinite(reading.loss + reading.grad_norm) for reading in found)
    assert str(found) == str(expected)


def test_other_batches_take_the_plain_way() -> None:
    plain, stepper = made(), graphed()
    recording = stepper.graph._recording  # pyright: ignore[reportOptionalMemberAccess, reportPrivateUsage]
    assert isinstance(recording, Taped)
    half = make_batch(ROWS // 2, seed=1)
    several = [make_batch(ROWS, seed=3), make_batch(ROWS, seed=4)]
    for step, batches in enumerate(([half], several)):
        assert stepper.launch(step, batches).read() == plain.launch(step, batches).read()
    assert recording.replays == 0
    assert trained(stepper, 2, first=2) == trained(plain, 2, first=2)
    assert recording.replays == 2
    assert same(plain, stepper)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_what_rows_count_is_that_of_the_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows, of which another number counts each time; the control: shares as they were recorded."""

    def read(stepper: Stepper) -> str:
        valid = [[1] * each + [0] * (ROWS - each) for each in (8, 3, 3, 1, 7, 8)]
        return str([stepper.launch(step, [make_batch(ROWS, seed=step, valid=rows)]).read()
                    for step, rows in enumerate(valid)])  # fmt: skip

    plain, graph = made(precision), graphed(precision)
    assert read(graph) == (expected := read(plain))
    assert same(plain, graph)
    recording: Any = graph.graph._recording  # pyright: ignore[reportOptionalMemberAccess, reportPrivateUsage]
    assert recording.replays == 6
    monkeypatch.setattr(StepGraph, "_tell", lambda *_: None)
    assert read(graphed(precision)) != expected


def test_what_comes_before_each_replay() -> None:
    """The rows are the recording's own, and an update waits for who still copies the weights."""
    stepper, order = graphed(), list[str]()
    graph = stepper.graph
    assert graph is not None
    stepper.before_change = lambda: order.append("wait")
    recording = graph._recording  # pyright: ignore[reportPrivateUsage]
    assert isinstance(recording, Taped)
    replay = recording.replay
    recording.replay = lambda: (order.append(f"work, updating {stepper.updating}"), replay())[1]
    batch = make_batch(ROWS, seed=0)
    given = {name: tensor.clone() for name, tensor in batch.tensors.items()}
    stepper.launch(0, [batch])
    assert order == ["wait", "work, updating True"]
    assert not stepper.updating
    assert all(torch.equal(batch.tensors[name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize("steady", [True, False])
def test_what_lies_on_the_device_is_not_foretold(steady: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would have to ask for it, in the middle of a recording; plain steps have the bits of recorded ones."""
    told: list[Any] = []

    def noted(factor: Any) -> contextlib.AbstractContextManager[None]:
        told.append(factor)
        return contextlib.nullcontext()

    monkeypatch.setattr(step_module, "summands_of", noted)
    monkeypatch.setattr(Steady, "steady", steady)
    trained(graphed() if steady else made(), 1)
    assert set(told) == {1.0 if steady else 1 / ROWS}


# ------------------------------------------------------------------------------------------------------- the choice


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(graphs, "RECORDABLE", ("cpu",))
    caplog.set_level(logging.INFO, logger=graphs.__name__)
    return caplog


def chosen(stepper: Stepper, *, launching: float, whole: float, record: Any = Taped, **how: Any) -> bool:
    batches = [make_batch(ROWS, seed=0)]
    stepper.rehearse(batches)
    rehearse = stepper.rehearse

    def timed(batches: Sequence[Batch]) -> Reading:
        reading = rehearse(batches)
        stepper.rehearsed = (launching, whole)
        return reading

    stepper.rehearse = timed
    choose(stepper, batches, record=record, **{"compiles": True, **how})
    return stepper.graph is not None


def test_a_step_that_is_bound_by_launching_becomes_a_graph(here: pytest.LogCaptureFixture) -> None:
    assert chosen(made(), launching=0.0061, whole=0.0064)
    assert here.messages == ["step: one CUDA graph (auto; launching took 6.1 ms of 6.4)"]
    here.clear()
    assert not chosen(made(), launching=0.003, whole=0.5)
    assert here.messages == ["step: kernel by kernel (auto; launching took 3.0 ms of 500.0)"]


def test_a_recording_that_fails_is_done_without(here: pytest.LogCaptureFixture) -> None:
    plain, stepper = made(), made()
    assert not chosen(stepper, launching=1.0, whole=1.0, record=failing)
    assert here.messages == [
        "step: kernel by kernel (recording it failed: operation not permitted when stream is capturing)"
    ]
    assert trained(stepper) == trained(plain)
    assert same(plain, stepper)


def test_nothing_is_said_where_nothing_is_to_choose(
    here: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper, unsteady = made(), Steady()
    unsteady.steady = False
    stepper.objective = unsteady  # pyright: ignore[reportAttributeAccessIssue] - as much of one as a step needs
    assert not chosen(stepper, launching=1.0, whole=1.0)
    monkeypatch.undo()  # no GPU
    assert not chosen(made(), launching=1.0, whole=1.0)
    assert here.messages == []


def several_ranks(stepper: Stepper) -> None:
    stepper.council.alone = False


def another_exchange(stepper: Stepper) -> None:
    stepper.exchange = type("Other", (Alone,), {})(stepper.parameters)


def watched(stepper: Stepper) -> None:
    stepper.watch = GradientWatch(1)


def printed(stepper: Stepper) -> None:
    stepper.prints = Prints(dict(stepper.model.named_parameters()), {})


def checkpointed(stepper: Stepper) -> None:
    stepper.model.checkpointing = True  # pyright: ignore[reportArgumentType] - a flag of ours


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (several_ranks, "ranks"), (another_exchange, "ranks"), (watched, "watched"), (printed, "fingerprints"),
        (checkpointed, "computed again"), (lambda _: None, ""),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded(change: Callable[[Stepper], None], reason: str) -> None:
    stepper, batches = made(), [make_batch(ROWS, seed=0)]
    change(stepper)
    found = obstacle(stepper, batches, compiles=True)
    assert reason in found
    assert bool(found) == bool(reason)


def test_what_else_cannot_be_recorded(here: pytest.LogCaptureFixture) -> None:
    batch = make_batch(ROWS, seed=0)
    assert "armed" in obstacle(made(fault="nan_grad@step=1"), [batch], compiles=True)
    assert "compile" in obstacle(made(), [batch], compiles=False)
    assert "several" in obstacle(made(), [batch, batch], compiles=True)
    assert "fp32" in obstacle(made(optimizer_states="bf16"), [batch], compiles=True)
    assert not chosen(made(), launching=1.0, whole=1.0, compiles=False)
    assert here.messages == ["step: kernel by kernel (model.compile is off)"]
