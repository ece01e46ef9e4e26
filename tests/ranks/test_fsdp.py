"""A model in shards trains like a whole one in one process: FSDP2 at 2, 3 and 4 ranks, HSDP as 2 x 2."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import checkpoint
from lockstep.errors import ConfigError, NonFiniteError
from lockstep.health.finite import gradient_warnings, look
from lockstep.models.build import build
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve
from lockstep.runtime import parallel
from lockstep.runtime.group import Group
from lockstep.runtime.parallel import Sharded, grid, is_sharded, local, offset, whole
from tests.ranks.pool import Pool
from tests.ranks.sharding import ROWS, SMALL, assembled, numbers, train

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

CPU = torch.device("cpu")
FP64 = {"training.precision": "fp64"}
RECOMPUTED = {"system.gradient_checkpointing": True}
MODES = [("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)]
FEW_STEPS = 15  # more than once over the rows
LATE_SECONDS = 2.0  # far more than a busy machine takes for a step of this size
SLOW = pytest.mark.slow
NAN_GRADIENT, NAN_LOSS = "nan_grad@rank=1,step=1,tensor=tok_embed.weight", "nan_loss@rank=1,step=1"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process with the same global batches; trained once for all, by the first who asks."""
    return {"folder": tmp_path_factory.mktemp("alone")}


def expected(alone: dict[str, Any], precision: str, steps: int) -> tuple[torch.Tensor, checkpoint.State]:
    name = f"{precision}-{steps}"
    if name not in alone:
        folder = alone["folder"] / name
        trace = train(Group(), folder, {"training.precision": precision, "training.max_steps": steps}, None, True)
        rows = assembled(Group(), folder.with_name("rows"), {}, None, True)[0].parts.rows
        assert rows % ROWS, "some batch must straddle two epochs"
        assert rows < steps * ROWS, "and the table be walked over more than once"
        alone[name] = (as_tensor(trace), saved(folder, steps))
    return alone[name]


def saved(folder: Path, steps: int) -> checkpoint.State:
    return checkpoint.load(folder / "checkpoints" / f"step_{steps:08d}")


def as_tensor(trace: list[tuple[Any, ...]]) -> torch.Tensor:
    return torch.tensor(numbers(trace), dtype=torch.float64)


def distance(ours: checkpoint.State, theirs: checkpoint.State) -> float:
    assert set(ours.model) == set(theirs.model)
    return max(float((ours.model[name] - theirs.model[name]).abs().max()) for name in ours.model)


