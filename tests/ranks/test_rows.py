"""Which rows real ranks train on: each once per epoch, also where a run goes on with another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from lockstep.contracts import Batch, Draw, Rows
from lockstep.data import loader
from lockstep.data.order import Order
from lockstep.objectives.causal import Causal
from lockstep.runtime.group import Group
from tests.data.coverage import Seen, faults
from tests.gates.training import run
from tests.ranks.data_parallel import ROWS, SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]


class Watched(Causal):
    """Notes the rows of every batch that reaches the loss: what is trained on, not what was prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: dict[int, tuple[int, int]] = {}  # position -> epoch, row

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        batch = super().collate(rows, draw)
        noted = np.stack([draw.step * draw.batch_rows + rows.slots, rows.epochs, rows.ids])
        return batch._replace(tensors={**batch.tensors, "noted": torch.from_numpy(noted)})

    def loss(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        for position, epoch, row in batch.tensors["noted"].T.tolist():
            assert self.trained.setdefault(position, (epoch, row)) == (epoch, row)  # the first step is rehearsed
        return super().loss(model, batch)


def watch(
    group: Group, folder: Path, steps: int, point: Path | None = None, own_order: bool = False
) -> tuple[list[Seen], int]:
    """Train up to a step; the rows this rank was given, and how many there are."""
    objective = Watched()
    settings = {
        **SMALL, "training.batch_size": 1, "training.grad_accum_nums": ROWS // group.world,
        "training.max_steps": steps, "data.num_workers": group.rank % 2, "checkpoint.allow_mismatch": True,
    }  # fmt: skip
    own: Any = lambda rows, seed: Order(rows, seed + group.rank)  # noqa: E731 - the mistake of the control
    with mock.patch.object(loader, "Order", own if own_order else Order):
        parts, _ = run(folder, settings, point=point, group=group, objective=objective)
    seen = [Seen(position, group.rank, epoch, row) for position, (epoch, row) in objective.trained.items()]
    return seen, parts.rows


def together(results: list[tuple[list[Seen], int]]) -> list[Seen]:
    return [entry for seen, _ in results for entry in seen]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_share_each_epoch(ranks: Pool, tmp_path: Path, world: int) -> None:
    """Items 96, 115, 140."""
    rows = watch(Group(), tmp_path / "count", 1)[1]
    assert rows % ROWS, "some batch must straddle two epochs"
    steps = -(-2 * rows // ROWS)
    results = ranks(world, watch, tmp_path / "run", steps)
    assert faults(together(results), rows=rows, epochs=2) == set()
    assert {len(seen) for seen, _ in results} == {steps * ROWS // world}


def test_the_check_sees_ranks_with_orders_of_their_own(ranks: Pool, tmp_path: Path) -> None:
    """Negative control."""
    results = ranks(2, watch, tmp_path, 30, None, True)
    found = faults(together(results), rows=results[0][1], epochs=1)
    assert {"a row twice in an epoch", "a row on two ranks in an epoch"} <= found


def test_ranks_come_and_go_within_an_epoch(ranks: Pool, tmp_path: Path) -> None:
    """2 ranks of 6 rows, 3 of 4, 4 of 3, 1 of 12: one global batch, one order, from checkpoint to checkpoint."""
    rows = watch(Group(), tmp_path / "count", 1)[1]
    last = -(-2 * rows // ROWS)
    seen: list[Seen] = []
    point, until = None, [last // 5, last // 2, last - 3, last]
    for world, steps in zip((2, 3, 4, 1), until, strict=True):
        folder = tmp_path / f"until-{steps}"
        results = ranks(world, watch, folder, steps, point)
        seen += together(results)
        point = folder / "checkpoints" / f"step_{steps:08d}"
    assert faults(seen, rows=rows, epochs=2) == set()
    whole = watch(Group(), tmp_path / "whole", last)[0]
    assert [replace(entry, rank=0) for entry in sorted(seen)] == sorted(whole)
