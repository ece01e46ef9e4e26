"""Whole steps as one CUDA graph on a real GPU: the bits of plain steps, bad steps, what lies between, memory, speed.

On a machine without pytest-timeout: pytest -c /dev/null --rootdir=. -s tests/gpu/test_cuda_graph.py
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config.load import load
from lockstep.contracts import Batch, StepRecord
from lockstep.engine import graphs
from lockstep.engine.build import assemble, plan
from lockstep.engine.graphs import StepGraph
from lockstep.engine.parts import Parts
from lockstep.engine.train import rehearse, train
from lockstep.errors import NonFiniteError
from lockstep.health.finding import from_json
from lockstep.models.embedding import SummedRows, sum_table
from lockstep.rundir import RunDir
from lockstep.runtime import determinism
from lockstep.runtime.signals import StopRequest
from tests.gates.training import Recorder, flags, run
from tests.gpu.ready import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
CUDA = torch.device("cuda")
ALWAYS, NEVER = 0.0, 9.0  # of a step that launching has to take
SHORT: dict[str, Any] = {  # the documented dropout, validation, walks and saves included
    "system.device": "cuda", "training.max_steps": 50, "training.gen_episodes": 3, "training.gen_interval": 20,
    "training.eval_interval": 10, "training.save_interval": 25, "debug.digest_interval": 1, "data.num_workers": 1,
}  # fmt: skip
REGIONS = {"model.compressed": True, "model.region": 30, "model.dynamics": True}
AD: dict[str, Any] = {  # ad_dr with histories that are collected in seconds
    "system.device": "cuda", "data.alg": "PSRL", "data.n_stream": 50, "data.train_n_stream": 50,
    "data.total_source_timesteps": 20000, "data.train_source_timesteps": 400, "training.gen_episodes": 0,
    "training.eval_interval": 0, "training.save_interval": 0, "report.sample_prompt": "",
}  # fmt: skip
DUE_SECONDS = 240 / 50_000  # of a step


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.cuda.empty_cache()


@contextmanager
def repeating(*, deterministic: bool = True) -> Iterator[None]:
    with determinism.mode(CUDA, deterministic=deterministic, threads=0):
        yield


@contextmanager
def forced(least: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "LAUNCH_BOUND", least)
        yield


def ran(folder: Path, settings: Mapping[str, Any], least: float, *, family: str = "ad", **how: Any) -> Recorder:
    """A run with graphs or without, of which the recorder tells."""
    with repeating(), forced(least):
        parts, found = run(folder, {**settings, "system.deterministic": True}, family=family, **how)
    assert (parts.stepper.graph is not None) == (least == ALWAYS)
    return found


@contextmanager
def ready(
    folder: Path, settings: Mapping[str, Any], *, family: str = "ad", preset: str = "tiny", least: float = ALWAYS
) -> Iterator[Parts]:
    """A run that has rehearsed and is about to begin."""
    loaded = load(family, preset=preset, flags=flags(settings))
    planned = plan(loaded, CUDA)
    assembled = assemble(planned, RunDir(folder), point=None, sinks=[], stop=StopRequest(), group=None)
    try:
        with forced(least):
            rehearse(assembled.parts, planned)
        yield assembled.parts
    finally:
        assembled.loader.close()


def state(parts: Parts) -> list[Tensor]:
    """As words: NaN is then equal to itself."""
    stepper = parts.stepper
    moments = [each for kept in stepper.optimizer.moments().values() for each in kept.values()]
    kept = [*stepper.model.parameters(), *moments, stepper.optimizer.applied]
    return [tensor.detach().clone().view(torch.int32) for tensor in kept]


# ------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    ("precision", "shape"), [("bf16", {}), ("fp16", {}), ("fp32", {}), ("bf16", REGIONS)],
    ids=["bf16", "fp16", "fp32", "compressed"],
)  # fmt: skip
def test_a_graph_has_the_bits_of_plain_steps_and_so_has_what_goes_on(
    tmp_path: Path, precision: str, shape: dict[str, Any]
) -> None:
    settings = {**SHORT, **shape, "training.precision": precision, "data.data_path": tmp_path / "data"}
    graph, plain = (ran(tmp_path / str(least), settings, least).trace for least in (ALWAYS, NEVER))
    assert len(graph) == 50
    assert graph == plain
    point = tmp_path / str(ALWAYS) / "checkpoints" / "step_00000025"
    for least in (ALWAYS, NEVER):
        rest = ran(tmp_path / f"rest{least}", settings, least, point=point)
        assert rest.trace == graph[25:]
    point = tmp_path / str(NEVER) / "checkpoints" / "step_00000025"
    assert ran(tmp_path / "begun plainly", settings, ALWAYS, point=point).trace == graph[25:]
    other = ran(tmp_path / "other", {**settings, "system.seed": 1, "training.max_steps": 2}, ALWAYS)
    assert other.trace[0] != graph[0]  # the control


def test_what_lies_between_steps_does_not_disturb_them(tmp_path: Path) -> None:
    """Validation, walks, saves and looking at each step; against none of it, one step always in flight."""
    quiet = {"training.gen_episodes": 0, "training.eval_interval": 0, "training.save_interval": 0}
    settings = {**SHORT, "training.max_steps": 40, "data.data_path": tmp_path / "data"}
    busy = ran(tmp_path / "busy", {**settings, "training.eval_interval": 3, "training.gen_interval": 5}, ALWAYS)
    still = ran(tmp_path / "still", {**settings, **quiet, "debug.digest_interval": 40}, ALWAYS)
    assert [each[:4] for each in busy.trace] == [each[:4] for each in still.trace]
    assert busy.trace[-1][4] == still.trace[-1][4]
    assert still.trace[-1][4]


def test_a_recording_that_fails_leaves_plain_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator must still draw, the streams still compute."""
    settings = {**SHORT, "training.max_steps": 20, "data.data_path": tmp_path / "data"}
    expected = ran(tmp_path / "plain", settings, NEVER).trace
    work = StepGraph._work

    def waits(self: StepGraph) -> Tensor:
        values = work(self)
        values.sum().item()
        return values

    monkeypatch.setattr(StepGraph, "_work", waits)
    with repeating(), forced(ALWAYS):
        parts, found = run(tmp_path / "failed", {**settings, "system.deterministic": True}, family="ad")
    assert parts.stepper.graph is None
    assert found.trace == expected


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_the_gradient_of_a_small_table(precision: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    ids = torch.randint(45, (64, 240, 5), device=CUDA, generator=generator)
    ids[..., 4] = 44  # what nearly every token looks up
    weight = torch.randn(45, 64, device=CUDA, dtype=precision, generator=generator).requires_grad_()
    weighing = torch.randn(64, 240, 64, device=CUDA, dtype=precision, generator=generator)
    found, expected = SummedRows.apply(ids, weight), F.embedding(ids, weight.double()).sum(-2)
    assert isinstance(found, Tensor)
    (got,) = torch.autograd.grad((found * weighing).sum(), weight)
    (wanted,) = torch.autograd.grad((expected * weighing.double()).sum(), weight)
    assert float((got - wanted).norm() / wanted.norm()) < (1e-6 if precision == torch.float32 else 1e-13)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_compiled_table_is_of_fp32(precision: torch.dtype) -> None:
    """Not of what autocast lets the blocks multiply, in which large sums have few digits, or are infinite."""
    generator = torch.Generator(CUDA).manual_seed(2)
    ids = torch.randint(45, (64, 240, 5), device=CUDA, generator=generator)
    table = sum_table(45, 64).to(CUDA)
    weighing = torch.randn(64, 240, 64, device=CUDA, generator=generator) * 65536
    with torch.no_grad():
        table.weight.normal_(generator=generator)
    (wanted,) = torch.autograd.grad((F.embedding(ids, table.weight).sum(-2) * weighing).sum(), table.weight)
    table.compile(fullgraph=True)
    with torch.autocast("cuda", dtype=precision):
        found = table(ids)
    (got,) = torch.autograd.grad((found * weighing).sum(), table.weight)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


# -------------------------------------------------------------------------------------------------------- bad steps


class Poisoner(Recorder):
    """Spoils a weight when it hears of step 5."""

    def write(self, record: StepRecord) -> None:
        super().write(record)
        if record.step == 5 and self.parts:
            dict(self.parts.stepper.model.named_parameters())["layers.1.mlp.w2.weight"].data[3, 4] = math.nan


def test_a_weight_that_is_not_finite_ends_the_run_and_is_named(tmp_path: Path) -> None:
    settings = {**SHORT, "data.data_path": tmp_path / "data"}
    recorder = Poisoner()
    with pytest.raises(NonFiniteError) as caught:
        ran(tmp_path / "run", settings, ALWAYS, recorder=recorder)
    assert recorder.parts
    assert recorder.parts.stepper.graph is not None
    finding = from_json(caught.value.finding)
    assert finding.place
    assert (finding.place.phase, finding.place.module) == ("weights", "layers.1.mlp.w2")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_bad_step_changes_nothing(tmp_path: Path, precision: str) -> None:
    settings = {**SHORT, "training.precision": precision, "data.data_path": tmp_path / "data"}
    with ready(tmp_path / "run", settings) as parts:
        stepper = parts.stepper
        assert stepper.graph is not None
        before = state(parts)
        for step in range(25):  # fp16 first finds its scale
            reading = stepper.launch(step, next(parts.batches)).read()
            assert math.isfinite(reading.loss)
        moved = state(parts)
        assert not all(map(torch.equal, moved, before))  # the control: a good step changes something
        with torch.no_grad():
            stepper.model.get_parameter("norm.weight")[0] = math.nan
        before, batches = state(parts), next(parts.batches)
        pending = [stepper.launch(25, batches), stepper.launch(26, next(parts.batches))]
        assert [each.read().fatal for each in pending] == [True, True]
        assert all(map(torch.equal, state(parts), before))
        assert math.isnan(stepper.again(25, batches, stepper.agree(batches)).item())
        with torch.no_grad():
            stepper.model.get_parameter("norm.weight")[0] = 1.0
        assert math.isfinite(stepper.again(25, batches, stepper.agree(batches)).item())
        stepper.halted.zero_()
        assert math.isfinite(stepper.launch(27, next(parts.batches)).read().loss)


# --------------------------------------------------------------------------------------------- no sync, memory, speed


def test_a_replay_does_not_wait_for_the_gpu_and_takes_no_memory(tmp_path: Path) -> None:
    with ready(tmp_path / "run", {**SHORT, "data.data_path": tmp_path / "data"}) as parts:
        stepper = parts.stepper
        assert stepper.graph is not None
        used = list[tuple[int, int]]()
        for step in range(250):
            batches = next(parts.batches)
            with no_waiting() if step == 100 else contextlib.nullcontext():
                pending = stepper.launch(step, batches)
            if step in (50, 249):
                pending.read()
                used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert used[0] == used[1]


class Watch:
    """A sink that notes when it hears of a step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def write(self, record: StepRecord) -> None:
        self.times.append(time.perf_counter())

    def event(self, kind: str, fields: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def paced(folder: Path, settings: Mapping[str, Any], least: float, *, steps: int = 600) -> float:
    """Seconds of a step, all included, as the command trains: loader, records, TensorBoard, log."""
    torch.compiler.reset()
    watch = Watch()
    given = {
        **AD, **settings, "training.max_steps": steps, "data.data_path": folder / "data", "run.out": folder / "runs",
        "run.name": f"{len(list((folder / 'runs').glob('*')))}",
    }  # fmt: skip
    with forced(least):
        train(load("ad", preset="ad_dr", flags=flags(given)), [watch])
    return (watch.times[-1] - watch.times[100]) / (len(watch.times) - 101)


def test_the_documented_agent_trains_in_four_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 wide, 4 layers, 240 transitions, batch 512, dropout 0.1 of both kinds, a target at every position."""
    table: dict[str, dict[str, Any]] = {
        "as it is": {},
        "native_flash": {"model.attention_backend": "native_flash"},
        "deterministic": {"system.deterministic": True},
        "no dropout": {"model.dropout": 0, "model.attention_dropout": 0},
    }
    found = {
        (name, least): paced(tmp_path, settings, least)
        for (name, settings), least in itertools.product(table.items(), (ALWAYS, NEVER))
    }
    auto = paced(tmp_path, {}, graphs.LAUNCH_BOUND)
    lines = [f"  auto: {1e3 * auto:.2f} ms = 50,000 steps in {auto * 50_000 / 60:.1f} minutes"]
    for name in table:
        graph, plain = found[name, ALWAYS], found[name, NEVER]
        lines.append(f"  {name}: graph {1e3 * graph:.2f} ms ({1 / graph:.0f}/s), plain {1e3 * plain:.2f} ms")
    with capsys.disabled():
        print("", f"AD, {torch.cuda.get_device_name()}", *lines, sep="\n")
    assert found["as it is", ALWAYS] < 1.05 * found["as it is", NEVER]
    if "H200" in torch.cuda.get_device_name():
        assert auto <= DUE_SECONDS
    assert found["deterministic", ALWAYS] <= 1.1 * found["as it is", ALWAYS]  # nearly as fast


@pytest.mark.parametrize("deterministic", [False, True])
def test_where_the_time_of_a_step_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str], deterministic: bool) -> None:
    """Printed: what launching takes, and the kernels of a graph by their time."""
    settings = {**AD, "system.deterministic": deterministic, "data.data_path": tmp_path / "data"}
    with (
        repeating(deterministic=deterministic),
        ready(tmp_path / "run", settings, preset="ad_dr", least=NEVER) as parts,
    ):
        stepper, launching = parts.stepper, parts.stepper.rehearsed
        batches: list[Batch] = next(parts.batches)
        stepper.graph = StepGraph(stepper, batches[0], graphs.CudaRecording)
        for step in range(10):
            stepper.launch(step, batches).read()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            flying = [stepper.launch(step, batches) for step in range(20)]
            flying[-1].read()
        began = time.perf_counter()
        flying = [stepper.launch(step, batches) for step in range(100)]
        launched = time.perf_counter() - began
        flying[-1].read()
        took = time.perf_counter() - began
    kernels = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    with capsys.disabled():
        print(f"\nplain: launching {1e3 * launching[0]:.2f} ms of {1e3 * launching[1]:.2f}; graph: {10 * took:.2f} ms")
        print(f"  of which the host {10 * launched:.2f} ms; all kernels together {total / 20e3:.2f} ms")
        for each in kernels[:25]:
            print(f"  {each.self_device_time_total / 20e3:7.3f} ms {each.count / 20:6.1f} x {each.key[:100]}")
    assert total > 0