@pytest.mark.parametrize(
    ("mode", "world", "steps"),
    [("fsdp", 3, FEW_STEPS), ("hsdp", 4, FEW_STEPS), *(pytest.param(*mode, 50, marks=SLOW) for mode in MODES)],
)
def test_steps_in_float64_equal_one_process(
    ranks: Pool, mode: str, world: int, steps: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    """With accumulation, clipping, rows of different lengths and ranks without any target; recomputed in one case."""
    wanted, state = expected(alone, "fp64", steps)
    settings = {**FP64, "system.mode": mode, "training.max_steps": steps, **(RECOMPUTED if world == 3 else {})}
    traces = ranks(world, train, tmp_path, settings, None, True)
    assert all(trace == traces[0] for trace in traces), "ranks must read the same numbers, bit for bit"
    assert len(wanted) == steps
    assert float(((as_tensor(traces[0]) - wanted) / wanted).abs().max()) < 1e-9
    assert distance(saved(tmp_path, steps), state) < 1e-9


@pytest.mark.parametrize(
    ("mode", "world", "steps"), [("fsdp", 2, FEW_STEPS), *(pytest.param(*mode, 50, marks=SLOW) for mode in MODES)]
)
def test_steps_in_fp32_are_close_to_one_process(
    ranks: Pool, mode: str, world: int, steps: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    wanted, state = expected(alone, "fp32", steps)
    settings = {"training.precision": "fp32", "system.mode": mode, "training.max_steps": steps}
    trace = ranks(world, train, tmp_path, settings, None, True)[0]
    assert float((as_tensor(trace) - wanted).abs().max()) < 1e-4
    assert distance(saved(tmp_path, steps), state) < 1e-4


def mean_instead_of_sum(group: Group, folder: Path, settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "GRADIENT_DIVISOR", float(group.world))
        return train(group, folder, settings, None, True)


def test_a_mean_of_gradients_is_seen(ranks: Pool, alone: dict[str, Any], tmp_path: Path) -> None:
    """Negative control of the two tests above."""
    wanted, _ = expected(alone, "fp64", FEW_STEPS)
    settings = {**FP64, "system.mode": "fsdp", "training.max_steps": 3, "training.warmup_steps": 1}
    trace = ranks(2, mean_instead_of_sum, tmp_path, settings)[0]
    assert float((as_tensor(trace)[:, 1] / wanted[:3, 1] - 1).abs().min()) > 0.1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_that_of_one_process(ranks: Pool, precision: str, tmp_path: Path) -> None:
    """Autocast over fp32 shards: the same numbers as over whole weights, up to the order of sums."""
    settings = {"training.precision": precision, "training.max_steps": 3}
    wanted = as_tensor(train(Group(), tmp_path / "one", settings))
    found = as_tensor(ranks(2, train, tmp_path / "two", {**settings, "system.mode": "fsdp"})[0])
    assert float(((found - wanted) / wanted).abs().max()) < 1e-2


def made(shard: Any = None, **values: Any) -> torch.nn.Module:
    sizes = {key.removeprefix("model."): value for key, value in SMALL.items() if key.startswith("model.")}
    options = LlamaOptions.model_validate({"model_path": "lockstep/tiny", "num_layers": 2, **sizes, **values})
    shape = resolve(options, context_length=8)
    return build(
        options, shape, device=CPU, dtype_name="fp32", seed=7, checkpointing=False, deterministic=False, debug=False,
        shard=shard,
    ).model  # fmt: skip


def differing(group: Group, mode: str, values: dict[str, Any], wrong: bool = False) -> tuple[list[str], int]:
    """(parameters whose first weights are not those of the whole model, parameters of which nothing lies here)."""
    with pytest.MonkeyPatch.context() as patch:
        if wrong:
            patch.setattr("lockstep.models.initialise.flat_offset", lambda _parameter: 0)
        model = made(Sharded(mode, group, CPU).shard, **values)
    differ: list[str] = []
    for (name, ours), theirs in zip(model.named_parameters(), made(**values).parameters(), strict=True):
        first = offset(ours)[0]
        assert is_sharded(ours)
        assert torch.equal(local(ours), whole(ours)[first : first + len(local(ours))])
        if not torch.equal(whole(ours), theirs):
            differ.append(name)
    return differ, sum(local(parameter).numel() == 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("mode", "world"), [pytest.param(*mode, marks=() if mode in MODES[1::2] else SLOW) for mode in MODES]
)
def test_first_weights_have_the_bits_of_the_whole(ranks: Pool, mode: str, world: int) -> None:
    for tied in (False, True):
        results = ranks(world, differing, mode, {"tie_word_embeddings": tied})
        assert [differ for differ, _ in results] == [[]] * world
    assert (results[-1][1] > 0) == (mode == "fsdp" and world > 2), "some rank must hold nothing of the small tensors"


def test_a_wrong_offset_is_seen(ranks: Pool) -> None:
    (differ, _), _ = ranks(2, differing, "fsdp", {}, True)
    assert "tok_embed.weight" in differ


def test_pretrained_weights_have_the_bits_of_the_whole(ranks: Pool, tmp_path: Path) -> None:
    from lockstep.models import hf

    for tied in (False, True):
        source = made(tie_word_embeddings=tied)
        folder = tmp_path / str(tied)
        hf.export(source, source.shape, folder, dtype="fp32")  # pyright: ignore[reportArgumentType]
        values = {"model_path": str(folder), "init": "pretrained", "tie_word_embeddings": tied}
        assert [differ for differ, _ in ranks(3, differing, "fsdp", values)] == [[]] * 3


def test_which_grid_a_mode_makes() -> None:
    """Known without torch, so that a launcher can refuse before it starts anything."""
    lean = "import sys, lockstep.runtime.grid; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", lean], check=False).returncode == 0
    assert grid("fsdp", world=3) == (1, 3)
    assert grid("hsdp", world=4) == (2, 2)
    assert grid("hsdp", world=6, nodes=3) == (3, 2)
    for world, nodes in ((3, 1), (5, 2), (1, 1)):
        with pytest.raises(ConfigError, match="copies"):
            grid("hsdp", world=world, nodes=nodes)


