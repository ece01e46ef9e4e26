"""Rows of masked-LM: every layout, nothing lost, padding only at the end, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.contracts import Vocabulary
from lockstep.errors import ConfigError
from lockstep.objectives import mlm
from lockstep.objectives.mlm import Mlm, build
from lockstep.objectives.options import MlmOptions

SIZE = 64
PAD, CLS, SEP, MASK = 0, 7, 9, 63  # scattered: nothing may rely on 0..4
VOCABULARY = Vocabulary(SIZE, {"pad": PAD, "cls": CLS, "sep": SEP, "mask": MASK}, np.zeros(SIZE, bool))
DOCUMENTS = st.lists(st.lists(st.integers(10, 50), max_size=30), max_size=12)
CONTEXTS, BLOCKS = st.integers(3, 14), st.integers(1, 60)


def made(documents: str) -> Mlm:
    return build(MlmOptions(), documents=documents).with_vocabulary(VOCABULARY)


def packed(documents: list[list[int]], context: int, mode: str, *, block: int) -> np.ndarray:
    """All rows of some documents, in blocks of about so many tokens."""
    objective, separator = made(mode), -1 if mode == "joined" else 1
    arrays = (np.array(document, dtype=np.uint16) for document in documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlm, "PACK_TOKENS", block)
        blocks = [made["tokens"] for made in objective.pack(arrays, context_length=context, separator=separator)]
    assert all(rows.dtype == np.int32 and len(rows) for rows in blocks)
    return np.concatenate([np.empty((0, context), np.int32), *blocks])


def split(row: list[int], mark: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in row:
        parts.append([]) if token == mark else parts[-1].append(token)
    return parts


@settings(deadline=None, max_examples=150)
@given(documents=DOCUMENTS, context=CONTEXTS, block=BLOCKS, mode=st.sampled_from(["masked", "padded"]))
def test_apart_every_piece_has_its_marks_and_nothing_is_lost(
    documents: list[list[int]], context: int, block: int, mode: str
) -> None:
    rows = packed(documents, context, mode, block=block).tolist()
    pieces: list[list[int]] = []
    for row in rows:
        body = row[: len(row) - next((n for n, token in enumerate(reversed(row)) if token != PAD), 0)]
        assert PAD not in body, "padding only at the end"
        before, *found = split(body, CLS)
        assert before == []
        assert all(piece[-1] == SEP and len(piece) > 1 and SEP not in piece[:-1] for piece in found)
        assert len(found) == 1 or mode == "masked"
        pieces += [piece[:-1] for piece in found]
    whole = [document for document in documents if document]
    place = 0
    for document in whole:  # pieces of one document follow each other, and no piece is of two
        gathered: list[int] = []
        while len(gathered) < len(document):
            gathered += pieces[place]
            place += 1
        assert gathered == document
    assert place == len(pieces)
    padding = [row.count(PAD) for row in rows]
    if mode == "masked":
        assert all(count <= 2 for count in padding[:-1]), "less room than the shortest piece takes"
    else:
        assert len(rows) == sum(math.ceil(len(document) / (context - 2)) for document in whole)


@settings(deadline=None, max_examples=100)
@given(documents=DOCUMENTS, context=CONTEXTS, block=BLOCKS, mode=st.sampled_from(["separated", "joined"]))
def test_together_rows_are_the_stream(documents: list[list[int]], context: int, block: int, mode: str) -> None:
    end = [SEP] if mode == "separated" else []
    stream = [token for document in documents if document for token in document + end]
    rows = packed(documents, context, mode, block=block)
    assert (rows[:, 0] == CLS).all()
    body = rows[:, 1:].flatten().tolist()
    assert body[: len(stream)] == stream
    assert set(body[len(stream) :]) <= {PAD}
    assert len(rows) == math.ceil(len(stream) / (context - 1))


@pytest.mark.parametrize("mode", ["masked", "padded", "separated", "joined"])
@pytest.mark.parametrize("length", [40, 100_000, 3_000_000])
def test_blocks_stream(mode: str, length: int) -> None:
    """The first rows come before the last document is asked for, and one long document makes no longer block."""
    asked = 0

    def endless() -> Iterator[np.ndarray]:
        nonlocal asked
        while True:
            asked += 1
            yield np.full(length, 20, dtype=np.int32)

    block = next(made(mode).pack(endless(), context_length=64, separator=1))["tokens"]
    assert asked <= mlm.PACK_TOKENS // length + 2
    assert block.size <= 1.05 * (mlm.PACK_TOKENS + length)


def test_rows_too_short_for_a_token_are_refused() -> None:
    with pytest.raises(ConfigError, match="no room"):
        made("masked").pack([np.arange(3)], context_length=2, separator=1)
