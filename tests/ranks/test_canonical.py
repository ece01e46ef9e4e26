"""`--canonical`: 1, 2, 4 and 8 ranks train to the same bits, also where a run goes on with another number of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.runtime.group import Group
from tests.ranks.elastic import FAMILIES, ROWS, SHARED, STEPS, Journey, leg, travel
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

FEW_ROWS = 16  # two in each block; with 8 ranks three
CANONICAL = {"system.deterministic": "canonical"}
Way = tuple[tuple[int, str], ...]
slow = pytest.mark.slow


def on(*worlds: int) -> Way:
    return tuple((world, "ddp") for world in worlds)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, ranks: Pool, _prepared: Path) -> Any:
    """What one process makes of it that never stops, trained once; and the settings that all need."""

    @functools.cache
    def trained(name: str, precision: str, rows: int = ROWS) -> tuple[Journey, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("one")
        changes = {**CANONICAL, "training.precision": precision}
        changes |= {"data.data_path": folder / "histories"} if name == "ad" else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DATASET_CACHE_DIR", str(_prepared))
            return travel(ranks, folder, name, on(1), changes, rows=rows), changes

    return trained


@pytest.mark.parametrize(
    ("name", "way", "precision"),
    [
        ("llama", on(4, 2), "fp32"),
        *(pytest.param(name, on(world), "fp32", marks=slow) for name in FAMILIES for world in (2, 4, 8)),
        *(pytest.param(name, on(4, 2, 1, 8), "fp32", marks=slow) for name in FAMILIES),
        *(pytest.param("llama", on(2, 8, 4), precision, marks=slow) for precision in ("bf16", "fp16", "fp64")),
    ],
)
def test_the_bits_are_those_of_one_process(
    ranks: Pool, one_process: Any, tmp_path: Path, name: str, way: Way, precision: str
) -> None:
    """Losses, norms, measures, weights and moments; with dropout, accumulation in each block, and through resumes."""
    rows = ROWS if 8 in dict(way) else FEW_ROWS
    whole, changes = one_process(name, precision, rows)
    assert len(whole.numbers) == STEPS
    assert len({loss for _, loss, _ in whole.numbers}) == STEPS
    moved = travel(ranks, tmp_path, name, way, changes, rows=rows)
    assert moved.micro == [(1, rows // world) for world, _ in way]
    assert moved.rows == whole.rows
    assert moved.numbers == whole.numbers
    assert moved.measures == whole.measures
    assert moved.weights == whole.weights


def test_plain_sums_are_seen_to_differ(ranks: Pool, one_process: Any, tmp_path: Path) -> None:
    """Negative control: one process and four ranks that add as they come; close, but not the same bits."""
    plain = {"system.deterministic": True}
    one, four = (travel(ranks, tmp_path / str(world), "llama", on(world), plain, rows=FEW_ROWS) for world in (1, 4))
    assert one.numbers != four.numbers
    assert one.weights != four.weights
    assert one.rows == four.rows
    assert one.difference(four) < 1e-4
    assert one.difference(one_process("llama", "fp32", FEW_ROWS)[0]) < 1e-4, "canonical sums are the same training"


def refused(group: Group, folder: Path, settings: dict[str, Any], point: Path) -> tuple[str, str]:
    try:
        leg(group, folder, settings, "llama", point, STEPS)
    except ConfigError as error:
        return str(error), error.hint
    return "", ""


def test_a_number_of_ranks_that_cannot_keep_the_blocks_is_refused(
    ranks: Pool, one_process: Any, tmp_path: Path
) -> None:
    saved = one_process("llama", "fp32", FEW_ROWS)[0].last
    settings = {**SHARED, **FAMILIES["llama"][1], **CANONICAL, "training.grad_accum_nums": FEW_ROWS}
    ((error, hint),) = set(ranks(3, refused, tmp_path, settings, saved))
    assert "cannot be shared out to 3 workers" in error
    assert hint == "--gpus 1, 2, 4 or 8"
