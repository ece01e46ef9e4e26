"""`model.compile: auto` on a pretended GPU: a clock decides, the cache remembers, a checkpoint wins; then runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config.load import load, to_dict
from lockstep.engine import compile_choice, fitting, shortage
from lockstep.engine.build import Plan, make_objective
from lockstep.engine.compile_choice import SLOWER, Chooser
from lockstep.engine.train import as_found
from lockstep.errors import Stopped
from lockstep.models import block_timing, build, shapes
from lockstep.models.block_timing import BlockWork
from lockstep.models.build import compile_blocks
from lockstep.objectives.mlm import Mlm
from lockstep.rundir import RunDir
from lockstep.runtime import env, gpu_clock, hardware, measured, signals
from lockstep.runtime.group import Group
from tests.gates.training import flags, run

CARD = "NVIDIA Fake"
FAST = {True: 12.3, False: 17.8}  # compiled -> milliseconds
SLOW = {True: 17.8, False: 12.3}
ON = "compile: on (auto; a block takes 12.3 ms, 17.8 as it is; measured {})"
OFF = "compile: off (auto; a block takes 12.3 ms, 17.8 compiled; measured {})"


@dataclass
class Gpu:
    """What is pretended: how long a block takes, what fails, how much memory is free, and what was timed."""

    times: dict[bool, float] = field(default_factory=lambda: dict(FAST))
    failing: dict[bool, Exception] = field(default_factory=dict[bool, Exception])
    free: int = 140 << 30
    timed: list[tuple[bool, BlockWork]] = field(default_factory=list[tuple[bool, BlockWork]])


class Ranks(Group):
    """This rank and another one, with what that one says; `told` is what rank 0 has done for all, if not we."""

    def __init__(self, others: bool = True, *, told: list[Any] | None = None) -> None:
        super().__init__()
        self.others, self.told, self.asked = others, told, 0

    def gather(self, value: Any) -> list[Any]:
        return [value, self.others]

    def together(self, action: Callable[[], Any]) -> Any:
        self.asked += 1
        return action() if self.told is None else self.told.pop(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    pretend = Gpu()

    def milliseconds(work: BlockWork, _device: torch.device, *, compiled: bool) -> float:
        pretend.timed.append((compiled, work))
        if compiled in pretend.failing:
            raise pretend.failing[compiled]
        return pretend.times[compiled]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(block_timing, "milliseconds", milliseconds)
    monkeypatch.setattr(hardware, "total_memory_bytes", lambda _: 140 << 30)
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _: pretend.free)
    return pretend


def planned(settings: dict[str, Any], family: str = "llama") -> Plan:
    usual = {"training.precision": "bf16", "training.batch_size": 8, "data.num_workers": 0}
    preset = {"llama": "production"}.get(family, "tiny")
    config = load(family, preset=preset, flags=flags({**usual, **settings})).config
    shape = shapes.resolve(config.model, context_length=config.training.context_length)
    return Plan(config, torch.device("cuda"), shape, make_objective(config), "")


def choose(
    saved: dict[str, Any] | None = None,
    *,
    family: str = "llama",
    group: Group | None = None,
    facts: dict[str, Any] | None = None,
    hooks: bool = False,
    **settings: Any,
) -> tuple[bool, str]:
    plan = planned(settings, family)
    config = plan.config
    about = {"device_name": CARD, "config": to_dict(config), "versions": {"torch": "2.13.0"}}
    known = {
        "device_type": "cuda", "debug": config.debug.enabled, "deterministic": bool(config.system.deterministic),
        "dtype_name": config.training.precision, "attention": "cudnn", "documents_apart": False,
        "checkpointing": config.system.gradient_checkpointing, "sharded": False, **(facts or {}),
    }  # fmt: skip
    options = config.model.model_copy(update={"compile": "off"}) if hooks else config.model
    return Chooser(plan, group or Group(), saved or {}, about)(options, **known)


def test_the_clock_decides_and_the_figures_are_told(gpu: Gpu) -> None:
    assert choose() == (True, ON.format("now"))
    (compiled, work), (plain, same) = gpu.timed
    assert (compiled, plain, same) == (True, False, work)
    assert (work.rows, work.length) == (4, 8192), "at most 32,768 tokens are timed"
    assert (work.dtype_name, work.attention, work.shape.hidden_size) == ("bf16", "cudnn", 4096)
    gpu.times = dict(SLOW)
    assert choose() == (True, ON.format(measured.today())), "as kept: nothing is timed again"
    assert len(gpu.timed) == 2
    assert choose(**{"training.context_length": 4096}) == (False, OFF.format("now")), "another shape is timed anew"
    assert choose(**{"training.context_length": 4096}) == (False, OFF.format(measured.today()))
    assert len(gpu.timed) == 4
    assert gpu.timed[-1][1].rows == 8


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"training.precision": "fp16"}, {}), ({"model.dropout": 0.1}, {}), ({"training.batch_size": 2}, {}),
        ({"model.hidden_size": 2048}, {}), ({}, {"attention": "native_flash"}), ({}, {"documents_apart": True}),
        ({}, {"sharded": True}), ({}, {"checkpointing": True}),
    ],
)  # fmt: skip
def test_figures_are_kept_for_what_they_were_taken_of(
    gpu: Gpu, settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    choose()
    assert choose(**{"model.num_layers": 2})[1] == ON.format(measured.today()), "control: known"
    assert choose(facts=facts, **settings)[1] == ON.format("now")


@pytest.mark.parametrize(("compiled", "chosen"), [(10 * SLOWER - 0.01, True), (10 * SLOWER + 0.01, False)])
def test_what_is_hardly_slower_is_compiled(gpu: Gpu, compiled: float, chosen: bool) -> None:
    gpu.times = {True: compiled, False: 10.0}
    assert choose()[0] is chosen


def test_without_the_compiler_it_must_fit(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.times = dict(SLOW)
    gpu.free = 20 << 30
    line = "compile: on (auto; a block takes 17.8 ms, 12.3 as it is, for which there is too little memory; measured {})"
    assert choose() == (True, line.format("now"))
    gpu.free = 200 << 30
    assert choose() == (False, OFF.format(measured.today())), "the figures are kept, the choice is not"
    assert choose(group=Ranks(others=False))[0], "another rank has too little"
    assert not choose(group=Ranks(others=True))[0]
    needs: list[bool] = []
    estimate = fitting.memory_estimate
    monkeypatch.setattr(
        fitting, "memory_estimate", lambda *args, compiled, **more: needs.append(compiled) or estimate(
            *args, compiled=compiled, **more)
    )  # fmt: skip
    choose()
    assert needs == [False], "the estimate is of what would run"


@pytest.mark.parametrize("failing", [{True}, {False}, {True, False}])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory\nmore"), TypeError(), OSError("no ptxas")]
)
def test_a_timing_that_fails_ends_nothing(
    gpu: Gpu, failing: set[bool], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.times = dict(SLOW)
    gpu.failing = dict.fromkeys(failing, error)
    told = f"compile: off (auto; a block takes {SLOW[False]:.3g} ms, and could not be compiled; measured now)"
    assert choose() == ((False, told) if failing == {True} else (True, "")), "else as without a clock"
    assert len(caplog.messages) == len(failing)
    said = (str(error).splitlines() or ["TypeError"])[0]
    assert all(text.startswith("compile: ") and text.endswith(f"was not timed: {said}") for text in caplog.messages)
    gpu.failing = {}
    assert choose() == (False, OFF.format("now")), "nothing was kept"


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        ({"system.deterministic": True}, {}, True),
        ({"system.deterministic": "canonical"}, {}, True),
        ({"training.precision": "fp8"}, {}, True),
        ({"training.precision": "fp8-rowwise"}, {}, True),
        ({"debug.enabled": True}, {}, False),
        ({"model.compile": "on"}, {}, True),
        ({"model.compile": "off"}, {}, False),
        ({}, {"device_type": "cpu"}, False),
    ],
)
def test_where_no_clock_decides(gpu: Gpu, settings: dict[str, Any], facts: dict[str, Any], expected: bool) -> None:
    gpu.times = dict(SLOW if expected else FAST)
    assert choose(facts=facts, **settings) == (expected, "")
    assert gpu.timed == []
    assert choose()[0] is not expected, "control: else it does"


def test_an_agent_whose_step_may_be_one_graph_is_compiled(gpu: Gpu) -> None:
    gpu.times = dict(SLOW)
    assert choose(family="ad", **{"training.precision": "fp32"}) == (True, "")
    assert gpu.timed == []
    for family in ("mlm", "llada"):
        assert choose(family=family) == (False, OFF.format("now"))


def test_a_small_encoder_is_timed_although_its_step_may_be_one_graph(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.times = dict(SLOW)
    monkeypatch.setattr(Mlm, "steady", True)
    assert choose(family="mlm") == (False, OFF.format("now"))


def saved_by(compiled: Any, **about: Any) -> dict[str, Any]:
    config = {"system": {"deterministic": False}, "debug": {"enabled": False}, "training": {"precision": "bf16"}}
    return {"device_name": CARD, "compiled": compiled, "config": config, **about}


def signalled(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return torch.add


def compiling() -> Any:
    return torch.compile(torch.square, backend=signalled)(torch.ones(2))


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize("when", [signalled, compiling])
def test_who_is_asked_to_stop_while_it_measures_stops(
    gpu: Gpu, when: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also inside the compiler, which takes every error for its own."""
    monkeypatch.setattr(block_timing, "milliseconds", lambda *_, **__: when())
    with signals.listening(), pytest.raises(Stopped, match="SIGTERM"):
        choose()
    assert not (tmp_path / "lockstep").exists(), "nothing was kept"


