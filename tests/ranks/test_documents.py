"""Documents kept apart on several ranks: whole models and models in shards train as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.runtime.group import Group
from tests.gates.training import FEW_WORDS
from tests.ranks import data_parallel, sharding
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

STEPS = 12
MASKED: dict[str, Any] = {
    "data.documents": "masked",
    "training.context_length": 64,
    "training.precision": "fp64",
    "training.max_steps": STEPS,
    "system.gradient_checkpointing": True,
}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On documents of which a row holds several; some begin in one row and end in another."""
    file = tmp_path_factory.mktemp("documents") / "short.jsonl"
    words = Path(FEW_WORDS).read_text(encoding="utf-8").split()
    texts = [" ".join(words[start : start + 1 + start % 13]) for start in range(0, len(words), 2)]
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
    return {**MASKED, "data.data_path": str(file)}


def distance(one: Any, other: Any) -> float:
    one, other = np.array(one), np.array(other)
    return float(np.max(np.abs(one - other) / np.abs(one)))


def test_ddp_keeps_them_apart(ranks: Pool, tmp_path: Path, masked: dict[str, Any]) -> None:
    alone = data_parallel.train(Group(), tmp_path / "one", masked)
    results = ranks(2, data_parallel.train, tmp_path / "two", masked)
    assert len(alone.numbers) == STEPS
    for trained in results:
        assert distance(alone.numbers, trained.numbers) < 1e-9
        assert trained.validation.keys() == alone.validation.keys()
        assert distance(list(alone.validation.values()), list(trained.validation.values())) < 1e-9
    mixed = data_parallel.train(Group(), tmp_path / "mixed", {**masked, "data.documents": "separated"})
    assert distance(alone.numbers, mixed.numbers) > 1e-3, "the setting acts"


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fsdp_keeps_them_apart(ranks: Pool, tmp_path: Path, world: int, masked: dict[str, Any]) -> None:
    alone = sharding.train(Group(), tmp_path / "one", masked)
    traces = ranks(world, sharding.train, tmp_path / "more", {**masked, "system.mode": "fsdp"})
    assert len(alone) == STEPS
    assert all(trace == traces[0] for trace in traces)
    assert distance(sharding.numbers(alone), sharding.numbers(traces[0])) < 1e-9
