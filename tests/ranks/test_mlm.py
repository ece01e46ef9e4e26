"""Masked-LM on several ranks is masked-LM in one process: losses, history, weights and result files."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine import replicas
from lockstep.errors import LockstepError
from lockstep.objectives.mlm import Mlm
from lockstep.objectives.options import MlmOptions
from lockstep.runtime.group import Group, is_lost_peer
from tests.data.coverage import Seen, faults
from tests.gates.training import FEW_DOCUMENTS, run
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

ROWS = 6  # of the global batch
SETTINGS: dict[str, Any] = {
    "data.data_path": FEW_DOCUMENTS, "training.context_length": 32, "training.batch_size": 1, "training.epochs": 3,
    "training.eval_interval": 0, "training.save_interval": 0, "training.eval_batches": 2, "model.dropout": 0.1,
    "objective.mask_probability": 0.3, "objective.last_mask_probability": 0.15, "objective.whole_words": True,
    "training.learning_rate": 1e-2, "data.num_workers": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a run led to, in numbers that can travel between processes."""

    losses: list[float]
    history: dict[str, list[float]]
    measures: dict[str, float]
    digest: str


class ByRank(Mlm):
    """The mistake: what is hidden depends on who makes the batch."""

    def __init__(self, rank: int) -> None:
        super().__init__(MlmOptions(), documents="masked")
        self.rank = rank

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        return super().collate(rows, draw._replace(seed=draw.seed + self.rank))