def test_what_is_said_of_memory_is_of_what_runs(gpu: Gpu, tmp_path: Path) -> None:
    """Should there be too little of it in a step: as was found, and not as `auto` is by rule."""
    plan = planned({"model.num_layers": 1})
    needs = {
        compiled: fitting.memory_estimate(plan.config, plan.shape, compiled=compiled) for compiled in (True, False)
    }
    assert needs[False].total > needs[True].total, "control"
    for compiled, need in needs.items():
        assembled: Any = SimpleNamespace(built=SimpleNamespace(compiled=compiled))
        found = as_found(RunDir(tmp_path), plan, assembled, first=True)
        assert shortage.work_of(found, env.detect()).need() == need


def test_a_run_that_goes_on_stays_as_it_was(gpu: Gpu) -> None:
    assert choose(saved_by(False)) == (False, "compile: off (auto; as in the checkpoint)")
    assert choose(saved_by(True)) == (True, "compile: on (auto; as in the checkpoint)")
    gpu.times, gpu.free = dict(SLOW), 0
    assert choose(saved_by(False)) == (False, "compile: off (auto; as in the checkpoint)"), "it did fit"
    assert gpu.timed == []
    gpu.free = 140 << 30
    usual = saved_by(False)["config"]
    watched, repeated = usual | {"debug": {"enabled": True}}, usual | {"system": {"deterministic": True}}
    finer = usual | {"training": {"precision": "fp16"}}
    gpu.times = dict(FAST)
    for other in (
        saved_by(False, device_name="another"), saved_by(None), saved_by("no"), saved_by(False, config=watched),
        saved_by(False, config=repeated), saved_by(False, config=finer), {},
    ):  # fmt: skip
        assert choose(other)[0], "measured"
    assert choose(saved_by(False), **{"model.compile": "on"}) == (True, ""), "what is named is done"
    assert choose(saved_by(False), **{"training.precision": "fp8"}) == (True, ""), "float8 is slow without"
    then = saved_by(False, config=repeated)
    assert choose(then, **{"system.deterministic": True})[0] is False, "its bits are to stay what they were"


