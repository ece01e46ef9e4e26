"""Filling a cache folder: the split, the tokenizer, the rows of both splits, and the description of it all."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lockstep import __version__
from lockstep.data.cache import write_table
from lockstep.engine.choices import speaking
from lockstep.engine.encoding import encoded_in_order, largest_id, length_of, pieces_of, too_large, too_many
from lockstep.engine.headway import Headway, counted
from lockstep.errors import DataError
from lockstep.objectives.options import CausalOptions
from lockstep.runtime import env
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Array, Document, Objective, Source
    from lockstep.data.tokenize import TokenizerFile
    from lockstep.engine.choices import TokenizerChoice

logger = logging.getLogger(__name__)

BPE_CHARACTERS = 64 << 20  # of the training split; more text does not make a better tokenizer, only a later one
BPE_PIECE_CHARACTERS = 1 << 16  # the library takes many times as much for each text while it counts words
HASHED_CHARACTERS = 1 << 20
SPLITS = ("train", "validation")
PARALLELISM = "TOKENIZERS_PARALLELISM"  # whether one call of the library uses all cores


@dataclass(frozen=True)
class Builder:
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
        with (
            env.changed(PARALLELISM, "false"),  # threads of ours, each at its own text, are quicker
            Headway(progress=self.config.report.progress) as headway,
        ):
            split = self._split(headway.reading(self._documents()))
            tokenizer = self._tokenizer(split, headway)
            tokenizer.save(folder)
            rows, tokens = self._write_splits(folder, split, tokenizer=tokenizer, headway=headway)
            headway.begin("Checking")
            for name in SPLITS:
                if not rows[name]:
                    raise self._too_little(name, split.counts[name], tokens[name])
            if dict(self.source.fingerprint()) != self.parts["content"]:
                raise DataError("the text changed while it was being read", where=self.source.name, hint="start again")
        meta = {
            "made_by": f"lockstep {__version__}",
            "source": self.source.name,
            "made_of": getattr(self.source, "made_of", ""),
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

    def write_rows(self, folder: Path, documents: Iterable[Array], tokenizer: TokenizerFile) -> int:
        """Pack documents into rows; token ids are stored in two bytes where they fit."""
        separator = tokenizer.separator if self._separated else -1
        objective = speaking(self.objective, tokenizer)
        blocks = objective.pack(documents, context_length=self.config.training.context_length, separator=separator)
        stored = {"tokens": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"}
        return write_table(folder, blocks, columns=self.objective.columns, stored=stored)

    def write_documents(self, folder: Path, documents: Iterable[Document], tokenizer: TokenizerFile) -> tuple[int, int]:
        """(rows, tokens) of a table of documents, encoded on all cores."""
        tokens = 0

        def encoded() -> Iterator[Array]:
            nonlocal tokens
            for batch in encoded_in_order(documents, tokenizer):
                for _, ids in batch:
                    tokens += self.token_count(ids)
                    yield ids

        return self.write_rows(folder, encoded(), tokenizer), tokens

    def token_count(self, ids: Array) -> int:
        """What a document adds to the tokens: its ids and its separator; an empty one nothing."""
        return len(ids) + self._separated if len(ids) else 0

    @property
    def _separated(self) -> bool:
        whole = self._ready_split is not None and self.config.data.documents != "answers"  # windows have no ends
        return self.config.data.documents != "joined" and not whole

    @property
    def _ready_split(self) -> frozenset[int] | None:
        """Hashes of what a source keeps for validation itself; None: it does not."""
        return getattr(self.source, "held_out", None)

    def _split(self, documents: Iterable[Document]) -> Split:
        if (held_out := self._ready_split) is not None:
            return Split.ready(documents, held_out)
        return Split.of(documents, self.config.data.validation_fraction, where=self._place)

    @property
    def _place(self) -> str:
        return self.config.data.data_path or f"dataset {self.source.name}"

    def _documents(self) -> Iterator[Document]:
        """Those that are used, in the order of the source."""
        if self._ready_split is not None:
            return self.source.documents()
        words = self.config.data.min_words
        long = (document for document in self.source.documents() if has_words(document, words))
        return islice(long, self.config.data.max_train_samples)

    def _tokenizer(self, split: Split, headway: Headway) -> TokenizerFile:
        """As chosen: made ready elsewhere, or trained on the training split."""
        headway.begin("Training the tokenizer")
        asked = 0

        def texts() -> Iterator[str]:
            nonlocal asked
            for document in split.texts(self._documents(), "train"):
                asked += 1
                if isinstance(document, str):
                    yield document

        with env.changed(PARALLELISM, "true"):  # which workers are told not to use
            tokenizer = self.choice.make(_limited(texts(), BPE_CHARACTERS))
        if asked and split.largest_id is not None:
            raise DataError(
                "the files hold token ids, and of ids no tokenizer can be trained",
                where=self._place,
                hint="data.tokenizer_name=FOLDER with the tokenizer they were made with, or bytes",
            )
        assert tokenizer.vocab_size <= self.vocab_limit
        if split.held_out is not None and split.largest_id is not None and split.largest_id >= self.vocab_limit:
            raise too_many(split.largest_id, self.vocab_limit)
        if split.largest_id is not None and split.largest_id >= tokenizer.vocab_size:
            raise too_large(split.largest_id, tokenizer.vocab_size)
        return tokenizer

    def _write_splits(
        self, folder: Path, split: Split, *, tokenizer: TokenizerFile, headway: Headway
    ) -> tuple[dict[str, int], dict[str, int]]:
        """(rows, tokens) of both splits, in one pass over the text: what is for validation waits in a file."""
        tokens: dict[str, int] = dict.fromkeys(SPLITS, 0)
        headway.begin("Tokenising", total=headway.characters)
        with tempfile.TemporaryFile(dir=folder) as later:

            def train() -> Iterator[Array]:
                for batch in encoded_in_order(self._documents(), tokenizer):
                    for document, ids in batch:
                        name = "validation" if split.holds_out(document) else "train"
                        tokens[name] += self.token_count(ids)
                        if name == "train":
                            yield ids
                        else:
                            _put(later, ids)
                    headway.done += sum(length_of(document) for document, _ in batch)
                    headway.tokens = sum(tokens.values())

            rows = {"train": self.write_rows(folder / "train", train(), tokenizer)}
            later.seek(0)
            rows["validation"] = self.write_rows(folder / "validation", _put_aside(later), tokenizer)
        return rows, tokens

    def _too_little(self, name: str, documents: int, tokens: int) -> DataError:
        objective, length = self.config.objective, self.config.training.context_length
        shifted = isinstance(objective, CausalOptions)  # each token is the target of the one before it
        pads = objective.marks_places or self.config.data.documents == "answers"  # a row need not be full
        need = 1 if pads else length + shifted
        smaller = (
            f"training.context_length={max(1, tokens - shifted)} or less"
            if tokens > shifted
            else "data.data_path with more text"
        )
        other = "data.validation_fraction with more" if name == "validation" else "more text"
        return DataError(
            f"too little text for one {name} row: {counted(documents)} give {tokens} tokens, a row takes {need}",
            where=f"dataset {self.source.name}",
            hint=f"{smaller}, or {other}",
        )


@dataclass(frozen=True)
class Split:
    """Which documents are kept for validation: those whose content hashes low, so copies are never on both sides."""

    threshold: int
    counts: Mapping[str, int]
    largest_id: int | None = None  # of documents that are ids; None: all are text
    held_out: frozenset[int] | None = None  # hashes, where a source says it itself

    @staticmethod
    def ready(documents: Iterable[Document], held_out: frozenset[int]) -> Split:
        """The split that a source brings with it."""
        counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
        largest = -1
        for document in documents:
            counts[SPLITS[document_hash(document) in held_out]] += 1
            if not isinstance(document, str):
                largest = max(largest, largest_id(document))
        return Split(0, counts, largest if largest >= 0 else None, held_out)

    @staticmethod
    def of(documents: Iterable[Document], fraction: float, *, where: str = "data") -> Split:
        """Hash every document and put the given share of the different ones, at least one, under the threshold."""
        largest = -1

        def hashed() -> Iterator[int]:
            nonlocal largest
            for document in documents:
                if not isinstance(document, str):
                    largest = max(largest, largest_id(np.asarray(document)))
                yield document_hash(document)

        hashes = np.fromiter(hashed(), np.uint64)
        different = np.unique(hashes)
        if len(different) < 2:
            raise DataError(
                f"{counted(len(hashes))}{', all alike' if len(hashes) > 1 else ''}: too few to keep one for validation",
                where=where,
                hint="data.data_path with more text, or a smaller data.min_words",
            )
        threshold = different[min(max(1, round(fraction * len(different))), len(different) - 1) - 1]
        validation = int((hashes <= threshold).sum())
        counts = {"train": len(hashes) - validation, "validation": validation}
        return Split(int(threshold), counts, largest if largest >= 0 else None)

    def holds_out(self, document: Document) -> bool:
        """Whether a document is kept for validation."""
        found = document_hash(document)
        return found <= self.threshold if self.held_out is None else found in self.held_out

    def texts(self, documents: Iterable[Document], name: str) -> Iterator[Document]:
        """The documents of one side."""
        return (document for document in documents if self.holds_out(document) == (name == "validation"))


def document_hash(document: Document) -> int:
    """64 bits of the content."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(document), HASHED_CHARACTERS):  # no second copy of a long one
        part = document[start : start + HASHED_CHARACTERS]
        digest.update(part.encode() if isinstance(part, str) else part.astype("<u4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def has_words(document: Document, least: int) -> bool:
    """Whether a text has at least so many words; of ids that cannot be said."""
    return not isinstance(document, str) or not least or len(document.split(maxsplit=least)) >= least


def _limited(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts in short pieces, until so many characters have gone by."""
    for text in texts:
        for piece in pieces_of(text, BPE_PIECE_CHARACTERS):
            yield piece
            characters -= len(piece)
            if characters <= 0:
                return


def _put(file: IO[bytes], ids: Array) -> None:
    """A document for later: its length, then its ids."""
    file.write(np.array([len(ids)], np.uint64).tobytes())
    file.write(np.ascontiguousarray(ids, np.uint32).data)


def _put_aside(file: IO[bytes]) -> Iterator[Array]:
    """The documents that were put aside, from where the file stands."""
    while length := file.read(8):
        yield np.frombuffer(file.read(4 * int(np.frombuffer(length, np.uint64)[0])), np.uint32)
