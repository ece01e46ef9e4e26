"""From a configuration to rows on disk: which source, which tokenizer, the split, the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import __version__, registry
from lockstep.data.cache import Table, key_of, open_or_build, write_table
from lockstep.data.options import DataOptions
from lockstep.data.tokenize import (
    MIN_BPE_VOCAB,
    AlphabetTokenizer,
    ByteTokenizer,
    TokenizerFile,
    load_tokenizer,
    train_bpe,
)
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.models import hub, shapes
from lockstep.rundir import MANIFEST
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Array, Objective, Source

logger = logging.getLogger(__name__)

OTHER_CACHE = Path("cache/datasets")  # where an earlier version of the documentation put it: read, never written
OWN_SOURCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:\w+")  # pkg.module:build
BPE_CHARACTERS = 64 << 20  # of the training split; more text does not make a better tokenizer, only a later one
CHUNK_CHARACTERS = 1 << 20
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Prepared:
    """Data ready for training."""

    train: Table
    validation: Table
    tokenizer: TokenizerFile
    key: str
    folder: Path
    source: str
    notices: tuple[str, ...]  # what was chosen for the user; already logged


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer that may have to be trained first: what decides it, and how to get it from training texts."""

    name: str
    spec: Mapping[str, Any]
    make: Callable[[Iterable[str]], TokenizerFile]
    notice: str = ""


def prepare(config: RunConfig, objective: Objective, *, vocab_limit: int) -> Prepared:
    """Open the dataset a configuration asks for, building it first if need be."""
    roots = cache_roots(config.data)
    options = config.data.model_copy(update={"cache_dir": str(roots[0])})
    source, source_notice = choose_source(options)
    choice = choose_tokenizer(options, source, model_path=config.model.model_path, vocab_limit=vocab_limit)
    notices = tuple(notice for notice in (source_notice, choice.notice) if notice)
    told = logging.INFO if env.detect().rank == 0 else logging.DEBUG  # the same for every worker: one tells it
    for notice in notices:
        logger.log(logging.WARNING if told == logging.INFO else told, notice)
    parts = key_parts(config, objective.columns, source=source, choice=choice)
    key = key_of(parts)
    logger.log(told, "Dataset: %s", source.name)
    logger.log(told, "Context length: %d", config.training.context_length)
    builder = _Builder(config, objective, source, choice, parts, vocab_limit)
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


def is_prepared(config: RunConfig) -> bool:
    """Whether the dataset lies in the cache, asked without loading torch; False also where that cannot be known."""
    options, objective = config.data, type(config.objective)
    if config.objective.name != objective.model_fields["name"].default or OWN_SOURCE.fullmatch(options.dataset_name):
        return False
    if shapes.known(config.model.model_path) is None and not Path(config.model.model_path).is_dir():
        return False
    roots = cache_roots(options)
    options = options.model_copy(update={"cache_dir": str(roots[0])})
    shape = shapes.resolve(config.model, context_length=config.training.context_length)
    source, _ = choose_source(options)
    if options.tokenizer_name not in (None, "auto", "builtin", "bytes") and not _existing(options.tokenizer_name):
        return False  # the hub would have to be asked
    choice = choose_tokenizer(options, source, model_path=config.model.model_path, vocab_limit=shape.vocab_size)
    key = key_of(key_parts(config, objective.columns, source=source, choice=choice))
    return any((root / key / MANIFEST).is_file() for root in roots)


def cache_roots(options: DataOptions) -> list[Path]:
    """Where to look for caches; the first is written to. DATASET_CACHE_DIR moves the default, not a named folder."""
    default = DataOptions.model_fields["cache_dir"].default
    named = options.cache_dir if options.cache_dir != default else env.get("DATASET_CACHE_DIR")
    try:
        return [Path(named).expanduser()] if named else [Path(default), OTHER_CACHE]
    except RuntimeError as error:
        raise ConfigError(f"{named!r} is no folder: {error}", where="data.cache_dir") from error


def key_parts(
    config: RunConfig, columns: Mapping[str, str], *, source: Source, choice: TokenizerChoice
) -> dict[str, Any]:
    """All that decides the rows, and nothing else: not the seed, not the learning rate."""
    return {
        "objective": config.objective.name,
        "columns": dict(columns),
        "source": source.name,
        "content": dict(source.fingerprint()),
        "tokenizer": dict(choice.spec),
        "context_length": config.training.context_length,
        "max_train_samples": config.data.max_train_samples,
        "validation_fraction": config.data.validation_fraction,
    }


