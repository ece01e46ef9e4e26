"""Text out of a masked-diffusion model, words to words: a prompt continued, answered, or with its blanks filled."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.data.chat import Message, prompt_ids
from lockstep.data.tokenize import SPECIALS, TokenizerFile
from lockstep.data.vocabulary import BLANKS
from lockstep.errors import ConfigError
from lockstep.objectives.denoise import DiffusionSampleOptions, cut, generate

if TYPE_CHECKING:
    from lockstep.objectives.diffusion import Diffusion

MASK = SPECIALS["mask_token"]
WARM = 0.8  # of a text that goes on: at 0 it soon repeats itself


@dataclass(frozen=True)
class Speaker:
    """A masked-diffusion model and what it takes to speak with it.

    `given` are fields of DiffusionSampleOptions, the others are as suits the prompt and the model.
    """

    model: nn.Module
    objective: Diffusion
    tokenizer: TokenizerFile
    context_length: int  # of the rows it has learnt; what is longer it knows little about
    tokens: int = 64  # of a continuation at most, where nothing else is said

    def text(self, prompt: str, given: Mapping[str, Any]) -> str:
        """The prompt continued or with its blanks filled; of a model that answers, the answer."""
        texts, mask = split_blanks(self.tokenizer, prompt), self.objective.mask
        if self.objective.answers and len(texts) == 1:
            return self.continued(prompt_ids(self.tokenizer, [Message("user", prompt)]), given).strip()
        ids = join_blanks(self.tokenizer, texts, mask)
        row, added = self.generated(ids, given)
        return _filled(self.tokenizer, texts, ids, row, mask) + _after(self.tokenizer, prompt, row, added)

    def silent(self, prompt: str, text: str) -> bool:
        """Whether nothing but blanks has come to the prompt."""
        words = text.split()
        return not words or (not self.objective.answers and words == prompt.replace(MASK, " ").split())

    def continued(self, ids: list[int], given: Mapping[str, Any]) -> str:
        """What follows some ids."""
        return self.tokenizer.decode(self.generated(ids, given)[1])

    def generated(self, ids: list[int], given: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """(the prompt with its blanks filled, what was added up to the end of the text)."""
        options, mask = self._options(ids, given), self.objective.mask
        row = generate(self.model, [ids], options, mask=mask, bias_V=self.objective.logit_bias(self.model)).rows[0]
        added = [token for token in cut(row[len(ids) :], options.stop) if token not in options.stop]
        return row[: len(ids)], added

    def _options(self, ids: list[int], given: Mapping[str, Any]) -> DiffusionSampleOptions:
        filling = self.objective.mask in ids
        sure = filling or self.objective.answers
        plain = DiffusionSampleOptions(
            temperature=0.0 if sure else WARM,
            stop=ends(self.tokenizer, self.model),
            tokens=0 if filling else self.tokens,
        )
        chosen = dataclasses.replace(plain, **given)
        if not sure and not given.keys() & {"remasking", "threshold"} and chosen.temperature > 0:
            chosen = dataclasses.replace(chosen, remasking="random")  # a draw: the surest of a text are its blanks
        if "tokens" in given or filling:
            return chosen
        shape: Any = self.model.shape
        room = min(shape.max_position_embeddings, self.context_length) - len(ids)
        if room <= 0:
            room = shape.max_position_embeddings - len(ids)
        length = chosen.block_length or 1
        if room < length:
            raise ConfigError(
                f"a prompt of {len(ids)} tokens leaves {max(0, room)} of the model's {shape.max_position_embeddings}",
                where="PROMPT",
                hint="a shorter one, or fewer --tokens",
            )
        return dataclasses.replace(chosen, tokens=max(length, min(room, chosen.tokens) // length * length))


def exchange(objective: Diffusion, tokenizer: TokenizerFile, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """(prompt, answer) as ids: of a conversation if the model had such, else as one text cut between two tokens."""
    if objective.answers:
        return prompt_ids(tokenizer, [Message("user", prompt)]), tokenizer.encode([answer])[0].tolist()
    before, both, alone = (ids.tolist() for ids in tokenizer.encode([prompt, prompt + answer, answer]))
    return before, both[len(before) :] if both[: len(before)] == before else alone


def ends(tokenizer: TokenizerFile, model: nn.Module) -> tuple[int, ...]:
    """The ids that end a text: of the tokenizer, and those the model was published with."""
    shape: Any = model.shape
    known = {tokenizer.separator, *shape.eos, tokenizer.vocabulary().specials.get("eot", tokenizer.separator)}
    return tuple(sorted(known))


def split_blanks(tokenizer: TokenizerFile, prompt: str) -> list[str]:
    """The texts around the blanks. Where a blank belongs to the word after it, it belongs to what is filled in too."""
    spellings = {MASK, tokenizer.special_texts.get("mask", MASK)}
    *before, last = re.split("|".join(map(re.escape, spellings)), prompt)
    parted = any(token[:1] in BLANKS and len(token) > 1 for token in tokenizer.vocabulary_map())  # " word" is a token
    joined = parted or not len(tokenizer.encode([" "])[0])  # or nobody hears of blanks
    return [*(text.removesuffix(" ") if joined else text for text in before), last]


def join_blanks(tokenizer: TokenizerFile, texts: Sequence[str], mask: int) -> list[int]:
    """Their ids, and the mask's between them."""
    return [token for part in tokenizer.encode(list(texts)) for token in (mask, *part.tolist())][1:]


def _filled(tokenizer: TokenizerFile, texts: list[str], ids: list[int], row: list[int], mask: int) -> str:
    """The prompt as it was typed, but for its blanks."""
    blanks = [place for place, token in enumerate(ids) if token == mask]
    found, first = texts[0], 0
    while first < len(blanks):  # a run of blanks is one text: a letter may have several tokens
        last = first
        while last + 1 < len(blanks) and not texts[last + 1] and blanks[last + 1] == blanks[last] + 1:
            last += 1
        start, end = blanks[first], blanks[last] + 1
        found += _following(tokenizer.decode, row[max(0, start - 1) : end], start > 0) + texts[last + 1]
        first = last + 1
    return found


def _following(decode: Callable[[list[int]], str], ids: Sequence[int], has_before: bool) -> str:
    """The text of ids after the first of them, with the blank between; tokenizers of words only join words they see."""
    whole = decode(list(ids))
    if not has_before:
        return whole
    before = decode(list(ids[:1]))
    return whole[len(before) :] if whole.startswith(before) else decode(list(ids[1:]))


def _after(tokenizer: TokenizerFile, prompt: str, ids: list[int], added: list[int]) -> str:
    """What follows the prompt, with the blank before it if there is one."""
    text = _following(tokenizer.decode, [*ids[-1:], *added], bool(ids))
    return text.lstrip() if prompt[-1:].isspace() and ids and not tokenizer.decode(ids[-1:])[-1:].isspace() else text
