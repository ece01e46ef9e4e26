"""From a configuration to rows on disk: what was chosen, looked up in the cache or built."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import registry
from lockstep.data.cache import Table, key_of, open_or_build, parts_folder
from lockstep.data.histories import file_of
from lockstep.data.options import HistoryOptions
from lockstep.data.tokenize import TokenizerFile, load_tokenizer
from lockstep.engine import windows
from lockstep.engine.building import Builder
from lockstep.engine.choices import (
    TRAINED,
    Room,
    cache_roots,
    choose_source,
    choose_tokenizer,
    existing,
    is_of_hub,
    is_own,
    key_parts,
    with_mask,
)
from lockstep.errors import DataError
from lockstep.models import shapes
from lockstep.rundir import MANIFEST
from lockstep.runtime import env, hub

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Objective
    from lockstep.data.options import DataOptions
    from lockstep.runtime.group import Group
    from lockstep.worlds.observed import Histories

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Data ready for training."""

    train: Table
    validation: Table
    words: TokenizerFile | None  # of text
    key: str
    folder: Path
    source: str
    notices: tuple[str, ...]  # what was chosen for the user; already logged
    histories: Histories | None = None  # of agents

    @property
    def tokenizer(self) -> TokenizerFile:
        """Of text: whoever asks has some."""
        assert self.words is not None, "agents have no tokenizer"
        return self.words


def prepare(config: RunConfig, objective: Objective, *, vocab_limit: int) -> Prepared:
    """Open the dataset a configuration asks for, building it first if need be."""
    if isinstance(config.data, HistoryOptions):
        from lockstep.engine import histories  # which needs torch, and a launcher asks only is_prepared

        return histories.prepare(config, actions=vocab_limit)
    roots = cache_roots(config.data)
    options = config.data.model_copy(update={"cache_dir": str(roots[0])})
    source = choose_source(options)
    choice = choose_tokenizer(
        options,
        source,
        model_path=config.model.model_path,
        room=Room.of(config, vocab_limit),
        marks_places=config.objective.marks_places,
    )
    notices = tuple(filter(None, (choice.notice, windows.check(config, source, choice, rows=vocab_limit))))
    told = logging.INFO if env.detect().rank == 0 else logging.DEBUG  # the same for every worker: one tells it
    for notice in notices:
        logger.log(logging.WARNING if told == logging.INFO else told, notice)
    parts = key_parts(config, objective.columns, source=source, choice=choice)
    key = key_of(parts)
    logger.log(told, "Dataset: %s", source.name)
    logger.log(told, "Context length: %d", config.training.context_length)
    builder = Builder(config, objective, source, choice, parts, vocab_limit)
    if fetch_to := getattr(source, "fetch_to", None):
        fetch_to(parts_folder(roots[0], key))
    folder, built = open_or_build(key, roots, builder.build)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if built:
        logger.info("[Cache] Saved to %s", folder)
    else:
        logger.log(told, "[Cache] Loaded train data from cache (%d tokens)", meta["tokens"]["train"])
    train, validation = Table(folder / "train"), Table(folder / "validation")
    logger.log(told, "Dataset ready: %d samples", train.rows)
    logger.log(told, "Cache location: %s", folder)
    return Prepared(train, validation, load_tokenizer(folder), key, folder, source.name, notices)


def check_same(key: str, group: Group) -> None:
    """Refuse to train if the workers have prepared different data: each would learn something else, unnoticed."""
    place = env.detect()
    said: list[tuple[str, int]] = [(str(key), int(node)) for key, node in group.gather([key, place.node])]
    if len({key for key, _ in said}) == 1:
        return
    who: dict[str, list[str]] = {}
    for rank, (key, node) in enumerate(said):
        who.setdefault(key, []).append(f"rank {rank} (node {node})")
    listed = "\n".join(f"    {key}: {', '.join(ranks)}" for key, ranks in who.items())
    error = DataError(
        f"the workers have prepared different data:\n{listed}",
        where="data",
        hint="the same files under the same path on every node (also tokenizers and imdb_train.json), or a shared disk",
    )
    error.secondary = group.rank != 0  # one tells it for all
    raise error


def asks_hub(options: DataOptions) -> bool:
    """Whether the hub would have to be asked what a name stands for."""
    name, tokenizer = options.dataset_name, options.tokenizer_name
    if is_of_hub(name) and not registry.load("sources", "hf", "is_pinned")(options):
        return True
    if tokenizer in (None, "auto", "bytes", *TRAINED) or existing(tokenizer):
        return False
    return hub.cached(hub.model(tokenizer), "tokenizer.json") is None


def is_prepared(config: RunConfig) -> bool:
    """Whether the dataset lies in the cache, asked without loading torch; False also where that cannot be known."""
    options, objective = config.data, type(config.objective)
    if isinstance(options, HistoryOptions):
        return file_of(options).exists()
    if config.objective.name != objective.model_fields["name"].default or is_own(options.dataset_name):
        return False
    if shapes.known(config.model.model_path) is None and not Path(config.model.model_path).is_dir():
        return False
    roots = cache_roots(options)
    options = options.model_copy(update={"cache_dir": str(roots[0])})
    shape = shapes.resolve(config.model, context_length=config.training.context_length)
    if asks_hub(options):
        return False
    source = choose_source(options)
    choice = choose_tokenizer(
        options,
        source,
        model_path=config.model.model_path,
        room=Room.of(with_mask(config, shape), shape.vocab_size),
        marks_places=config.objective.marks_places,
    )
    key = key_of(key_parts(config, objective.columns_of(options.documents), source=source, choice=choice))
    return any((root / key / MANIFEST).is_file() for root in roots)