def choose_source(options: DataOptions) -> tuple[Source, str]:
    """The source a configuration asks for, and what to say if it left the choice to us."""
    name, notice = options.dataset_name, ""
    if name == "auto":
        name = "text" if options.data_path is not None else "builtin"
        if name == "builtin":
            notice = "No dataset named: training on the text built into Python (data.data_path=FILE for your own)"
    if not OWN_SOURCE.fullmatch(name) and name not in registry.names("sources"):
        raise NotFoundError(
            f"dataset {name!r} would come from the hub, which this version does not reach yet",
            where="data.dataset_name",
            hint="download it and use data.data_path=FILE (.txt .jsonl .json .parquet), or data.dataset_name=builtin",
        )
    if options.data_path is not None and name in ("builtin", "synthetic"):
        raise ConfigError(
            f"data.data_path is set, but dataset {name!r} reads no files",
            where="data.dataset_name",
            hint="data.dataset_name=text, or leave data_path out",
        )
    return registry.load("sources", name, "build")(options), notice


def choose_tokenizer(options: DataOptions, source: Source, *, model_path: str, vocab_limit: int) -> TokenizerChoice:
    """The tokenizer a configuration asks for."""
    name, notice = options.tokenizer_name or "auto", ""
    if name == "auto":
        alphabet = getattr(source, "alphabet", None)  # of a source of symbols
        if alphabet is not None:
            return _ready("alphabet", AlphabetTokenizer(alphabet), vocab_limit)
        if own := _existing(f"{model_path}/tokenizer.json"):
            return _ready(model_path, load_tokenizer(own), vocab_limit)
        name = "builtin"
        notice = (
            "No tokenizer named: using a byte-level BPE trained on this text (data.tokenizer_name=FOLDER for your own)"
        )
    if name == "builtin":
        size = min(options.tokenizer_vocab_size, vocab_limit)
        if size < MIN_BPE_VOCAB:
            raise _does_not_fit("builtin", MIN_BPE_VOCAB, vocab_limit)
        return TokenizerChoice(name, {"builtin": size}, lambda texts: train_bpe(texts, size), notice)
    if name == "bytes":
        return _ready(name, ByteTokenizer(), vocab_limit)
    if path := _existing(name):
        return _ready(name, load_tokenizer(path), vocab_limit)
    return _ready(name, _from_hub(options, name), vocab_limit)


def _from_hub(options: DataOptions, name: str) -> TokenizerFile:
    """tokenizer.json of a model on the hub, or one message. The token goes into the header and nowhere else."""
    secret = options.hf_token.get_secret_value() if options.hf_token else env.get("HF_TOKEN")
    try:
        if not hub.looks_like_id(name):
            raise NotFoundError("not a folder, not a hub id")
        return load_tokenizer(hub.download(name, "tokenizer.json", token=secret or None))
    except NotFoundError as error:
        raise NotFoundError(
            f"no tokenizer {name!r}: {error.what}",
            where="data.tokenizer_name",
            hint="check the name and the network; gated models need HF_TOKEN; or use data.tokenizer_name=builtin",
        ) from error


