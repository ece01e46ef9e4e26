"""Algorithm Distillation on several ranks is Algorithm Distillation in one process: losses, measures and weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine import replicas
from lockstep.engine.evaluate import evaluate
from lockstep.errors import LockstepError
from lockstep.health.fingerprint import digest_model
from lockstep.objectives.distill import Distill
from lockstep.runtime.group import Group
from tests.data.coverage import Seen, faults
from tests.gates.training import run
from tests.ranks.pool import Pool

pytestmark = pytest.mark.ranks

ROWS = 12  # of the global batch
STEPS = 8
SETTINGS: dict[str, Any] = {
    "training.context_length": 40, "training.batch_size": 2, "training.max_steps": STEPS, "training.eval_interval": 0,
    "training.save_interval": 0, "training.eval_batches": 1, "training.gen_episodes": 0, "data.num_workers": 0,
    "training.learning_rate": 1e-2, "data.train_source_timesteps": 60, "objective.label_smoothing": 0.1,
    "model.dynamics": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"model.dropout": 0.0, "model.attention_dropout": 0.0},
    "dropout": {"model.dropout": 0.1, "model.attention_dropout": 0.1},
    "compressed": {
        "model.compressed": True, "model.region": 20, "model.summary_tokens": 3, "model.dropout": 0.1,
        "model.attention_dropout": 0.0, "training.context_length": 60,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a run led to, in numbers that can travel between processes."""

    losses: list[float]
    rates: list[float]
    measures: dict[str, float]
    again: dict[str, float]  # the same validation once more
    digest: str


class ByRank(Distill):
    """The mistake: where a window begins depends on who makes the batch."""

    rank = 0

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        return super().collate(rows, draw._replace(seed=draw.seed + self.rank))


