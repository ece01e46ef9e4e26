"""Rows to measure with: made here, so that nothing is fetched or tokenised, but packed by the objective itself.

Ids are drawn as those of a text lie (the k-th id as often as 1/k), over the whole vocabulary: what the embedding's
gradient costs depends on it. Documents have log-normal lengths with a mean of FILL of a row, as natural sentences have
in rows of 512. Agents learn from real histories, of a source learner that is quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.contracts import PROMPT, Objective, Vocabulary
from lockstep.data.cache import Table, write_table
from lockstep.data.options import HistoryOptions
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Array

FILL = 0.244  # of a row, on average
SPREAD = 0.8  # standard deviation of the logarithm of a length
SPECIALS = {"pad": 0, "cls": 1, "sep": 2, "unk": 3, "mask": 4}
SEPARATOR = SPECIALS["sep"]
PROMPT_SHARE = 0.25  # of a conversation
STEPS = 4  # whose rows differ
ALONE = ("padded", "answers")  # one document in a row


def settings(config: RunConfig, folder: Path) -> dict[str, Any]:
    """What has to be set so that nothing is fetched: weights that exist are as fast as random ones."""
    found: dict[str, Any] = {"model.init": "random", "report.progress": "off"}
    if isinstance(config.data, HistoryOptions):
        learner = {"data.alg": "PSRL"} if config.data.alg == "PPO" else {}
        return {**found, **learner, "data.data_path": str(folder / "histories"), "data.collect": True}
    return found


def vocabulary(size: int) -> Vocabulary:
    """Of made ids: the first few are special."""
    if size <= len(SPECIALS):
        raise ConfigError(
            f"{size} ids leave none beside the {len(SPECIALS)} special ones",
            where="model.vocab_size",
            hint=f"at least {len(SPECIALS) + 1}",
        )
    return Vocabulary(size, SPECIALS, np.zeros(size, bool), SEPARATOR)


def lengths(count: int, *, row: int, random: np.random.Generator) -> Array:
    """Of so many documents: log-normal, at most a row long, FILL of one on average."""
    drawn = random.standard_normal(count) * SPREAD
    low, high = 0.0, math.log(row) + 3
    for _ in range(40):  # what does not fit into a row is cut, which lowers the mean
        middle = (low + high) / 2
        too_long = np.minimum(np.exp(drawn + middle), row).mean() > FILL * row
        low, high = (low, middle) if too_long else (middle, high)
    return np.maximum(1, np.minimum(np.exp(drawn + low), row)).astype(np.int64)


def token_ids(count: int, *, vocab_size: int, random: np.random.Generator) -> Array:
    """Ordinary ids, the k-th of them as often as 1/k."""
    ordinary = vocab_size - len(SPECIALS)
    return len(SPECIALS) + np.floor(np.exp(random.random(count) * math.log(ordinary + 1))).astype(np.int64) - 1


def documents(rows: int, *, config: RunConfig, vocab_size: int, seed: int) -> Iterator[Array]:
    """Enough to fill so many rows."""
    random, row = np.random.default_rng(seed), config.training.context_length
    marks = 2 if config.data.documents in ("masked", "padded") else 1  # around each, or after it
    count = rows if config.data.documents in ALONE else 8 + math.ceil(1.2 * rows / FILL)
    sizes = np.maximum(1, lengths(count, row=row, random=random) - marks)
    ids = token_ids(int(sizes.sum()), vocab_size=vocab_size, random=random)
    for document in np.split(ids, np.cumsum(sizes)[:-1]):
        if config.data.documents == "answers":
            document[: int(PROMPT_SHARE * len(document))] |= PROMPT
        yield document


def make_table(folder: Path, objective: Objective, config: RunConfig, *, vocab_size: int) -> Table:
    """Rows of a few steps as the objective packs them, on disk as a run has them."""
    training = config.training
    wanted = STEPS * training.batch_size * training.grad_accum_nums
    made = documents(wanted, config=config, vocab_size=vocab_size, seed=config.system.seed)
    blocks = objective.pack(made, context_length=training.context_length, separator=SEPARATOR)
    write_table(folder, _first(blocks, wanted), columns=objective.columns, stored={})
    return Table(folder)


def _first(blocks: Iterator[Mapping[str, Array]], wanted: int) -> Iterator[Mapping[str, Array]]:
    for block in blocks:
        yield {name: column[:wanted] for name, column in block.items()}
        wanted -= len(next(iter(block.values())))
        if wanted <= 0:
            return