def _existing(name: str) -> Path | None:
    """The file or folder of this name; a name that could not be one's is nobody's."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long; the home of an unknown user
        return None


def _ready(name: str, tokenizer: TokenizerFile, vocab_limit: int) -> TokenizerChoice:
    """A tokenizer that needs no training."""
    if tokenizer.vocab_size > vocab_limit:
        raise _does_not_fit(name, tokenizer.vocab_size, vocab_limit)
    return TokenizerChoice(name, {"file": tokenizer.fingerprint()}, lambda _: tokenizer)


def _does_not_fit(name: str, vocab_size: int, vocab_limit: int) -> ConfigError:
    return ConfigError(
        f"tokenizer {name!r} has {vocab_size} ids, the model has room for {vocab_limit}",
        where="data.tokenizer_name",
        hint=f"model.vocab_size={vocab_size}, or another data.tokenizer_name",
    )


@dataclass(frozen=True)
class _Builder:
    """Fills a cache folder."""

    config: RunConfig
    objective: Objective
    source: Source
    choice: TokenizerChoice
    parts: Mapping[str, Any]
    vocab_limit: int

    def build(self, folder: Path) -> None:
        """Split, tokenizer, rows of both splits, and the description of it all."""
        logger.info("Preparing dataset cache...")
        place = self.config.data.data_path or f"dataset {self.source.name}"
        split = Split.of(self._documents(), self.config.data.validation_fraction, where=place)
        tokenizer = self.choice.make(_limited(split.texts(self._documents(), "train"), BPE_CHARACTERS))
        assert tokenizer.vocab_size <= self.vocab_limit
        tokenizer.save(folder)
        rows, tokens = {}, {}
        for name in ("train", "validation"):
            stream = _Tokens(split.texts(self._documents(), name), tokenizer, name)
            rows[name] = self._write(folder / name, stream, tokenizer)
            tokens[name] = stream.tokens
            if not rows[name]:
                raise self._too_little(name, split.counts[name], stream.tokens)
        if dict(self.source.fingerprint()) != self.parts["content"]:
            raise DataError("the text changed while it was being read", where=self.source.name, hint="start again")
        meta = {
            "made_by": f"lockstep {__version__}",
            "source": self.source.name,
            "tokenizer": {"name": self.choice.name, "vocab_size": tokenizer.vocab_size,
                          "separator": tokenizer.separator, "fingerprint": tokenizer.fingerprint()},
            "objective": self.config.objective.name,
            "context_length": self.config.training.context_length,
            "documents": split.counts,
            "rows": rows,
            "tokens": tokens,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "key": dict(self.parts),
        }  # fmt: skip
        with (folder / "meta.json").open("x", encoding="utf-8") as file:
            file.write(json.dumps(meta, indent=2, ensure_ascii=False) + "\n")

    def _documents(self) -> Iterator[str]:
        return islice(self.source.documents(), self.config.data.max_train_samples)

    def _write(self, folder: Path, stream: Iterable[Array], tokenizer: TokenizerFile) -> int:
        """Pack one split into rows; token ids are stored in two bytes where they fit."""
        blocks = self.objective.pack(
            stream, context_length=self.config.training.context_length, separator=tokenizer.separator
        )
        narrow = {"tokens": "uint16"} if tokenizer.vocab_size <= 1 << 16 else {}
        return write_table(folder, blocks, columns=self.objective.columns, stored=narrow)

    def _too_little(self, name: str, documents: int, tokens: int) -> DataError:
        need = self.config.training.context_length + 1
        smaller = (
            f"training.context_length={max(1, tokens - 1)} or less" if tokens > 1 else "data.data_path with more text"
        )
        other = "data.validation_fraction with more" if name == "validation" else "more text"
        return DataError(
            f"too little text for one {name} row: {documents} documents give {tokens} tokens, a row takes {need}",
            where=f"dataset {self.source.name}",
            hint=f"{smaller}, or {other}",
        )


@dataclass(frozen=True)
class Split:
    """Which documents are kept for validation: those whose content hashes low, so copies are never on both sides."""

    threshold: int
    counts: Mapping[str, int]

    @staticmethod
    def of(documents: Iterable[str], fraction: float, *, where: str = "data") -> Split:
        """Hash every document and put the given share of the different ones, at least one, under the threshold."""
        hashes = np.fromiter((_hash(text) for text in documents), np.uint64)
        different = np.unique(hashes)
        if len(different) < 2:
            raise DataError(
                f"{len(hashes)} documents, {len(different)} of them different: too few to keep one for validation",
                where=where,
                hint="data.data_path with more text",
            )
        threshold = different[min(max(1, round(fraction * len(different))), len(different) - 1) - 1]
        validation = int((hashes <= threshold).sum())
        return Split(int(threshold), {"train": len(hashes) - validation, "validation": validation})

    def texts(self, documents: Iterable[str], name: str) -> Iterator[str]:
        """The documents of one side."""
        return (text for text in documents if (_hash(text) <= self.threshold) == (name == "validation"))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _limited(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Whole texts until so many characters have gone by."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


class _Tokens:
    """Ids of each document, a chunk of text at a time, counting them and saying how far it is."""

    def __init__(self, texts: Iterator[str], tokenizer: TokenizerFile, name: str) -> None:
        self.texts, self.tokenizer, self.name = texts, tokenizer, name
        self.documents = self.tokens = 0

    def __iter__(self) -> Iterator[Array]:
        told = time.monotonic()
        while chunk := list(_limited(self.texts, CHUNK_CHARACTERS)):
            for ids in self.tokenizer.encode(chunk):
                self.documents += 1
                self.tokens += len(ids) + 1  # and its separator
                yield ids
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                logger.info("%s: %d documents, %d tokens so far", self.name, self.documents, self.tokens)