def train(group: Group, folder: Path, settings: Mapping[str, Any], mistaken: bool = False) -> Trained:
    """Train with a global batch of ROWS rows, whatever the number of ranks."""
    world = 1 if settings.get("system.mode") == "replicas" else group.world
    share = {"training.grad_accum_nums": ROWS // world, "report.results_dir": str(folder / "results")}
    objective = ByRank(group.rank) if mistaken else None
    parts, recorder = run(folder, {**SETTINGS, **share, **settings}, family="mlm", group=group, objective=objective)
    replicas.compare(parts, group, mode=parts.config.system.mode)  # raises where they differ
    history = {"train_losses": parts.progress.train_losses, "val_losses": parts.progress.val_losses}
    agreed = [fields["digest"] for kind, fields in recorder.events if kind == "replicas"]
    losses = [record.loss for record in recorder.records]
    return Trained(losses, history, dict(parts.measures), agreed[0] if agreed else "")  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Any:
    """What one process makes of a precision, trained once; and the folder of its results."""

    @functools.cache
    def trained(precision: str) -> tuple[Trained, Path]:
        folder = tmp_path_factory.mktemp("one")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DATASET_CACHE_DIR", str(_prepared))
            return train(Group(), folder, {"training.precision": precision}), folder / "results"

    return trained


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of any loss, of the history, or of any measure."""

    def numbers(trained: Trained) -> torch.Tensor:
        history = [*trained.history["train_losses"], *trained.history["val_losses"]]
        return torch.tensor([*trained.losses, *history, *trained.measures.values()], dtype=torch.float64)

    return float((numbers(one) - numbers(other)).abs().max())


@pytest.mark.parametrize(
    ("mode", "precision", "tolerance"),
    [
        ("ddp", "fp64", 1e-9),
        pytest.param("ddp", "fp32", 1e-5, marks=pytest.mark.slow),
        ("fsdp", "fp64", 1e-9),
        pytest.param("fsdp", "fp32", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one_process(
    mode: str, precision: str, tolerance: float, one_process: Any, ranks: Pool, tmp_path: Path
) -> None:
    """Item 95, with masks, dropout, a mask probability that changes and epochs that end within a batch."""
    alone, alone_folder = one_process(precision)
    assert len(alone.losses) == 10
    assert alone.history["train_losses"][-1] < alone.history["train_losses"][0], "it must learn"
    assert len(alone.history["val_losses"]) == 3
    first, second = ranks(2, train, tmp_path, {"training.precision": precision, "system.mode": mode})
    assert first == second, "all ranks have the same numbers"
    assert difference(alone, first) < tolerance
    assert alone.measures["accuracy"] == first.measures["accuracy"]
    told = json.loads((tmp_path / "results" / "mlm_training_history.json").read_text())
    assert told == first.history
    one, two = (
        torch.load(folder / "mlm_model.pth", weights_only=True) for folder in (alone_folder, tmp_path / "results")
    )
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < max(
        tolerance, 1e-4 * (precision == "fp32")
    )


def test_masks_that_depend_on_the_rank_are_seen(one_process: Any, ranks: Pool, tmp_path: Path) -> None:
    """Negative control: the same proof, with a mistake that other trainers make."""
    first, _ = ranks(2, train, tmp_path, {"training.precision": "fp64"}, True)
    assert difference(one_process("fp64")[0], first) > 1e-3


class Watched(Mlm):
    """Notes the rows of every batch that reaches the loss."""

    def __init__(self) -> None:
        super().__init__(MlmOptions(), documents="masked")
        self.trained: dict[int, tuple[int, int]] = {}  # position -> epoch, row

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        noted = np.stack([draw.step * draw.batch_rows + rows.slots, rows.epochs, rows.ids])
        batch = super().collate(rows, draw)
        return batch._replace(tensors={**batch.tensors, "noted": torch.from_numpy(noted)})

    def loss(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        for position, epoch, row in batch.tensors["noted"].T.tolist():
            assert self.trained.setdefault(position, (epoch, row)) == (epoch, row)  # the first step is rehearsed
        return super().loss(model, batch)


def watch(group: Group, folder: Path) -> tuple[list[Seen], int]:
    objective = Watched()
    share = {"training.grad_accum_nums": ROWS // group.world, "system.mode": "ddp"}
    parts, _ = run(folder, {**SETTINGS, **share}, family="mlm", group=group, objective=objective)
    return [Seen(at, group.rank, epoch, row) for at, (epoch, row) in objective.trained.items()], parts.rows


def test_each_epoch_has_every_row_once_and_another_order(ranks: Pool, tmp_path: Path) -> None:
    """Item 96; the control is one rank alone, which leaves rows out."""
    (first, rows), (second, _) = ranks(2, watch, tmp_path)
    assert rows % ROWS
    assert faults([*first, *second], rows=rows, epochs=3) == set()
    assert faults(first, rows=rows, epochs=3)


@pytest.mark.slow  # by default of other families: test_llada.py, test_ddp_around.py
def test_replicas_agree(one_process: Any, ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2, train, tmp_path, {"training.precision": "fp32", "system.mode": "replicas"})
    assert first == second
    assert first.digest
    assert first.losses == one_process("fp32")[0].losses, "each is the run of one process, bit for bit"


def compare(group: Group, folder: Path) -> tuple[str, int, bool]:
    """What a replica says at its end, with which exit code, and whether it leaves the word to another."""
    try:
        train(group, folder, {"training.precision": "fp32", "system.mode": "replicas"})
    except LockstepError as error:
        return error.what, int(error.exit_code), is_lost_peer(error)
    return "", 0, False


@pytest.mark.parametrize(
    ("tensor", "wrong"), [pytest.param("tok_embed.weight", 1, marks=pytest.mark.slow), ("head.dense.bias", 2)]
)
def test_a_replica_with_a_flipped_bit_is_named(
    tensor: str, wrong: int, ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the lowest bit of one weight, once; two against one."""
    monkeypatch.setenv("LOCKSTEP_FAULT", f"flip_weight@rank={wrong},step=4,bit=0,tensor={tensor}")
    words = f"GPU {wrong} ends step 4 with other bits than the other 2 replicas, first in weights:{tensor}"
    assert ranks(3, compare, tmp_path) == [(words, 3, rank != wrong) for rank in range(3)]
