"""Masked diffusion on several ranks is masked diffusion in one process: losses, measures and weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine import replicas
from lockstep.engine.evaluate import evaluate
from lockstep.errors import LockstepError
from lockstep.health.fingerprint import digest_model
from lockstep.objectives.diffusion import Diffusion
from lockstep.objectives.options import DiffusionOptions
from lockstep.runtime.group import Group
from tests.data.coverage import Seen, faults
from tests.gates.training import FEW_ANSWERS, FEW_WORDS, run
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

ROWS = 6  # of the global batch
STEPS = 10
SETTINGS: dict[str, Any] = {
    "training.context_length": 24, "training.batch_size": 1, "training.max_steps": STEPS, "training.eval_interval": 0,
    "training.save_interval": 0, "training.eval_batches": 2, "model.dropout": 0.1, "data.num_workers": 0,
    "objective.random_length_probability": 0.3, "objective.eval_draws": 2, "training.learning_rate": 1e-2,
    "data.validation_fraction": 0.2,
}  # fmt: skip
DATA: dict[str, dict[str, Any]] = {
    "text": {"data.data_path": FEW_WORDS},
    "answers": {"data.data_path": FEW_ANSWERS, "data.documents": "answers", "training.context_length": 64},
}


@dataclass(frozen=True)
class Trained:
    """What a run led to, in numbers that can travel between processes."""

    losses: list[float]
    measures: dict[str, float]
    again: dict[str, float]  # the same validation once more
    lengths: list[int]  # tokens of each step
    digest: str


class ByRank(Diffusion):
    """The mistake: what is hidden depends on who makes the batch."""

    def __init__(self, rank: int) -> None:
        super().__init__(DiffusionOptions(random_length_probability=0.3, eval_draws=2))
        self.rank = rank

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        return super().collate(rows, draw._replace(seed=draw.seed + self.rank))


def train(group: Group, folder: Path, settings: Mapping[str, Any], mistaken: bool = False) -> Trained:
    """Train with a global batch of ROWS rows, whatever the number of ranks."""
    world = 1 if settings.get("system.mode") == "replicas" else group.world
    share = {"training.grad_accum_nums": ROWS // world}
    objective = ByRank(group.rank) if mistaken else None
    parts, recorder = run(folder, {**SETTINGS, **share, **settings}, family="llada", group=group, objective=objective)
    again = dict(evaluate(parts.stepper, parts.validation))
    losses, lengths = [record.loss for record in recorder.records], [record.tokens for record in recorder.records]
    sharded = settings.get("system.mode") == "fsdp"
    digest = "" if sharded else digest_model(parts.stepper.model.named_parameters())
    return Trained(losses, dict(parts.measures), again, lengths, digest)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Any:
    """What one process makes of data and precision, trained once."""

    @functools.cache
    def trained(data: str, precision: str) -> Trained:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DATASET_CACHE_DIR", str(_prepared))
            return train(Group(), tmp_path_factory.mktemp("one"), {**DATA[data], "training.precision": precision})

    return trained


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of any loss or measure."""
    assert one.measures.keys() == other.measures.keys()
    assert one.lengths == other.lengths
    found = [(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    found += [one.measures[name] - other.measures[name] for name in one.measures]
    return max(map(abs, found))


@pytest.mark.parametrize(
    ("data", "world", "mode", "precision", "tolerance"),
    [
        ("text", 2, "ddp", "fp64", 1e-9),
        pytest.param("answers", 3, "ddp", "fp32", 1e-5, marks=pytest.mark.slow),
        ("answers", 2, "fsdp", "fp64", 1e-9),
        pytest.param("text", 3, "fsdp", "fp32", 1e-5, marks=pytest.mark.slow),
        pytest.param("text", 3, "ddp", "fp32", 1e-5, marks=pytest.mark.slow),
        pytest.param("text", 2, "ddp", "fp32", 1e-5, marks=pytest.mark.slow),
        pytest.param("answers", 2, "ddp", "fp64", 1e-9, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_equal_one_process(
    data: str, world: int, mode: str, precision: str, tolerance: float, one_process: Any, ranks: Pool, tmp_path: Path
) -> None:
    """Items 114 and 124: losses of ten steps and all measures; with dropout, cut rows, answers of different lengths."""
    alone = one_process(data, precision)
    assert len(alone.losses) == STEPS
    assert len(set(alone.lengths)) > 1, "some rows must be cut"
    assert alone.again == alone.measures, "a second validation says the same, bit for bit"
    first, *others = ranks(world, train, tmp_path, {**DATA[data], "training.precision": precision, "system.mode": mode})
    assert all(other == first for other in others), "all ranks have the same numbers"
    assert first.again == first.measures
    assert difference(alone, first) < tolerance


def test_noise_that_depends_on_the_rank_is_seen(one_process: Any, ranks: Pool, tmp_path: Path) -> None:
    """Negative control: the same proof, with a mistake that other trainers make."""
    first, _ = ranks(2, train, tmp_path, {**DATA["text"], "training.precision": "fp64"}, True)
    alone = one_process("text", "fp64")
    assert max(abs(one - other) for one, other in zip(first.losses, alone.losses, strict=True)) > 1e-3


class Watched(Diffusion):
    """Notes the rows and times of every batch that reaches the loss."""

    def __init__(self) -> None:
        super().__init__(DiffusionOptions(random_length_probability=0.0))
        self.trained: dict[int, tuple[int, int]] = {}  # position -> epoch, row
        self.times: dict[int, float] = {}

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        noted = np.stack([draw.step * draw.batch_rows + rows.slots, rows.epochs, rows.ids])
        batch = super().collate(rows, draw)
        return batch._replace(tensors={**batch.tensors, "noted": torch.from_numpy(noted)})

    def loss(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        noted = batch.tensors["noted"].T.tolist()
        for (position, epoch, row), t in zip(noted, batch.tensors["times"].tolist(), strict=True):
            assert self.trained.setdefault(position, (epoch, row)) == (epoch, row)  # the first step is rehearsed
            self.times[position] = t
        return super().loss(model, batch)


def watch(group: Group, folder: Path) -> tuple[list[Seen], int, dict[int, float]]:
    objective = Watched()
    share = {"training.grad_accum_nums": ROWS // group.world, "training.max_steps": 40, "model.num_layers": 1}
    settings = {**SETTINGS, **DATA["text"], **share, "training.context_length": 8}
    parts, _ = run(folder, settings, family="llada", group=group, objective=objective)
    seen = [Seen(at, group.rank, epoch, row) for at, (epoch, row) in objective.trained.items()]
    return seen, parts.rows, objective.times


def test_ranks_share_rows_and_times(ranks: Pool, tmp_path: Path) -> None:
    """Item 115: no overlap, every row once in an epoch, a new order each; one t in each part of [0, 1) per step."""
    (first, rows, times), (second, _, others) = ranks(2, watch, tmp_path)
    epochs = len(first) * 2 // rows
    assert epochs >= 1
    assert rows % ROWS, "an epoch must end within a batch"
    assert faults([*first, *second], rows=rows, epochs=epochs) == set()
    assert faults(first, rows=rows, epochs=epochs), "control: one rank alone leaves rows out"
    assert not times.keys() & others.keys()
    both = {**times, **others}
    for step in range(0, len(both), ROWS):
        drawn = np.sort([both[step + slot] for slot in range(ROWS)])
        assert np.allclose(np.diff(drawn), 1 / ROWS, atol=1e-6)


def replica(group: Group, folder: Path) -> tuple[str, str]:
    settings = {**SETTINGS, **DATA["answers"], "training.max_steps": 4, "system.mode": "replicas"}
    parts, recorder = run(folder, settings, family="llada", group=group)
    try:
        replicas.compare(parts, group, mode="replicas")
    except LockstepError as error:
        return str(error).splitlines()[0], recorder.records[-1].loss.hex()
    return "", recorder.records[-1].loss.hex()


def test_replicas_agree_and_a_flipped_bit_is_named(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ranks(3, replica, tmp_path / "equal")
    assert {said for said, _ in results} == {""}
    assert len({loss for _, loss in results}) == 1
    monkeypatch.setenv("LOCKSTEP_FAULT", "flip_weight@rank=1,step=2,bit=3")
    results = ranks(3, replica, tmp_path / "flipped")
    words = "GPU 1 ends step 2 with other bits than the other 2 replicas, first in weights:tok_embed.weight"
    assert {said for said, _ in results} == {words}
