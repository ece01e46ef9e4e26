"""The Markov source: the entropy it promises is the entropy it has."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.sources import synthetic
from lockstep.sources.synthetic import SyntheticSource, entropy, stationary, transitions


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(SyntheticSource().documents())


def pairs(documents: list[str]) -> np.ndarray:
    """How often each letter follows each, with the separator `a` after every document."""
    states = np.frombuffer("".join(text + "a" for text in documents).encode(), np.uint8) - ord("a")
    counts = np.zeros((16, 16))
    np.add.at(counts, (states[:-1], states[1:]), 1)
    return counts


def test_the_entropies_of_the_book() -> None:
    """science.md C3 and C4: per letter of texts of 64 and 32 letters whose first is not given."""
    assert entropy(64) == pytest.approx(1.6379, abs=5e-5)
    assert entropy(32) == pytest.approx(1.6523, abs=5e-5)
    assert entropy() == pytest.approx(1.6236, abs=5e-5)  # every letter predicted from the one before
    assert entropy(10**9) == pytest.approx(entropy())
    assert np.allclose(stationary() @ transitions(), stationary())


def test_joined_documents_are_exactly_the_chain(documents: list[str]) -> None:
    """Also in another order, as a split mixes them."""
    shuffled = [documents[index] for index in np.random.default_rng(0).permutation(len(documents))]
    for texts in (documents, shuffled):
        counts, matrix = pairs(texts), transitions()
        visits = counts.sum(axis=1, keepdims=True)
        chi = float(((counts - visits * matrix) ** 2 / (visits * matrix)).sum())
        freedom = 16 * 15
        assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5
        measured = -(counts * np.log(matrix)).sum() / counts.sum()
        assert measured == pytest.approx(entropy(), abs=2e-3)


def test_a_cut_elsewhere_would_be_seen(documents: list[str]) -> None:
    """Negative control: documents cut at a fixed length do not join to the chain."""
    counts, matrix = pairs([text[:200] for text in documents]), transitions()
    visits = counts.sum(axis=1, keepdims=True)
    assert float(((counts - visits * matrix) ** 2 / (visits * matrix)).sum()) > 400


def test_documents_are_many_and_the_same_every_time(documents: list[str]) -> None:
    assert len(documents) == synthetic.DOCUMENTS == len(set(documents))
    assert set("".join(documents)) == set(SyntheticSource.alphabet)
    assert min(map(len, documents)) >= synthetic.DOCUMENT_LETTERS
    assert next(SyntheticSource().documents()) == documents[0]
