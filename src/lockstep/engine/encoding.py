"""Documents to token ids on all cores, in the order they came. Torch-free.

Threads and not processes: the library does its work without the interpreter's lock, so there is nothing to copy between
processes, and what comes out does not depend on how many threads there are.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from lockstep.errors import DataError

if TYPE_CHECKING:
    from lockstep.contracts import Array, Document
    from lockstep.data.tokenize import TokenizerFile

BATCH_CHARACTERS = 1 << 18  # encoded at a time; the library takes some 30 bytes for each of them meanwhile
IDS_WORTH = 4  # characters that an id stands for, roughly


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def length_of(document: Document) -> int:
    """Characters, or what ready ids are worth."""
    return len(document) if isinstance(document, str) else IDS_WORTH * len(document)


def batches_of(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Whole documents, about so many characters of them at a time."""
    batch: list[Document] = []
    gathered = 0
    for document in documents:
        batch.append(document)
        gathered += length_of(document)
        if gathered >= characters:
            yield batch
            batch, gathered = [], 0
    if batch:
        yield batch


def encode(tokenizer: TokenizerFile, documents: list[Document]) -> list[Array]:
    """The ids of each document; ids that are ready are looked over."""
    encoded = iter(tokenizer.encode([document for document in documents if isinstance(document, str)]))
    return [
        next(encoded) if isinstance(document, str) else _looked_over(document, tokenizer.vocab_size)
        for document in documents
    ]


def _looked_over(ids: Array, vocab_size: int) -> Array:
    largest = int(ids.max()) if len(ids) else 0
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


def encoded_in_order(documents: Iterable[Document], tokenizer: TokenizerFile) -> Iterator[list[tuple[Document, Array]]]:
    """Batches of (document, its ids) in the order of the documents, some batches ahead of whoever takes them."""
    count = cores()
    pool = ThreadPoolExecutor(count, thread_name_prefix="tokenise")
    ahead: deque[tuple[list[Document], Future[list[Array]]]] = deque()
    try:
        for batch in batches_of(documents, BATCH_CHARACTERS):
            ahead.append((batch, pool.submit(encode, tokenizer, batch)))
            if len(ahead) > 2 * count:
                yield _finished(ahead)
        while ahead:
            yield _finished(ahead)
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(ahead: deque[tuple[list[Document], Future[list[Array]]]]) -> list[tuple[Document, Array]]:
    batch, future = ahead.popleft()
    return list(zip(batch, future.result(), strict=True))