def test_all_ranks_do_what_the_first_has_found(gpu: Gpu) -> None:
    figures = [{"compiled": 17.8, "plain": 12.3}, "now"]
    assert choose(group=Ranks(told=[None, figures])) == (False, OFF.format("now"))
    assert choose(group=Ranks(told=[True])) == (True, "compile: on (auto; as in the checkpoint)")
    assert gpu.timed == [], "they time nothing"
    group = Ranks()
    assert choose(group=group, hooks=True) == (False, ""), "hooks are not seen in compiled blocks"
    assert group.asked == 2, "the others wait for what this rank says"
    assert len(gpu.timed) == 2


# ------------------------------------------------------------------------------------------------------- real runs

TINY: dict[str, Any] = {
    "training.max_steps": 4, "model.dropout": 0.1, "debug.digest_interval": 1, "data.num_workers": 0,
    "training.batch_size": 4, "training.grad_accum_nums": 2, "training.save_interval": 2, "training.eval_interval": 0,
    "training.context_length": 32, "training.eval_batches": 1,
}  # fmt: skip


@dataclass
class Runs:
    """Runs on the CPU that take it for a GPU: the compiler makes graphs, which are computed as they are."""

    folder: Path
    times: dict[bool, float]
    timed: list[bool] = field(default_factory=list[bool])

    def bits(self, name: str, point: Path | None = None, **settings: Any) -> tuple[list[Any], Any]:
        build.forget_compiled()
        parts, recorder = run(self.folder / name, {**TINY, **settings}, point=point)
        return [(each.step, each.loss.hex(), each.digest) for each in recorder.records], parts


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> Runs:
    found, usual, milliseconds = Runs(tmp_path, dict(FAST)), build.compiles, block_timing.milliseconds

    def compiled(model: Any, device: torch.device, *, sharded: bool) -> None:
        compile_blocks(model, device, sharded=sharded, backend="eager")

    def timed(work: BlockWork, device: torch.device, *, compiled: bool) -> float:
        milliseconds(replace(work, rows=1), device, compiled=compiled)  # of fewer rows, as large micro-batches are
        found.timed.append(compiled)
        return found.times[compiled]

    def as_on_a_gpu(options: Any, **facts: Any) -> tuple[bool, str]:
        return usual(options, **{**facts, "device_type": "cuda"})

    def clock(work: Callable[[], object], *, in_a_row: int) -> float:
        for _ in range(in_a_row):
            work()
        return 1.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_clock, "milliseconds", clock)
    monkeypatch.setattr(block_timing, "milliseconds", timed)
    monkeypatch.setattr(block_timing, "compile_blocks", compiled)
    monkeypatch.setattr(build, "compile_blocks", compiled)
    monkeypatch.setattr(compile_choice.build, "compiles", as_on_a_gpu)
    return found


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize(("times", "given"), [(FAST, "on"), (SLOW, "off")])
def test_bits_are_those_of_a_run_that_was_given_what_was_found(
    runs: Runs, times: dict[bool, float], given: str
) -> None:
    """A block of other rows was compiled, with dropout: no trace of it. And a resumed run goes on bit for bit."""
    runs.times = dict(times)
    found, parts = runs.bits("auto")
    assert runs.timed == [True, False]
    assert parts.about["compiled"] is (given == "on")
    assert any(block._compiled_call_impl is not None for block in parts.stepper.model.layers) is (given == "on")
    plain, _ = runs.bits("given", **{"model.compile": given})
    assert found == plain
    assert runs.bits("again")[0] == found, "the second start"
    runs.times = {compiled: 1.0 + compiled * (given == "on") for compiled in (True, False)}
    (runs.folder / "cache" / "lockstep" / "measured.json").unlink()
    resumed, later = runs.bits("resumed", runs.folder / "auto" / "checkpoints" / "step_00000002")
    assert resumed == found[2:]
    assert later.about["compiled"] is (given == "on"), "as in the checkpoint, whatever a clock would say now"
    assert runs.timed == [True, False], "measured once"
    other, _ = runs.bits("other", **{"system.seed": 9, "model.compile": given})
    assert other != found, "control: bits that tell"
