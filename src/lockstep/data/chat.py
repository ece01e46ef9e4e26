"""Conversations to ids: by the chat template that comes with a tokenizer, else as plain text. Torch-free.

A template is a program in a sandbox that writes text. What it writes may spell special tokens, and those become their
ids; what people said may spell them too, and stays text: a sign that nobody uses is put into such words before, and
taken out after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lockstep.contracts import PROMPT
from lockstep.errors import DataError
from lockstep.formats.chats import Exchange, Message
from lockstep.runtime.later import numpy as np

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.data.tokenize import TokenizerFile

__all__ = ["Exchange", "Message", "encode_exchanges", "prompt_ids"]

GUARDS = [chr(code) for code in range(0xE000, 0xF8FF)]  # characters of no language
SHOWN = 60
Piece = str | int  # a text to be encoded, or the id of a special token


def encode_exchanges(tokenizer: TokenizerFile, exchanges: Sequence[Exchange]) -> list[Array]:
    """Ids of prompt and answer as one uint32 array each; those of the prompt have the bit PROMPT."""
    parts = [part for exchange in exchanges for part in _parts(exchange, tokenizer)]
    encoded = _encoded(tokenizer, parts)
    pairs = zip(encoded[::2], encoded[1::2], strict=True)
    return [np.concatenate([prompt | np.uint32(PROMPT), answer]) for prompt, answer in pairs]


def prompt_ids(tokenizer: TokenizerFile, messages: Iterable[Message]) -> list[int]:
    """What stands before the answer to these messages."""
    asked = Exchange.of(messages, "")
    if not tokenizer.chat_template:
        return tokenizer.encode([asked.prompt])[0].tolist()
    pieces, _ = _pieces(tokenizer, _Guard(tokenizer, asked), asked, answered=False)
    return _encoded(tokenizer, [pieces])[0].tolist()


def _encoded(tokenizer: TokenizerFile, parts: Sequence[Sequence[Piece]]) -> list[Array]:
    """The ids of each part, all their texts encoded together."""
    texts = iter(tokenizer.encode([piece for part in parts for piece in part if isinstance(piece, str)]))
    nothing = np.empty(0, np.uint32)
    return [
        np.concatenate(
            [nothing, *(next(texts) if isinstance(piece, str) else np.array([piece], np.uint32) for piece in part)]
        )
        for part in parts
    ]


def _parts(exchange: Exchange, tokenizer: TokenizerFile) -> tuple[list[Piece], list[Piece]]:
    """(prompt, answer) in pieces."""
    if not tokenizer.chat_template:
        return [exchange.prompt], [exchange.answer]
    return _pieces(tokenizer, _Guard(tokenizer, exchange), exchange, answered=True)


def _pieces(
    tokenizer: TokenizerFile, guard: _Guard, exchange: Exchange, *, answered: bool
) -> tuple[list[Piece], list[Piece]]:
    asked = [{"role": guard.hide(turn.role), "content": guard.hide(turn.content)} for turn in exchange.messages]
    prompt = _render(tokenizer, asked, exchange, goes_on=True)
    if not answered:
        return guard.cut(prompt), []
    answer = {"role": "assistant", "content": guard.hide(exchange.answer)}
    whole = _render(tokenizer, [*asked, answer], exchange, goes_on=False)
    if not whole.startswith(prompt):
        raise DataError(
            f"the chat template writes a prompt otherwise once it is answered: {exchange.prompt[:SHOWN]!r}",
            where="chat_template",
            hint="another template in tokenizer_config.json, or records of one prompt and one answer",
        )
    return guard.cut(prompt), guard.cut(whole[len(prompt) :])


class _Guard:
    """Keeps what people said apart from the special tokens that a template writes."""

    def __init__(self, tokenizer: TokenizerFile, exchange: Exchange) -> None:
        self.ids = tokenizer.special_ids()
        self.words = _any_of(tuple(sorted(self.ids, key=lambda text: (-len(text), text))))
        roles = "".join(turn.role for turn in exchange.messages)
        used = {*exchange, *roles, *(tokenizer.chat_template or "")}
        self.sign = next(letter for letter in GUARDS if letter not in used)

    def hide(self, text: str) -> str:
        """The text, in which no special token is spelt."""
        if not self.ids:
            return text
        return self.words.sub(lambda found: self.sign.join(found[0]) + self.sign, text)

    def cut(self, text: str) -> list[Piece]:
        """Texts and ids of special tokens, in order."""
        if not self.ids:
            return [text] if text else []
        pieces: list[Piece] = []
        place = 0
        for found in self.words.finditer(text):
            if found.end() < len(text) and text[found.end()] == self.sign:  # one character, and guarded
                continue
            if found.start() > place:
                pieces.append(text[place : found.start()].replace(self.sign, ""))
            pieces.append(self.ids[found[0]])
            place = found.end()
        if place < len(text):
            pieces.append(text[place:].replace(self.sign, ""))
        return pieces


@lru_cache(maxsize=8)
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


def _render(tokenizer: TokenizerFile, messages: list[dict[str, str]], exchange: Exchange, *, goes_on: bool) -> str:
    """What the template makes of messages; `goes_on`: and of the beginning of an answer."""
    assert tokenizer.chat_template
    try:
        return _compiled(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=goes_on, **tokenizer.named
        )
    except Exception as error:  # a program of somebody else's: whatever it likes
        said = str(error).strip() or type(error).__name__
        raise DataError(
            f"the chat template refuses a conversation: {said} ({exchange.prompt[:SHOWN]!r})",
            where="chat_template",
            hint="another template in tokenizer_config.json, or records it can write",
        ) from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """The program, without any way out of its sandbox, and without a clock: the same ids every day."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(said: str) -> None:
        raise TemplateError(said)

    def plain_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    place: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    place.globals["raise_exception"] = refuse
    place.filters["tojson"] = plain_json
    return place.from_string(template)