class Sections:
    """Marks as a watchdog sees them: the section, and how long each lasted."""

    def __init__(self) -> None:
        self.section, self.since, self.seconds = "start", time.monotonic(), dict[str, float]()

    def enter(self, section: str, step: int = -1) -> None:
        now = time.monotonic()
        self.seconds[self.section] = self.seconds.get(self.section, 0.0) + now - self.since
        self.section, self.since = section, now

    def busy(self, step: int, seconds: float) -> None: ...


def wait_for_a_late_peer(group: Group, late: str) -> tuple[dict[str, float], float]:
    """Rank 1 comes late to its forward or backward; what rank 0 did meanwhile."""
    link = Sections()
    sharded = Sharded("fsdp", group, CPU, link=link)
    model, tokens = made(sharded.shard), torch.arange(16).view(2, 8)
    sharded.zero()
    link.enter("forward")
    time.sleep(LATE_SECONDS * (group.rank == 1 and late == "forward"))
    loss = model(tokens, tokens)
    link.enter("backward")
    time.sleep(LATE_SECONDS * (group.rank == 1 and late == "backward"))
    loss.backward()
    link.enter("done")
    return link.seconds, sharded.waited_seconds


@pytest.mark.parametrize("late", ["forward", "backward"])
def test_who_waits_for_a_peer_says_so(ranks: Pool, late: str) -> None:
    """Or else a watchdog could not tell the stuck rank from those that wait for it."""
    waiting, stuck = ranks(2, wait_for_a_late_peer, late)
    most = 0.6 * LATE_SECONDS
    assert waiting[0]["communication"] > most
    assert waiting[1] == pytest.approx(waiting[0]["communication"], abs=0.1 * LATE_SECONDS)
    assert waiting[0][late] < most < stuck[0][late]


def train_compiled(group: Group, folder: Path, settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        return train(group, folder, {**settings, "model.compile": "on"})


@SLOW
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "world"), [("fsdp", 2), ("hsdp", 4)])
def test_compiled_blocks_train_in_shards(ranks: Pool, tmp_path: Path, mode: str, world: int) -> None:
    settings = {"system.mode": mode, "training.max_steps": 3}
    eager = ranks(world, train, tmp_path / "eager", settings)[0]
    for name, more in (("compiled", {}), ("recomputed", RECOMPUTED)):
        trace = ranks(world, train_compiled, tmp_path / name, {**settings, **more}, timeout_seconds=500)[0]
        assert float((as_tensor(trace) - as_tensor(eager)).abs().max()) < 1e-4


def fail(group: Group, folder: Path, settings: dict[str, Any], fault: str) -> str:
    """How training ends that is spoilt on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        try:
            train(group, folder, settings)
        except NonFiniteError as error:
            return str(error)
    return "ended well"


@pytest.mark.parametrize(
    ("mode", "world", "kind"),
    [
        ("fsdp", 3, NAN_LOSS),
        ("hsdp", 4, NAN_GRADIENT),
        pytest.param("fsdp", 3, NAN_GRADIENT, marks=SLOW),
        pytest.param("hsdp", 4, NAN_LOSS, marks=SLOW),
    ],
)
def test_what_is_spoilt_on_one_rank_ends_all_at_the_same_step(
    ranks: Pool, mode: str, world: int, kind: str, tmp_path: Path
) -> None:
    """In hsdp too, where rank 1 has a copy of its part elsewhere. Debug mode looks at every gradient on the way."""
    settings = {"system.mode": mode, "training.max_steps": 3, "debug.enabled": True}
    outcomes = ranks(world, fail, tmp_path, settings, kind)
    assert len(set(outcomes)) == 1
    assert "step 1: " in outcomes[0]
    assert ("loss is nan on rank 1;" in outcomes[0]) == kind.startswith("nan_loss")


def spoilt_gradient(group: Group) -> list[str]:
    sharded = Sharded("fsdp", group, CPU)
    model, tokens = made(sharded.shard), torch.arange(16).view(2, 8)
    model(tokens, tokens).backward()
    if group.rank == 1:
        local(model.tok_embed.weight.grad)[0] = float("nan")  # pyright: ignore[reportArgumentType]
    return list(gradient_warnings(look(model.named_parameters(), scale=1e-3)))


def test_debug_mode_sees_the_gradients_of_all_ranks(ranks: Pool) -> None:
    one, other = ranks(2, spoilt_gradient)
    assert one == other
    assert one[0] == "NaN in gradient: tok_embed.weight"
    assert all(line.startswith("Large gradient") for line in one[1:])
