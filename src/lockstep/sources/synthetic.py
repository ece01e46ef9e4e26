"""Text whose entropy is known exactly: a Markov chain over 16 letters, to prove that training learns what it should.

A document is the chain between two visits of the letter `a`: it begins as the chain goes on after an `a`, and ends
just before the next `a` that comes after DOCUMENT_LETTERS letters. The tokenizer of this alphabet puts `a` after each
document, so documents joined in any order are again exactly the chain: no separator disturbs the entropy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.data.options import DataOptions

SEED = 7
STATES = 16
CONCENTRATION = 0.15  # of the Dirichlet each row of the transition matrix is drawn from
UNIFORM_SHARE = 0.02  # mixed in, so that every transition is possible
DOCUMENTS = 1024
DOCUMENT_LETTERS = 4096
BLOCK_DOCUMENTS = 128  # drawn side by side


def transitions() -> Array:
    """The transition matrix: row = state, column = next state."""
    drawn = np.random.default_rng(SEED).dirichlet(np.full(STATES, CONCENTRATION), size=STATES)
    return (1 - UNIFORM_SHARE) * drawn + UNIFORM_SHARE / STATES


def stationary() -> Array:
    """How often the chain is in each state."""
    system = np.vstack([transitions().T - np.eye(STATES), np.ones(STATES)])
    return np.linalg.lstsq(system, np.append(np.zeros(STATES), 1.0), rcond=None)[0]


def entropy(length: int | None = None) -> float:
    """Nats per letter that no model can go below, given the letter before.

    With a length: the mean over a text of that many letters whose first is predicted from nothing.
    """
    matrix, share = transitions(), stationary()
    rate = float(-(share[:, None] * matrix * np.log(matrix)).sum())
    if length is None:
        return rate
    return (float(-(share * np.log(share)).sum()) + (length - 1) * rate) / length


class SyntheticSource:
    """The chain, cut into documents."""

    name = "synthetic"
    alphabet = "abcdefghijklmnop"

    def fingerprint(self) -> Mapping[str, Any]:
        return {"chain": "markov-16", "seed": SEED, "documents": DOCUMENTS, "letters": DOCUMENT_LETTERS}

    def documents(self) -> Iterator[str]:
        for block in range(DOCUMENTS // BLOCK_DOCUMENTS):
            yield from _documents(np.random.default_rng([SEED, block]))


def _documents(random: np.random.Generator) -> Iterator[str]:
    """One block of documents, all walked at once until each has come back to `a`."""
    thresholds = transitions().cumsum(axis=1)
    states = np.zeros(BLOCK_DOCUMENTS, np.int64)
    ends = np.full(BLOCK_DOCUMENTS, -1)
    path: list[Array] = []
    while (ends < 0).any():
        drawn = random.random(BLOCK_DOCUMENTS)
        states = np.minimum((thresholds[states] < drawn[:, None]).sum(axis=1), STATES - 1)
        if len(path) >= DOCUMENT_LETTERS:
            ends[(ends < 0) & (states == 0)] = len(path)
        path.append(states)
    letters = (np.stack(path, axis=1) + ord("a")).astype(np.uint8)
    for row, end in zip(letters, ends, strict=True):
        yield row[:end].tobytes().decode("ascii")


def build(options: DataOptions) -> SyntheticSource:  # noqa: ARG001 - the chain has no settings
    return SyntheticSource()
