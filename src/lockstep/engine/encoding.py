"""Documents to token ids on all cores, in the order they came. Torch-free.

Threads and not processes: the library does its work without the interpreter's lock, so there is nothing to copy between
processes, and what comes out does not depend on how many threads there are.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.contracts import PROMPT
from lockstep.data.chat import Exchange, encode_exchanges
from lockstep.errors import DataError
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array, Document
    from lockstep.data.tokenize import TokenizerFile

BATCH_CHARACTERS = 1 << 18  # encoded at a time
WHOLE_CHARACTERS = 1 << 20  # a longer document is encoded in pieces of
PIECE_CHARACTERS = 1 << 18
ROOM_CHARACTERS = 4 << 20  # encoded together by all threads: the library takes up to 170 bytes for each meanwhile
AHEAD_CHARACTERS = 32 << 20  # held with their ids until it is their turn
IDS_WORTH = 4  # characters that an id stands for, roughly
LONE_BLANK, WHITE_SPACE = re.compile(r"(?<=\S) (?=\S)"), re.compile(r"\s")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def length_of(document: Document) -> int:
    """Characters, or what ready ids are worth."""
    return len(document) if isinstance(document, str) else IDS_WORTH * len(document)


def pieces_of(text: str, characters: int) -> Iterator[str]:
    """A text in pieces of at most so many characters, cut before a lone blank if there is one near the end.

    There tokenizers cut anyway, so most give the ids of the whole text. Else any white space will do, else any place.
    """
    start = 0
    while len(text) - start > characters:
        near, end = start + max(1, characters - characters // 4), start + characters
        kinds = (LONE_BLANK, WHITE_SPACE)
        found = (max((match.start() for match in kind.finditer(text, near, end)), default=0) for kind in kinds)
        cut = next(filter(None, found), end)
        yield text[start:cut]
        start = cut
    yield text[start:]


def batches_of(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Whole documents, about so many characters of them at a time; one that will be cut comes alone."""
    batch: list[Document] = []
    gathered = 0
    for document in documents:
        if batch and length_of(document) > WHOLE_CHARACTERS:
            yield batch
            batch, gathered = [], 0
        batch.append(document)
        gathered += length_of(document)
        if gathered >= min(characters, WHOLE_CHARACTERS):
            yield batch
            batch, gathered = [], 0
    if batch:
        yield batch


def encode(tokenizer: TokenizerFile, documents: list[Document]) -> list[Array]:
    """The ids of each document, those of prompts marked as such; ids that are ready are looked over."""
    exchanges = [document for document in documents if isinstance(document, Exchange)]
    talks = iter(encode_exchanges(tokenizer, exchanges) if exchanges else ())
    texts = [document for document in documents if isinstance(document, str) and not isinstance(document, Exchange)]
    encoded = iter(tokenizer.encode(texts))

    def of(document: Document) -> Array:
        if isinstance(document, Exchange):
            return next(talks)
        return next(encoded) if isinstance(document, str) else _looked_over(document, tokenizer.vocab_size)

    return [of(document) for document in documents]


def largest_id(ids: Array) -> int:
    """Of ready ids, those of prompts among them; -1: there are none."""
    return int((ids & (PROMPT - 1) if ids.dtype == np.uint32 else ids).max()) if len(ids) else -1


def _looked_over(ids: Array, vocab_size: int) -> Array:
    largest = largest_id(np.asarray(ids))
    if largest >= vocab_size:
        raise too_large(largest, vocab_size)
    return np.asarray(ids, np.uint32)


def too_large(largest: int, vocab_size: int) -> DataError:
    """Ready ids that are none of this tokenizer."""
    return DataError(
        f"the files hold token ids up to {largest}, the ids of the tokenizer end at {vocab_size - 1}",
        where="data.data_path",
        hint="data.tokenizer_name=FOLDER with the tokenizer they were made with",
    )


def too_many(largest: int, rows: int) -> DataError:
    """Ready ids that the model has no row for."""
    return DataError(
        f"the files hold token ids up to {largest}, the embedding of the model has {rows} rows (0 to {rows - 1})",
        where="data.data_path",
        hint="the model they were made for, or prepare the text for this one",
    )


class _Room:
    """Space for so many characters at once, however many threads there are; a larger batch gets in alone."""

    def __init__(self, characters: int) -> None:
        self._all = self._left = characters
        self._change = threading.Condition()
        self._closed = False

    @contextlib.contextmanager
    def taken(self, characters: int) -> Generator[None]:
        wanted = min(characters, self._all)
        with self._change:
            self._change.wait_for(lambda: self._left >= wanted or self._closed)
            if self._closed:
                raise CancelledError
            self._left -= wanted
        try:
            yield
        finally:
            with self._change:
                self._left += wanted
                self._change.notify_all()

    def close(self) -> None:
        """Nobody gets in any more."""
        with self._change:
            self._closed = True
            self._change.notify_all()


@dataclass(frozen=True)
class _Ahead:
    """A batch under work: as a whole, or the pieces of its only document."""

    batch: list[Document]
    parts: list[Future[list[Array]]]
    characters: int

    def finished(self) -> list[tuple[Document, Array]]:
        """The documents with their ids, as soon as they are there."""
        encoded = [part.result() for part in self.parts]
        ids = encoded[0] if len(encoded) == 1 else [np.concatenate([array for (array,) in encoded])]
        return list(zip(self.batch, ids, strict=True))


def encoded_in_order(documents: Iterable[Document], tokenizer: TokenizerFile) -> Iterator[list[tuple[Document, Array]]]:
    """Batches of (document, its ids) in the order of the documents, some batches ahead of whoever takes them."""
    count = cores()
    pool, room = ThreadPoolExecutor(count, thread_name_prefix="tokenise"), _Room(ROOM_CHARACTERS)

    def work(batch: list[Document]) -> list[Array]:
        with room.taken(sum(map(length_of, batch))):
            return encode(tokenizer, batch)

    ahead: deque[_Ahead] = deque()
    try:
        for batch in batches_of(documents, min(BATCH_CHARACTERS, ROOM_CHARACTERS // count)):  # room for all
            parts = [pool.submit(work, part) for part in _parts(batch)]
            ahead.append(_Ahead(batch, parts, sum(map(length_of, batch))))
            while len(ahead) > 2 * count or sum(each.characters for each in ahead) > AHEAD_CHARACTERS:
                yield ahead.popleft().finished()
        while ahead:
            yield ahead.popleft().finished()
    finally:
        room.close()  # who is told to stop does not wait for more than is being encoded at this moment
        pool.shutdown(cancel_futures=True)


def _parts(batch: list[Document]) -> Iterator[list[Document]]:
    """What is encoded together: the batch, or a piece of its only document."""
    text = batch[0]
    if len(batch) == 1 and type(text) is str and len(text) > WHOLE_CHARACTERS:  # an exchange is not cut
        for piece in pieces_of(text, PIECE_CHARACTERS):
            yield [piece]
    else:
        yield batch
