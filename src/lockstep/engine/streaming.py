"""Streaming (`data.streaming`): the head of a text becomes a cache like every other, the rest is added in chunks.

The head is the first HEAD_CHARACTERS, or more where that is not enough for a row of each split: the tokenizer, the
validation rows and chunk 0 are made of it before any worker starts. The chunks follow while the run trains (supply.py
makes them, feed.py waits for them). Documents that equal a validation document are left out. Each chunk is packed for
itself: what does not fill its last row is dropped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import rundir
from lockstep.data.stream import DESCRIPTION, ROWS, Chunk, chunk_folder
from lockstep.data.tokenize import load_tokenizer
from lockstep.engine.building import Builder, Split, TooLittleText, document_hash, has_words
from lockstep.engine.choices import TokenizerChoice, cache_roots, choose_source
from lockstep.engine.encoding import length_of
from lockstep.errors import DataError
from lockstep.sources.text import TextSource

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Document, Place, Source

HEAD_CHARACTERS = 4 << 20
FIRST_CHARACTERS, LARGEST_CHARACTERS = 1 << 20, 64 << 20  # of chunk 1, doubled from chunk to chunk
HELD_OUT = "held_out.json"  # hashes of the validation documents, in the cache of the head
BEGINNING = (0, 0)


# ---------------------------------------------------------------------------------------------- documents, from a place


def walk(source: Source, start: Place) -> Iterator[tuple[Place, Document]]:
    """The documents from a place on, each with the place just after it; a source that cannot seek is read past."""
    own: Callable[[Place], Iterator[tuple[Place, Document]]] | None = getattr(source, "walk", None)
    if own is not None:
        yield from own(start)
        return
    for number, document in enumerate(source.documents(), 1):
        if number > start[1]:
            yield (0, number), document


class Reader:
    """Walks along a source once, from chunk to chunk. What is too short does not count as a document."""

    def __init__(self, source: Source, config: RunConfig) -> None:
        self.source, self.min_words, self.limit = source, config.data.min_words, config.data.max_train_samples
        self.walking: Iterator[tuple[Place, Document]] = iter(())
        self.place: Place | None = None

    def part(self, start: Place, used: int, characters: int) -> Part:
        """The documents from a place on, `used` of the stream lying before it."""
        if start != self.place:
            self.walking = walk(self.source, start)
        self.place = None  # somewhere in the middle, until all of the part was read
        return Part(self, start, used, characters)


class Part:
    """Whole documents until so many characters have gone by; afterwards it knows where it ended."""

    def __init__(self, reader: Reader, start: Place, used: int, characters: int) -> None:
        self.start, self.end, self.documents, self.last = start, start, used, False
        self._reader, self._characters = reader, characters

    def read_on(self, characters: int) -> Iterator[Document]:
        """More of it, from where it ended."""
        self._characters = characters
        return iter(self)

    def __iter__(self) -> Iterator[Document]:
        reader, left = self._reader, self._characters
        while left > 0:
            if self.documents >= reader.limit:
                self.last = True
                break
            try:
                self.end, document = next(reader.walking)
            except StopIteration:
                self.last = True
                break
            left -= length_of(document)
            if has_words(document, reader.min_words):
                self.documents += 1
                yield document
        self.last = self.last or self.documents >= reader.limit
        reader.place = self.end


# ------------------------------------------------------------------------------------------------------------- the head


@dataclass(frozen=True)
class Head:
    """The source as far as the head goes: a cache is made of it as of every source. Read once and kept."""

    source: Source
    part: Part
    kept: list[Document]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def made_of(self) -> str:
        return getattr(self.source, "made_of", "")

    def fingerprint(self) -> Any:
        return self.source.fingerprint()

    def documents(self) -> Iterator[Document]:
        return iter(self.kept)

    def read_on(self, characters: int) -> None:
        """At least so much more of the source."""
        self.kept.extend(self.part.read_on(characters))


def build_head(builder: Builder, folder: Path) -> None:
    """Fill a cache folder with the head of a stream: all that must be there before training can begin."""
    config = builder.config
    head = Head(builder.source, Reader(builder.source, config).part(BEGINNING, 0, HEAD_CHARACTERS), [])
    characters = HEAD_CHARACTERS
    while True:
        head.read_on(characters)
        try:
            replace(builder, source=head).build(folder)
            break
        except TooLittleText:
            if head.part.last:
                raise
            characters *= 2
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    split = Split.of(head.documents(), config.data.validation_fraction)
    held_out = sorted({document_hash(document) for document in split.texts(head.documents(), "validation")})
    rundir.write_json(folder / HELD_OUT, held_out)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    part, rows, tokens = head.part, meta["rows"]["train"], meta["tokens"]["train"]
    chunk = Chunk(0, part.start, part.end, part.documents, rows=rows, tokens=tokens, last=part.last)
    sizes = {"head": HEAD_CHARACTERS, "first": FIRST_CHARACTERS, "largest": LARGEST_CHARACTERS}
    meta["stream"] = {"head": chunk.to_json(), "characters": sizes}
    rundir.write_json(folder / "meta.json", meta)


# ----------------------------------------------------------------------------------------------------------- the chunks


class Maker:
    """Makes chunks: a pure function of the cache of the head, the source, and the number."""

    def __init__(self, base: Path, config: RunConfig) -> None:
        from lockstep.engine.build import make_objective

        roots = cache_roots(config.data)
        source = choose_source(config.data.model_copy(update={"cache_dir": str(roots[0])}))
        self.base, self.tokenizer = base, load_tokenizer(base)
        meta = json.loads((base / "meta.json").read_text(encoding="utf-8"))
        self.characters: dict[str, int] = meta["stream"]["characters"]
        self.held_out = frozenset(json.loads((base / HELD_OUT).read_text(encoding="utf-8")))
        choice = TokenizerChoice(meta["tokenizer"]["name"], {}, lambda _: self.tokenizer)
        objective, size = make_objective(config), self.tokenizer.vocab_size
        self.builder = Builder(config, objective, source, choice, meta["key"], size)
        self.reader = Reader(source, config)
        self.files = [file for _, file in source.files] if isinstance(source, TextSource) else []  # others are pinned
        self._seen = {file: stamp(file) for file in self.files}
        if dict(source.fingerprint()) != self.builder.parts["content"]:
            raise self._has_changed()

    def make(self, before: Chunk) -> Chunk:
        """Publish the chunk that follows another."""
        number = before.number + 1
        part = self.reader.part(before.end, before.documents, self._size(number))
        with rundir.publishing(chunk_folder(self.base, number)) as folder:
            rows, tokens = self._write(folder / ROWS, part)
            chunk = Chunk(number, part.start, part.end, part.documents, rows=rows, tokens=tokens, last=part.last)
            rundir.write_json(folder / DESCRIPTION, chunk.to_json())
            self._check_files(chunk)
        return chunk

    def _size(self, number: int) -> int:
        return min(self.characters["first"] << min(number - 1, 40), self.characters["largest"])

    def _write(self, folder: Path, part: Part) -> tuple[int, int]:
        kept = (document for document in part if document_hash(document) not in self.held_out)
        return self.builder.write_documents(folder, kept, self.tokenizer)

    def _check_files(self, chunk: Chunk) -> None:
        """What this chunk was read from must still be the text that the head was made of."""
        after = len(self.files) if chunk.last else chunk.end[0] + 1
        if any(stamp(file) != self._seen[file] for file in self.files[chunk.start[0] : after]):
            raise self._has_changed()

    def _has_changed(self) -> DataError:
        return DataError(
            "the text changed while it was being streamed",
            where=self.builder.config.data.data_path or self.builder.source.name,
            hint="start a new run",
        )


def stamp(file: Path) -> tuple[int, ...]:
    """What changes when a file does, at no cost."""
    try:
        status = file.stat()
    except OSError:  # gone
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
