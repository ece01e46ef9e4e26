"""Rows of conversations: a prompt, its answer, and end tokens up to the end of the row. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lockstep.contracts import PROMPT
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.contracts import Array

logger = logging.getLogger(__name__)

PACK_TOKENS = 1 << 20  # tokens of a block of rows
PROMPT_BIT = np.uint32(PROMPT)


@dataclass
class Cuts:
    """What did not fit into a row."""

    rows: int = 0
    either: int = 0
    prompts: int = 0
    answers: int = 0

    def count(self, *, prompt: bool, answer: bool) -> None:
        self.rows += 1
        self.either += prompt or answer
        self.prompts += prompt
        self.answers += answer

    def tell(self, context_length: int) -> None:
        if self.either:
            logger.warning(
                "of %d conversations %d did not fit into %d tokens: %d prompts lost their beginning, %d answers their "
                "end (training.context_length)",
                *(self.rows, self.either, context_length, self.prompts, self.answers),
            )


def pack(documents: Iterable[Array], *, context_length: int, separator: int) -> Iterator[dict[str, Array]]:
    """Prompt, answer, ends. Too long: the prompt loses its beginning, down to half a row, then the answer its end.

    An answer that was cut has no end token: it did not end there.
    """
    length = context_length
    if separator < 0 or length < 2:
        raise ConfigError("answers need an end token and room for it", where="training.context_length")
    size = max(1, PACK_TOKENS // length)
    tokens, lengths = np.full((size, length), separator, np.int32), np.zeros((size, 2), np.int32)
    row, cuts = 0, Cuts()
    for document in documents:
        marked = np.asarray(document).astype(np.uint32)
        if not len(marked):
            continue
        prompt = int(np.count_nonzero(marked & PROMPT_BIT))
        answer = len(marked) - prompt
        fits = prompt + max(1, answer) <= length
        kept = prompt if fits else min(prompt, max(length - answer - 1, length // 2))
        learnt = min(answer + 1, length - kept)
        filled = kept + min(answer, learnt)
        tokens[row, :filled] = (marked & ~PROMPT_BIT)[prompt - kept : prompt - kept + filled]
        lengths[row] = kept, kept + learnt
        cuts.count(prompt=kept < prompt, answer=learnt <= answer)
        row += 1
        if row == size:
            yield {"tokens": tokens, "lengths": lengths}
            tokens, lengths, row = np.full_like(tokens, separator), np.zeros_like(lengths), 0
    if row:
        yield {"tokens": tokens[:row], "lengths": lengths[:row]}
    cuts.tell(length)