def train(group: Group, folder: Path, settings: Mapping[str, Any], mistaken: bool = False) -> Trained:
    """Train with a global batch of ROWS rows, whatever the number of ranks."""
    world = 1 if settings.get("system.mode") == "replicas" else group.world
    share = {"training.grad_accum_nums": ROWS // 2 // world}
    objective = None
    if mistaken:
        objective = ByRank()
        objective.rank = group.rank
    parts, recorder = run(folder, {**SETTINGS, **share, **settings}, family="ad", group=group, objective=objective)
    again = dict(evaluate(parts.stepper, parts.validation))
    sharded = settings.get("system.mode") == "fsdp"
    digest = "" if sharded else digest_model(parts.stepper.model.named_parameters())
    losses, rates = [record.loss for record in recorder.records], [record.lr for record in recorder.records]
    return Trained(losses, rates, dict(parts.measures), again, digest)


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Collected once, by the first run: ranks find them there."""
    folder = tmp_path_factory.mktemp("histories")
    run(folder / "run", {**SETTINGS, "data.data_path": folder, "training.max_steps": 1}, family="ad")
    return {"data.data_path": str(folder)}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, histories: dict[str, str]) -> Any:
    """What one process makes of a model and a precision, trained once."""

    @functools.cache
    def trained(model: str, precision: str) -> Trained:
        settings = {**MODELS[model], **histories, "training.precision": precision}
        return train(Group(), tmp_path_factory.mktemp("one"), settings)

    return trained


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of any loss or measure."""
    assert one.measures.keys() == other.measures.keys()
    assert {"loss", "loss_action", "acc_action", "loss_dynamics"} <= one.measures.keys()
    found = [(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    found += [one.measures[name] - other.measures[name] for name in one.measures]
    return max(map(abs, found))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "world", "mode", "precision", "tolerance"),
    [
        ("dropout", 2, "ddp", "fp64", 1e-9),
        ("compressed", 2, "fsdp", "fp64", 1e-9),
        pytest.param("compressed", 3, "ddp", "fp32", 1e-4, marks=slow),
        pytest.param("plain", 2, "ddp", "fp64", 1e-9, marks=slow),
        pytest.param("plain", 3, "ddp", "fp64", 1e-9, marks=slow),
        pytest.param("plain", 3, "ddp", "fp32", 1e-4, marks=slow),
        pytest.param("plain", 2, "fsdp", "fp64", 1e-9, marks=slow),
        pytest.param("dropout", 3, "ddp", "fp32", 1e-4, marks=slow),
        pytest.param("dropout", 3, "fsdp", "fp32", 1e-4, marks=slow),
        pytest.param("compressed", 2, "ddp", "fp64", 1e-9, marks=slow),
        pytest.param("compressed", 3, "fsdp", "fp64", 1e-9, marks=slow),
    ],
)
def test_several_ranks_equal_one_process(
    model: str,
    world: int,
    mode: str,
    precision: str,
    tolerance: float,
    one_process: Any,
    histories: dict[str, str],
    ranks: Pool,
    tmp_path: Path,
) -> None:
    """Items 138, 139, 146: losses with accumulation, the learning rate, and every measure of the validation."""
    alone = one_process(model, precision)
    assert len(alone.losses) == STEPS
    assert alone.again == alone.measures, "a second validation says the same, bit for bit"
    settings = {**MODELS[model], **histories, "training.precision": precision, "system.mode": mode}
    first, *others = ranks(world, train, tmp_path, settings)
    assert all(other == first for other in others), "all ranks have the same numbers"
    assert first.again == first.measures
    assert first.rates == alone.rates
    assert difference(alone, first) < tolerance


def test_windows_that_depend_on_the_rank_are_seen(
    one_process: Any, histories: dict[str, str], ranks: Pool, tmp_path: Path
) -> None:
    """Negative control: the same proof, with a mistake that other trainers make."""
    settings = {**MODELS["dropout"], **histories, "training.precision": "fp64"}
    first, _ = ranks(2, train, tmp_path, settings, True)
    alone = one_process("dropout", "fp64")
    assert max(abs(one - other) for one, other in zip(first.losses, alone.losses, strict=True)) > 1e-3


@pytest.mark.parametrize(("precision", "rate", "tolerance"), [("fp32", 3e-5, 1e-6), ("fp64", 1e-2, 1e-9)])
def test_four_small_batches_are_a_large_one(
    precision: str, rate: float, tolerance: float, histories: dict[str, str], tmp_path: Path
) -> None:
    """Item 138: the weights after five steps; control: the last of four alone leads elsewhere.

    Where a gradient is nearly nothing, AdamW makes much of its rounding: a small rate in fp32, a large one in fp64.
    """
    sizes = {"a large one": (32, 1), "four small ones": (8, 4), "the last of them": (8, 1)}
    weights: dict[str, list[torch.Tensor]] = {}
    for name, (rows, parts) in sizes.items():
        cut = {"training.batch_size": rows, "training.grad_accum_nums": parts, "training.max_steps": 5}
        still = {**MODELS["plain"], "training.learning_rate": rate, "training.precision": precision}
        trained, _ = run(tmp_path / name, {**SETTINGS, **histories, **still, **cut}, family="ad")
        weights[name] = [parameter.detach() for parameter in trained.stepper.model.parameters()]

    def apart(other: str) -> float:
        pairs = zip(weights["a large one"], weights[other], strict=True)
        return max(float((one - two).abs().max()) for one, two in pairs)

    assert apart("four small ones") < tolerance
    assert apart("the last of them") > rate / 2


@pytest.mark.slow
def test_the_rate_does_not_know_how_many_ranks_there_are(
    histories: dict[str, str], ranks: Pool, tmp_path: Path
) -> None:
    """Item 139: 1, 2 and 4 processes of the same global batch, to the last step."""
    settings = {**MODELS["plain"], **histories, "training.batch_size": 1}
    alone = train(Group(), tmp_path / "1", {**settings, "training.batch_size": 2})
    for world in (2, 4):
        share = {"training.grad_accum_nums": ROWS // world}
        first = ranks(world, train, tmp_path / str(world), {**settings, **share})[0]
        assert first.rates == alone.rates
    assert alone.rates[-1] < 0.2 * max(alone.rates)


class Watched(Distill):
    """Notes the rows of every batch that reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: dict[int, tuple[int, int]] = {}  # position -> epoch, row

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        places = torch.from_numpy(draw.step * draw.batch_rows + rows.slots)
        noted = torch.stack((places, torch.from_numpy(rows.epochs), torch.from_numpy(rows.ids)))
        batch = super().collate(rows, draw)
        return batch._replace(tensors={**batch.tensors, "noted": noted})

    def loss(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        for position, epoch, row in batch.tensors["noted"].T.tolist():
            assert self.trained.setdefault(position, (epoch, row)) == (epoch, row)  # the first step is rehearsed
        return super().loss(model, batch)


def watch(group: Group, folder: Path, histories: dict[str, str]) -> tuple[list[Seen], int]:
    objective = Watched()
    share = {"training.grad_accum_nums": ROWS // 2 // group.world, "training.max_steps": 33, "model.num_layers": 1}
    settings = {**SETTINGS, **histories, **share, "training.context_length": 20}
    parts, _ = run(folder, settings, family="ad", group=group, objective=objective)
    return [Seen(at, group.rank, epoch, row) for at, (epoch, row) in objective.trained.items()], parts.rows


def test_ranks_share_the_histories(histories: dict[str, str], ranks: Pool, tmp_path: Path) -> None:
    """Item 140: over two passes each history once in each, by one rank."""
    (first, rows), (second, _) = ranks(2, watch, tmp_path, histories)
    epochs = len(first) * 2 // rows
    assert epochs >= 2
    assert rows % ROWS, "a pass must end within a batch"
    assert faults([*first, *second], rows=rows, epochs=epochs) == set()
    assert faults(first, rows=rows, epochs=epochs), "control: one rank alone leaves rows out"


def replica(group: Group, folder: Path, histories: dict[str, str]) -> tuple[str, str]:
    settings = {**SETTINGS, **MODELS["dropout"], **histories, "training.max_steps": 4, "system.mode": "replicas"}
    parts, recorder = run(folder, settings, family="ad", group=group)
    try:
        replicas.compare(parts, group, mode="replicas")
    except LockstepError as error:
        return str(error).splitlines()[0], recorder.records[-1].loss.hex()
    return "", recorder.records[-1].loss.hex()


def test_replicas_agree_and_a_flipped_bit_is_named(
    histories: dict[str, str], ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ranks(3, replica, tmp_path / "equal", histories)
    assert {said for said, _ in results} == {""}
    assert len({loss for _, loss in results}) == 1
    monkeypatch.setenv("LOCKSTEP_FAULT", "flip_weight@rank=1,step=2,bit=3")
    results = ranks(3, replica, tmp_path / "flipped", histories)
    words = "GPU 1 ends step 2 with other bits than the other 2 replicas, first in weights:tok_embed.weight"
    assert {said for said, _ in results} == {words}
