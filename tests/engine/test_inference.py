"""A prompt and what is added to it, as one text: no word is glued to the prompt, none is pushed away from it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from lockstep.contracts import Objective
from lockstep.data.tokenize import ByteTokenizer, TokenizerFile, train_bpe, train_wordpiece, train_words
from lockstep.engine.inference import continue_text

TEXT = "The old house stands about thirty miles from the sea. It is old, and the sea is near.\n" * 9


def sentencepiece_like() -> TokenizerFile:
    """Words with a mark for the blank before them, as of Llama 2."""
    pieces = ["</s>", "▁the", "▁old", "▁house", "s", ".", "▁The"]
    tokenizer = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token="</s>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return TokenizerFile(tokenizer, separator="</s>")


class Saying:
    """An objective whose model says what it is told to, and then ends the document."""

    def __init__(self, added: list[int]) -> None:
        self.added = added

    def sample(self, *_: Any) -> list[int]:
        return self.added


def continued(tokenizer: TokenizerFile, prompt: str, rest: str) -> str:
    """What comes out where a model adds the tokens of `rest` as they are after the prompt."""
    before, whole, alone = (list(map(int, ids)) for ids in tokenizer.encode([prompt, prompt + rest, rest]))
    added = whole[len(before) :] if whole[: len(before)] == before else alone
    objective = cast("Objective", Saying([*added, tokenizer.separator]))
    return continue_text(nn.Identity(), objective, tokenizer, prompt)


MAKE = {
    "builtin": lambda: train_bpe([TEXT], 300),
    "wordpiece": lambda: train_wordpiece([TEXT], 400),
    "word": lambda: train_words([TEXT], 100),
    "bytes": ByteTokenizer,
    "sentencepiece": sentencepiece_like,
}


@pytest.mark.parametrize("name", MAKE)
def test_a_word_stands_apart_from_the_prompt(name: str) -> None:
    tokenizer = MAKE[name]()
    assert continued(tokenizer, "The", " old house") == "The old house"
    assert continued(tokenizer, "The", "") == "The"


@pytest.mark.parametrize("name", ["builtin", "wordpiece", "word", "bytes"])
def test_punctuation_and_blanks_are_not_doubled(name: str) -> None:
    tokenizer = MAKE[name]()
    assert continued(tokenizer, "The old house", ".") == "The old house."
    assert continued(tokenizer, "The sea ", "is near") == "The sea is near"
    assert continued(tokenizer, "THE  Sea", " is near") == "THE  Sea is near"  # the prompt stays as it was typed
