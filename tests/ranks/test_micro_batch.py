"""Two ranks look for a micro-batch, and only one of them runs out of memory: nobody hangs, and both take the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.contracts import Batch
from lockstep.engine import micro_batch
from lockstep.engine.micro_batch import Search, divisors
from lockstep.engine.step import Stepper
from lockstep.runtime import env, hardware
from lockstep.runtime.group import Group
from lockstep.runtime.memory_limits import Bounds
from tests.gates.training import run
from tests.ranks.data_parallel import ROWS, SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]
CARD = Bounds(0, 80 << 30, "the card has")


def search(group: Group, limits: list[int]) -> tuple[int | None, list[int]]:
    """On a card of its own size each; what was found, and what was tried here."""
    tried: list[int] = []

    def attempt(rows: int) -> int | None:
        tried.append(rows)
        return rows * 1000 if rows * 1000 <= limits[group.rank] else None

    bounds = Bounds(0, limits[group.rank], "the card has")
    found = Search(divisors(24), attempt, lambda rows: rows * 900, bounds, group).largest()
    return found.rows if found else None, tried


@pytest.mark.parametrize(("limits", "rows"), [([30_000, 30_000], 24), ([30_000, 9_000], 8), ([5_000, 90_000], 4)])
def test_the_smallest_card_decides(ranks: Pool, limits: list[int], rows: int) -> None:
    one, other = ranks(2, search, limits)
    assert one == other, "and all have tried the same sizes"
    assert one[0] == rows
    assert one[1][0] == rows, "foreseen by the estimate, which is all that a model in shards has"


def train(
    group: Group, folder: Path, settings: dict[str, Any], too_many: list[int], caches: list[Path] | None = None
) -> dict[str, Any]:
    """A real run in which a rank cannot have so many rows."""
    cache = caches[group.rank] if caches else folder / "cache"
    tried: list[int] = []
    real = Stepper.rehearse_alone

    def rehearse_alone(self: Stepper, batches: list[Batch]) -> None:
        tried.append(batches[0].rows)
        if batches[0].rows >= too_many[group.rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        real(self, batches)

    with (
        mock.patch.object(micro_batch, "DEVICES", ("cpu",)),
        mock.patch.object(Stepper, "rehearse_alone", rehearse_alone),
        mock.patch.object(hardware, "memory_bounds", return_value=CARD),
        mock.patch.object(hardware, "peak_memory_bytes", return_value=1 << 30),
        env.changed("XDG_CACHE_HOME", str(cache)),
    ):
        parts, recorder = run(folder / "run", {**SMALL, "training.max_steps": 3, **settings}, group=group)
    training = parts.config.training
    return {
        "split": (training.batch_size, training.grad_accum_nums), "tried": tried,
        "losses": [record.loss for record in recorder.records], "rows": parts.batch_rows,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "replicas"])
def test_one_rank_runs_out_of_memory(ranks: Pool, tmp_path: Path, mode: str) -> None:
    share = ROWS if mode == "replicas" else ROWS // 2
    auto = {"training.batch_size": f"auto:{share}", "training.grad_accum_nums": 1, "system.mode": mode}
    found = ranks(2, train, tmp_path / "auto", auto, [100, 3])
    assert found[0]["split"] == found[1]["split"] == ((share, 1) if mode == "fsdp" else (2, share // 2))
    assert found[0]["tried"] == found[1]["tried"] == ([] if mode == "fsdp" else [*reversed(divisors(share))][:-1])
    given = {**auto, "training.batch_size": share}
    plain = ranks(2, train, tmp_path / "plain", given, [100, 100])
    for one, other in zip(found, plain, strict=True):
        assert one["rows"] == other["rows"] == ROWS
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)


def test_what_only_one_rank_knows_is_looked_for_again(ranks: Pool, tmp_path: Path) -> None:
    """As of a node that was not there before; the control: what all know is all that is tried."""
    auto = {"training.batch_size": "auto:6", "training.grad_accum_nums": 1, "training.max_steps": 1}
    kept, fresh = tmp_path / "kept", tmp_path / "fresh"
    for name, caches, too_many, tried in (
        ("first", [kept, kept], 3, [6, 3, 2]),
        ("known", [kept, kept], 100, [2]),
        ("one knows", [kept, fresh], 100, [6]),
    ):
        found = ranks(2, train, tmp_path / name, auto, [too_many, too_many], caches)
        assert [each["tried"] for each in found] == [tried, tried]
        assert [each["split"] for each in found] == [(tried[-1], 6 // tried[-1])] * 2
