"""Algorithm Distillation on a real GPU: kernels compute what the plain maths does, bits repeat, walks are the CPU's.

Posterior sampling is collected to the same bytes as on a CPU; PPO, which multiplies floats, to the same curve.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine.collect import Collection, collect, plan
from lockstep.engine.histories import terms
from lockstep.engine.history_files import read_hdf5
from lockstep.engine.walks import Journey, follow, walk
from lockstep.learners import draws
from lockstep.learners.posterior import Posterior
from lockstep.learners.ppo import PPO
from lockstep.models.agent import Agent
from lockstep.models.build import Built, build
from lockstep.models.options import AgentOptions
from lockstep.models.shapes import resolve
from lockstep.objectives.distill import Distill
from lockstep.runtime import determinism
from lockstep.runtime.precision import Precision
from lockstep.worlds import darkroom, darkroompermuted, key_door
from lockstep.worlds.observed import Histories
from tests.engine.walkers import small_agent
from tests.gates.training import losses, run
from tests.gpu.ready import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ACCURACY = {"fp32": 1e-4, "bf16": 6e-2, "fp16": 2e-2}
ROWS, LENGTH = 16, 208  # two regions of 80 steps and one of 48: blocks of 96 and of 56 tokens
ROOM = darkroom.build(size=5, horizon=10)
COMPRESSED = {"compressed": True, "region": 80, "summary_tokens": 8, "dynamics": True}
SHAPES = {"plain": {}, "compressed": COMPRESSED}
SHORT = {
    "system.device": "cuda", "training.max_steps": 30, "training.gen_episodes": 3, "training.gen_interval": 10,
    "training.save_interval": 10, "debug.digest_interval": 1, "data.num_workers": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def made(precision: str, *, deterministic: bool = False, device: torch.device = CUDA, **values: Any) -> Built:
    options = AgentOptions.model_validate(
        {"model_path": "lockstep/ad", "init_std": 0.2, "dropout": 0.0, "attention_dropout": 0.0, **values}
    )
    shape = resolve(options, context_length=LENGTH)
    return build(
        options, shape, device=device, dtype_name=precision, seed=5, checkpointing=False,
        deterministic=deterministic, debug=False,
    )  # fmt: skip


def learnt(length: int = 260) -> Histories:
    tasks = torch.arange(2 * ROOM.tasks) % ROOM.tasks
    history = Posterior().run(ROOM, tasks, draws.keys(tasks, torch.arange(len(tasks)), seed=1), steps=length)
    steps = np.stack([column.numpy() for column in history])
    return Histories(steps, size=ROOM.size, horizon=ROOM.horizon, actions=5, region=80)


def objective(built: Built, histories: Histories | None = None) -> Distill:
    class Config:
        model = AgentOptions()

    shape: Any = built.model.shape
    also = terms(Config, shape)  # pyright: ignore[reportArgumentType]
    return Distill().with_histories(histories or learnt(), length=LENGTH, terms=also)


def batch(objective: Distill, step: int = 0, rows: int = ROWS, device: torch.device = CUDA) -> Batch:
    ids = np.arange(step * 7, step * 7 + rows) % (2 * ROOM.tasks)
    return objective.collate(Rows(ids, ids * 0, ids, {"histories": ids[:, None]}), Draw(3, step, rows)).to(device)


def total(built: Built, learning: Distill, precision: str, *, step: int = 0, rows: int = ROWS) -> Tensor:
    device = next(built.model.parameters()).device
    with Precision(precision, device).context():
        found = learning.loss(built.model, batch(learning, step, rows, device))
    return torch.stack([found[term].double() for term in learning.terms]).sum()


def computed(built: Built, precision: str, *, learning: Distill | None = None, **where: Any) -> tuple[float, Tensor]:
    loss = total(built, learning or objective(built), precision, **where)
    gradients = torch.autograd.grad(loss, list(built.model.parameters()))
    return float(loss.detach()), torch.cat([gradient.flatten().double().cpu() for gradient in gradients])


def error(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> float:
    return float((found[1] - expected[1]).norm() / expected[1].norm())


@contextmanager
def repeating() -> Iterator[None]:
    with determinism.mode(CUDA, deterministic=True, threads=0):
        yield


# ------------------------------------------------------------------------------------------------------- one step


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("precision", "compiled", "deterministic", "kernel"),
    [("fp32", "on", False, "flex"), ("fp32", "off", False, "flex"), ("bf16", "on", False, "cudnn"),
     ("bf16", "on", True, "flex"), ("bf16", "off", False, "cudnn"), ("fp16", "on", False, "cudnn")],
)  # fmt: skip
def test_kernels_compute_what_the_plain_maths_does(
    shape: str, precision: str, compiled: str, deterministic: bool, kernel: str
) -> None:
    plain = made("fp64", device=CPU, attention_backend="native_math", compile="off", **SHAPES[shape])
    built = made(precision, deterministic=deterministic, compile=compiled, **SHAPES[shape])
    assert built.attention == kernel
    for step, rows in ((0, ROWS), (1, ROWS), (2, 5)):  # and a batch of another size
        expected = computed(plain, "fp64", step=step, rows=rows)
        assert error(computed(built, precision, step=step, rows=rows), expected) < ACCURACY[precision]
    poor = learnt()
    poor.steps[2] = 0  # the control: what was paid is not seen
    assert error(computed(plain, "fp64", learning=objective(plain, poor), step=2, rows=5), expected) > 0.13
    with torch.no_grad(), Precision(precision, CUDA).context():  # without gradients: other kernels
        learning = objective(built)
        sums = learning.evaluate(built.model.eval(), batch(learning, 2, 5))
    judged = objective(plain).evaluate(plain.model.eval(), batch(learning, 2, 5, CPU))
    for name, part in sums.items():
        if "loss" in name:
            assert float(part.total) == pytest.approx(float(judged[name].total), rel=ACCURACY[precision])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_does_not_wait_for_the_gpu(shape: str) -> None:
    built = made("bf16", compile="on", **SHAPES[shape])
    learning = objective(built)
    parts = [batch(learning, step) for step in range(3)]
    parameters = list(built.model.parameters())

    def step(part: Batch) -> None:
        with Precision("bf16", CUDA).context():
            sums = learning.loss(built.model, part)
        torch.autograd.grad(torch.stack([sums[term] for term in learning.terms]).sum(), parameters)

    step(parts[0])
    step(parts[1])
    with no_waiting():
        step(parts[2])
        with pytest.raises(RuntimeError, match="synchroniz"):
            parts[2].tensors["starts"].sum().item()  # the control


@pytest.mark.parametrize("drops", [{}, {"dropout": 0.1, "attention_dropout": 0.2}], ids=["whole", "dropping"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_again(shape: str, drops: dict[str, Any]) -> None:
    with repeating():
        built = made("bf16", deterministic=True, compile="on", **SHAPES[shape], **drops)
        learning, found = objective(built), list[tuple[float, Tensor]]()
        for step in (4, 4, 4, 5):
            determinism.reseed(CUDA, 1, step, 0)
            found.append(computed(built, "bf16", learning=learning))
    assert found[0][0] == found[1][0] == found[2][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1], found[2][1])
    assert torch.equal(found[0][1], found[3][1]) == (not drops)  # the control: other noise


def test_narrow_heads_train() -> None:
    """Of 4 numbers: below what flex attention takes, and no multiple of 8."""
    for deterministic in (False, True):
        built = made("bf16", deterministic=deterministic, num_attention_heads=16, compile="on")
        assert built.attention == "native_math"
        plain = made("fp64", device=CPU, num_attention_heads=16, compile="off")
        assert error(computed(built, "bf16"), computed(plain, "fp64")) < ACCURACY["bf16"]


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_learns(tmp_path: Path, shape: str, precision: str) -> None:
    """Dropout as documented, validation and walks included; and as on a CPU, as far as noise allows."""
    regions = {"model.compressed": True, "model.region": 30, "model.dynamics": True} if shape == "compressed" else {}
    settings = {**SHORT, **regions, "training.precision": precision, "data.data_path": tmp_path / "histories"}
    parts, found = run(tmp_path / "cuda", settings, family="ad")
    curve = losses(found.records)
    assert np.isfinite(curve).all()
    assert curve[-1] < curve[0] - 0.5
    assert np.isfinite(list(parts.measures.values())).all()
    assert [kind for kind, _ in found.events].count("walk") == 3
    drops = {"model.dropout": 0, "model.attention_dropout": 0}
    quiet = {**settings, **drops, "training.max_steps": 5, "training.gen_episodes": 0}
    both = [
        losses(run(tmp_path / name, {**quiet, "system.device": name}, family="ad")[1].records)
        for name in ("cuda", "cpu")
    ]
    same = slice(0, 1 if precision == "fp16" else 5)  # which of the first scales overflow is a matter of rounding
    assert both[0][same] == pytest.approx(both[1][same], rel=1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_runs_and_what_goes_on_from_them_have_the_same_bits(tmp_path: Path, shape: str, precision: str) -> None:
    """--deterministic, with the documented dropout: training, validation, walks and the collection before them."""
    regions = {"model.compressed": True, "model.region": 30} if shape == "compressed" else {}
    settings = {**SHORT, **regions, "training.precision": precision, "system.deterministic": True}
    point = tmp_path / "0" / "checkpoints" / "step_00000020"
    with repeating():
        found = [
            run(tmp_path / str(number), {**settings, "data.data_path": tmp_path / f"data{number}"}, family="ad")
            for number in (0, 1)
        ]
        rest = run(
            tmp_path / "rest", {**settings, "data.data_path": tmp_path / "data0"}, family="ad", point=point
        )  # fmt: skip
        other = run(
            tmp_path / "other", {**settings, "data.data_path": tmp_path / "data0", "system.seed": 1}, family="ad"
        )
    whole, again = (recorder.trace for _, recorder in found)
    assert whole == again
    assert rest[1].trace == whole[20:]
    assert other[1].trace[0] != whole[0]  # the control
    walks = [[fields for kind, fields in each.events if kind == "walk"] for _, each in (*found, rest)]
    assert walks[0] == walks[1]
    assert walks[0][2:] == walks[2]


def test_throughput(tmp_path: Path) -> None:
    """Printed, and only the coarsest floor is asserted: a step that waits for the host would be below it."""
    settings = {"system.device": "cuda", "training.max_steps": 200, "training.gen_episodes": 0, "run.name": "fast"}
    parts, found = run(tmp_path, {**settings, "data.data_path": tmp_path / "data"}, family="ad", preset="darkroom")
    seconds = sorted(record.seconds for record in found.records[50:])
    actions = parts.config.training.batch_size * parts.config.training.context_length
    rate = actions / seconds[len(seconds) // 2]
    model = parts.stepper.model
    assert isinstance(model, Agent)
    journey = Journey(darkroom.build(), tuple(range(64)), 20, repeats=16, context_length=240)
    began = time.perf_counter()
    walk(small_agent(name="lockstep/ad-demo").to(CUDA), journey, parts.stepper.precision)
    walked = 64 * 16 * 20 * 20 / (time.perf_counter() - began)
    print(f"training {rate:,.0f} supervised actions/s, walks {walked:,.0f} steps/s")
    assert rate > 100_000
    assert walked > 20_000


# ------------------------------------------------------------------------------------------------------- walks


@pytest.mark.parametrize("changes", [{}, {"compressed": True, "region": 15, "summary_tokens": 3}], ids=SHAPES)
@pytest.mark.parametrize(
    "world", [ROOM, darkroompermuted.build(size=4, horizon=10), key_door.build(size=3, horizon=10)]
)
def test_walks_are_those_of_a_cpu(world: Any, changes: dict[str, Any]) -> None:
    """Beyond the context, which is no multiple of the horizon. In fp32 a draw at the very edge may fall otherwise."""
    asked = Journey(world, tuple(range(0, world.tasks, 3)), episodes=8, repeats=4, context_length=33, temperature=0.7)
    whole, wide = small_agent(**changes), small_agent(**changes).double()
    wide.rebuild_buffers()
    for agent, least in ((whole, 0.9), (wide, 1.0)):
        here, there = (
            follow(agent.to(device), asked, Precision("fp32", device), *asked.rows()) for device in (CPU, CUDA)
        )
        same = torch.stack([(one == other.cpu()).all(1) for one, other in zip(here, there, strict=True)]).all(0)
        assert float(same.float().mean()) >= least
        returns_there = walk(agent, asked, Precision("fp32", CUDA), chunk_rows=7)
        flat = returns_there.reshape(-1, 8)[same.numpy()]
        assert (flat == here.returns(world.horizon).numpy()[same.numpy()]).mean() > 0.98  # chunks may round otherwise
    other = follow(small_agent(seed=1, **changes).to(CUDA), asked, Precision("fp32", CUDA), *asked.rows())
    assert (other.actions.cpu() != here.actions).float().mean() > 0.1  # the control


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_walks_in_half_precision(precision: str) -> None:
    asked = Journey(ROOM, tuple(range(25)), episodes=6, repeats=8, context_length=33, temperature=1.0)
    for changes in ({}, {"compressed": True, "region": 15}):
        agent = small_agent(**changes).to(CUDA)
        with repeating():
            found = [walk(agent, asked, Precision(precision, CUDA)) for _ in (0, 1)]
        assert (found[0] == found[1]).all()
        exact = walk(agent, asked, Precision("fp32", CUDA))
        assert found[0].mean() == pytest.approx(exact.mean(), rel=0.25)


# ------------------------------------------------------------------------------------------------------- collection


def digest(wanted: Collection) -> str:
    return hashlib.sha256(wanted.file("hdf5").read_bytes()).hexdigest()


def planned(learner: Any, folder: Path, *, world: Any = None, streams: int = 6) -> Collection:
    return plan(world or ROOM, learner, total_timesteps=160 * streams, streams=streams, folder=folder)


def test_posterior_sampling_is_collected_to_the_same_bytes(tmp_path: Path) -> None:
    for number, world in enumerate((ROOM, darkroompermuted.build(size=4), key_door.build(size=3))):
        found = list[str]()
        for device in ("cpu", "cuda"):
            wanted = planned(Posterior(), tmp_path / f"{device}{number}", world=world)
            collect(wanted, device=device)
            found.append(digest(wanted))
        assert found[0] == found[1]
        with repeating():
            wanted = planned(Posterior(), tmp_path / f"again{number}", world=world)
            collect(wanted, device="cuda")
        assert digest(wanted) == found[0]


@pytest.mark.parametrize("shared", [1, 6])
def test_ppo_repeats_its_bytes_and_learns_as_on_a_cpu(tmp_path: Path, shared: int) -> None:
    ppo = PPO(n_epochs=4, streams_per_learner=shared)
    tables: dict[str, Any] = {}
    for name, device in (("cpu", "cpu"), ("one", "cuda"), ("two", "cuda")):
        wanted = planned(ppo, tmp_path / name)
        began = time.perf_counter()
        collect(wanted, device=device)
        print(f"{name}: {25 * 6 * 160 / (time.perf_counter() - began):,.0f} steps/s")
        tables[name] = read_hdf5(wanted.file("hdf5"), ROOM).table
    assert (tables["one"] == tables["two"]).all()
    first = slice(0, 80)  # the first rollout: weights are drawn, nothing is learnt yet
    assert (tables["one"][..., first] == tables["cpu"][..., first]).mean() > 0.999
    episodes = {
        name: table[2].reshape(25, 6, -1, ROOM.horizon).sum(-1, dtype=np.int64) for name, table in tables.items()
    }
    here, there = (episodes[name].mean((0, 1)) for name in ("cpu", "one"))
    assert np.abs(here - there).max() < 0.5
    with repeating():
        wanted = planned(ppo, tmp_path / "deterministic")
        collect(wanted, device="cuda")
    assert (read_hdf5(wanted.file("hdf5"), ROOM).table[..., first] == tables["one"][..., first]).mean() > 0.999


def test_an_interrupted_collection_on_a_gpu_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 64 learners, the last one filled up."""
    monkeypatch.setattr(PPO, "chunk", lambda *_: 64)
    ppo, runs = PPO(n_epochs=1), list[int]()
    whole, cut = (planned(ppo, tmp_path / name) for name in ("whole", "cut"))
    collect(whole, device="cuda", workers=1)
    real = PPO.run

    def breaks(self: PPO, world: Any, tasks: Tensor, keys: Tensor, *, steps: int) -> Any:
        runs.append(len(tasks))
        if len(runs) == 2:
            raise RuntimeError("the power is gone")
        return real(self, world, tasks, keys, steps=steps)

    monkeypatch.setattr(PPO, "run", breaks)
    with pytest.raises(RuntimeError, match="the power"):
        collect(cut, device="cuda", workers=1)
    assert cut.file("parts").is_dir()
    collect(cut, device="cuda", workers=1)
    assert digest(cut) == digest(whole)
    assert set(runs) == {64}, "150 learners, in chunks that are equally large"
