"""Made rows: as long, as frequent and as special as they claim, packed and collated by the real objectives."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lockstep.bench import rows
from lockstep.config.load import load
from lockstep.contracts import Draw, Rows
from lockstep.engine.build import make_objective
from lockstep.errors import ConfigError


@pytest.mark.parametrize("row", [64, 512, 8192])
def test_lengths_fill_what_they_should(row: int) -> None:
    found = rows.lengths(20_000, row=row, random=np.random.default_rng(row))
    assert found.mean() / row == pytest.approx(rows.FILL, rel=0.02 + 1 / row)
    assert 1 <= found.min() < found.max() <= row
    assert np.std(np.log(found[(found > 1) & (found < row)])) == pytest.approx(rows.SPREAD, rel=0.25)


@pytest.mark.parametrize(("documents", "marks"), [("masked", 2), ("padded", 2), ("separated", 1)])
def test_the_longest_document_fills_a_row_with_its_marks(documents: str, marks: int) -> None:
    overrides = {"data.documents": documents, "training.context_length": 128}
    config = load("mlm", preset="tiny", overrides=overrides).config
    found = [len(each) for each in rows.documents(1000, config=config, vocab_size=256, seed=3)]
    assert max(found) + marks == 128


def test_ids_are_ordinary_and_some_are_frequent() -> None:
    found = rows.token_ids(200_000, vocab_size=30522, random=np.random.default_rng(3))
    assert found.min() == len(rows.SPECIALS)
    assert 30_000 < found.max() < 30522
    counts = np.bincount(found)[len(rows.SPECIALS) :]
    assert counts[0] / counts[9] == pytest.approx(math.log(2) / math.log(1.1), rel=0.1)  # about 1/k
    assert len(np.unique(found)) > 10_000


@pytest.mark.parametrize(
    ("family", "documents"),
    [("llama", "separated"), ("llama", "masked"), ("mlm", "masked"), ("mlm", "padded"), ("llada", "separated"),
     ("llada", "answers")],
)  # fmt: skip
def test_rows_of_every_kind(tmp_path: Path, family: str, documents: str) -> None:
    overrides = {"data.documents": documents, "training.batch_size": 16, "training.context_length": 128}
    config = load(family, preset="tiny", overrides=overrides).config
    objective = make_objective(config)
    if told := getattr(objective, "with_vocabulary", None):
        objective = told(rows.vocabulary(256))
    table = rows.make_table(tmp_path / "rows", objective, config, vocab_size=256)
    assert table.rows == rows.STEPS * 16
    ids = np.arange(16)
    columns = table.take(ids)
    batch = objective.collate(Rows(ids, np.zeros_like(ids), ids, columns), Draw(1, 0, 16, 10, table.take(ids)))
    assert batch.rows == 16
    assert sum(batch.weights.values()) > 0
    fill = batch.tokens / (16 * 128)
    assert fill == pytest.approx(rows.FILL, abs=0.12) if documents == "padded" else fill > 0.2


def test_a_vocabulary_of_marks_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 ids leave none"):
        rows.vocabulary(5)
