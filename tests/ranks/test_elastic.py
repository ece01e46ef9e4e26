"""A run goes on with another number of ranks and in another mode: same rows, same global batch, same training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.elastic import FAMILIES, ROWS, STEPS, travel
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

EXACT, SINGLE, ROW_32 = 1e-9, 1e-4, 1e-5
FEW_ROWS = 12  # where there are no 8 ranks to share them
Way = tuple[tuple[int, str], ...]
ALONE: Way = ((1, "ddp"),)
SHORT: Way = ((4, "ddp"), (2, "fsdp"), (1, "ddp"), (3, "fsdp"))
LONG: Way = ((4, "ddp"), (2, "fsdp"), (1, "ddp"), (8, "fsdp"), (3, "ddp"))
OTHER: Way = ((4, "fsdp"), (2, "ddp"), (1, "fsdp"), (8, "ddp"), (3, "fsdp"))
COPIES: Way = ((1, "ddp"), (4, "hsdp"), (2, "ddp"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, ranks: Pool, _prepared: Path) -> Any:
    """(what one process makes of it that never stops, trained once; the settings that all need)."""

    @functools.cache
    def trained(name: str, precision: str, rows: int, *, batch_size: int = 1, dropout: float = 0.1) -> Any:
        folder = tmp_path_factory.mktemp("one")
        changes = {"training.precision": precision, "training.batch_size": batch_size, "model.dropout": dropout}
        changes |= {"data.data_path": folder / "histories"} if name == "ad" else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DATASET_CACHE_DIR", str(_prepared))
            return travel(ranks, folder, name, ALONE, changes, rows=rows), changes

    return trained


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "way", "precision", "tolerance"),
    [
        ("llada", SHORT, "fp64", EXACT),
        *(
            pytest.param(name, way, precision, tolerance, marks=slow)
            for name in FAMILIES
            for way in (LONG, OTHER, COPIES)
            for precision, tolerance in (("fp64", EXACT), ("fp32", SINGLE))
        ),
    ],
)
def test_ranks_and_modes_come_and_go(
    ranks: Pool, one_process: Any, tmp_path: Path, name: str, way: Way, precision: str, tolerance: float
) -> None:
    rows = ROWS if (8, "ddp") in way or (8, "fsdp") in way else FEW_ROWS
    whole, changes = one_process(name, precision, rows)
    moved = travel(ranks, tmp_path, name, way, changes, rows=rows)
    assert len(whole.rows) == STEPS * rows
    assert moved.rows == whole.rows, "every row in its place, with its noise, bit for bit"
    assert moved.micro == [(1, rows // world) for world, _ in way]
    assert moved.difference(whole) < tolerance
    if precision == "fp32":
        pairs = zip(moved.numbers, whole.numbers, strict=True)
        losses = [(float.fromhex(one[1]), float.fromhex(other[1])) for one, other in pairs]
        assert max(abs(one - other) / other for one, other in losses) < ROW_32


def test_micro_batches_shrink_where_they_must(ranks: Pool, one_process: Any, tmp_path: Path) -> None:
    """Four ranks of 3 rows each, then three of 4: 3 does not divide them, 2 does."""
    whole, changes = one_process("llama", "fp64", FEW_ROWS, batch_size=3, dropout=0.0)
    moved = travel(ranks, tmp_path, "llama", ((4, "ddp"), (3, "ddp")), changes, rows=FEW_ROWS)
    assert moved.micro == [(3, 1), (2, 2)]
    assert moved.difference(whole) < EXACT


def test_another_global_batch_is_seen(ranks: Pool, one_process: Any, tmp_path: Path) -> None:
    """Negative control: what others do, who keep the micro-batches of each rank and let the global batch grow."""
    whole, changes = one_process("llama", "fp64", FEW_ROWS, batch_size=3, dropout=0.0)
    way = ((2, "ddp"), (4, "ddp"))
    moved = travel(ranks, tmp_path, "llama", way, {**changes, "checkpoint.allow_mismatch": True}, rows=FEW_ROWS)
    assert moved.micro == [(3, 2), (3, 2)]
    assert moved.difference(whole) > 100 * SINGLE
    assert moved.rows != whole.rows
