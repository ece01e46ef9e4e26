"""Masked-LM: some tokens are hidden, and predicted from both sides (Devlin et al. 2019; Liu et al. 2019 for dynamic).

Maths. Of a row x_1..x_L each token that is not special is chosen with probability p, independently of all others. What
the model sees is y: a chosen token becomes [MASK] with probability `masked_share`, a random ordinary token (uniform,
may be the same one) with `random_share`, and stays as it is otherwise; a token that was not chosen always stays. The
loss of a batch is the SUM over the chosen places C, and nothing else is a target,

    loss = sum over i in C of  -log p(x_i | y),      weight = |C|,

and a step divides the sum over all micro-batches and ranks by the weight over all of them. Whole words: the word is
chosen with probability p and all its tokens with it, so p of the tokens are chosen in expectation; what becomes of each
is still drawn token by token. With `last_mask_probability` p goes on a straight line over the steps of the run, and
validation is done at its end.

What happens to a token is a hash of (seed, epoch, row, position): new in every epoch, and the same for any cut into
batches, ranks and workers, and after a resume. Validation rows are always of epoch 0: their masks are fixed.

The optimum is no entropy of the source, but for a Markov chain it can be computed: forward-backward through the channel
above (tests/science/test_mlm.py). -log p is not a likelihood of the text, exp(loss) therefore a PSEUDO-perplexity.

Rows, by `data.documents`; only the last of a table has [PAD], but for those marked *:

    masked*    [CLS] document [SEP] [CLS] document [SEP] ...   each blind to the others; cut where the row ends
    padded*    [CLS] document [SEP] [PAD] ...                  one in a row; a long one is cut
    separated  [CLS] document [SEP] document [SEP] ...         all see each other
    joined     [CLS] document document ...                     likewise
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.contracts import Batch, Draw, Rows, SampleOptions, Sum, Vocabulary
from lockstep.errors import ConfigError
from lockstep.kernels.linear_cross_entropy import IGNORE
from lockstep.objectives.causal import draw as draw_token
from lockstep.objectives.causal import eager
from lockstep.objectives.options import MlmOptions
from lockstep.runtime.splitmix import splitmix64

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.runtime.splitmix import U64

PACK_TOKENS = 1 << 20  # tokens of a block of rows
SHORTEST = 3  # [CLS], a token, [SEP]
CHANNELS = ("masked", "random", "kept")  # what became of a chosen token
APART = ("masked", "padded")  # documents that do not see each other
PURPOSE = 0x6D6C6D  # so that no other hash of the same numbers is this one
SECOND = np.uint64(0xA5A5_5A5A_C3C3_3C3C)  # the second draw of a place
ROOM_STEP, ROOM_SPREADS = 16, 6  # places are made in such steps, for so many standard deviations more than usual
NO_CHANNEL = 255  # of a place that is none


def build(options: MlmOptions, *, documents: str = "separated") -> Mlm:
    """The objective `mlm`; `documents` is `data.documents`."""
    options.check(documents)
    return Mlm(options, documents=documents)


class Mlm:
    """Predict hidden tokens from both sides."""

    terms: Mapping[str, float] = {"loss": 1.0}
    steady = False

    def __init__(self, options: MlmOptions, *, documents: str = "separated") -> None:
        self.options = options
        self.documents = documents
        self.columns: Mapping[str, str] = MlmOptions.columns_of(documents)
        self._vocabulary: Vocabulary | None = None
        self._ordinary = np.empty(0, bool)  # of each id: not special
        self._ordinary_ids = np.empty(0, np.int64)

    def with_vocabulary(self, vocabulary: Vocabulary) -> Mlm:
        """The same, told which ids are special."""
        missing = [name for name in ("pad", "cls", "sep", "mask") if name not in vocabulary.specials]
        if missing:
            raise ConfigError(
                f"the tokenizer has no {', '.join(f'[{name.upper()}]' for name in missing)}, masked-LM needs it",
                where="data.tokenizer_name",
                hint="data.tokenizer_name=wordpiece",
            )
        bound = copy.copy(self)
        bound._vocabulary = vocabulary
        bound._ordinary = np.ones(vocabulary.size, bool)
        bound._ordinary[list(vocabulary.specials.values())] = False
        bound._ordinary_ids = np.flatnonzero(bound._ordinary)
        return bound

    def steadied(self) -> Mlm:
        """The same with as many places in every batch of a size; those that are left over have no target.

        Sums have more terms then, all of them zero: the same but for rounding.
        """
        made = copy.copy(self)
        made.steady = True
        return made

    @property
    def vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "with_vocabulary was not called"
        return self._vocabulary

    # ------------------------------------------------------------------------------------------------------------ rows

    def pack(self, documents: Iterable[Array], *, context_length: int, separator: int) -> Iterator[dict[str, Array]]:
        """Blocks of rows of context_length tokens; nothing of a document is lost. Its end is marked if separator >= 0.

        The separator itself is the tokenizer's [SEP], whatever else it may end its documents with.
        """
        if context_length < SHORTEST:
            raise ConfigError(
                f"a row of {context_length} has no room for [CLS], a token and [SEP]",
                where="training.context_length",
                hint=f"at least {SHORTEST}",
            )
        if self.documents in APART:
            blocks = self._pieces(documents, context_length)
        else:
            blocks = self._stream(documents, context_length, marked=separator >= 0)
        return ({"tokens": block} for block in blocks)

    def _pieces(self, documents: Iterable[Array], length: int) -> Iterator[Array]:
        """Documents side by side, each between its marks; rows are filled in order, and a document is cut to fit."""
        special = self.vocabulary.specials
        begin, end, most = special["cls"], special["sep"], length - 2
        block = self._empty(length)
        row = column = 0
        for document in documents:
            ids, at = np.asarray(document), 0
            while at < len(ids):
                if column and (self.documents == "padded" or length - column < SHORTEST):
                    row, column = row + 1, 0
                if row == len(block):
                    yield block
                    block, row = self._empty(length), 0
                if not column and (whole := min((len(ids) - at) // most, len(block) - row)):
                    block[row : row + whole, 0], block[row : row + whole, -1] = begin, end
                    block[row : row + whole, 1:-1] = ids[at : at + whole * most].reshape(whole, most)
                    row, at = row + whole, at + whole * most
                    continue
                taken = min(len(ids) - at, length - column - 2)
                block[row, column], block[row, column + taken + 1] = begin, end
                block[row, column + 1 : column + taken + 1] = ids[at : at + taken]
                column, at = column + taken + 2, at + taken
        if rows := row + (column > 0):
            yield block[:rows]

    def _stream(self, documents: Iterable[Array], length: int, *, marked: bool) -> Iterator[Array]:
        """Documents one after another, cut into rows that begin with [CLS]."""
        special = self.vocabulary.specials
        end = np.array([special["sep"]] if marked else [], np.int32)
        parts: list[Array] = []
        gathered, width = 0, length - 1
        for document in documents:
            if len(document) == 0:
                continue
            parts += [np.asarray(document, np.int32), end]
            gathered += len(document) + len(end)
            if gathered >= max(PACK_TOKENS, width):
                stream = np.concatenate(parts)
                whole = gathered // width * width
                yield self._marked(stream[:whole], length)
                parts, gathered = [stream[whole:].copy()], gathered - whole
        if gathered:
            padding = np.full(-gathered % width, special["pad"], np.int32)
            yield self._marked(np.concatenate([*parts, padding]), length)

    def _marked(self, stream: Array, length: int) -> Array:
        rows = np.full((len(stream) // (length - 1), length), self.vocabulary.specials["cls"], np.int32)
        rows[:, 1:] = stream.reshape(-1, length - 1)
        return rows

    def _empty(self, length: int) -> Array:
        return np.full((max(1, PACK_TOKENS // length), length), self.vocabulary.specials["pad"], np.int32)

    # --------------------------------------------------------------------------------------------------------- batches

    def probability(self, draw: Draw) -> float:
        """Which share of the tokens is chosen at a step; validation is done at the last one's."""
        first, last = self.options.mask_probability, self.options.last_mask_probability
        if last is None:
            return first
        if not draw.steps:
            return last
        return first + (last - first) * min(1.0, draw.step / max(1, draw.steps - 1))

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        """Choose, hide, and say where and what was there. Made here, so that the device never has to be asked."""
        tokens, special = rows.columns["tokens"], self.vocabulary.specials
        random = _noise(rows, draw.seed, tokens.shape[1])
        chosen = random < np.uint64(int(self.probability(draw) * 2.0**64))
        if self.options.whole_words:
            chosen = np.take_along_axis(chosen, self._word_starts(tokens), axis=1)
        chosen &= self._ordinary[tokens]
        places = np.flatnonzero(chosen)
        again = splitmix64(random.reshape(-1)[places] ^ SECOND)
        channels = self._channels(again)
        inputs = tokens.astype(np.int64).reshape(-1)
        targets = inputs[places]
        inputs[places[channels == 0]] = special["mask"]
        inputs[places[channels == 1]] = self._ordinary_ids[_below(again[channels == 1], len(self._ordinary_ids))]
        more = max(0, self._room(tokens.size) - len(places)) if self.steady else 0
        spare = np.arange(more)  # different places: what comes back to the same one, a GPU adds in turn
        tensors = {
            "inputs": torch.from_numpy(inputs.reshape(tokens.shape)),
            "targets": torch.from_numpy(_longer(targets, np.full(more, IGNORE))),
            "places": torch.from_numpy(_longer(places, spare)),
            "channels": torch.from_numpy(_longer(channels, np.full(more, NO_CHANNEL))),
        }
        used = tokens.size - int(np.count_nonzero(tokens == special["pad"]))
        return Batch(tensors, {"loss": len(places)}, len(tokens), used)

    def _room(self, tokens: int) -> int:
        """How many places a steady batch has, [PAD]s counted in. The rare one with more looks like no other."""
        share = max(self.options.mask_probability, self.options.last_mask_probability or 0.0)
        spread = math.sqrt(tokens * share * (1 - share)) * (2 if self.options.whole_words else 1)
        return min(tokens, ROOM_STEP * math.ceil((share * tokens + ROOM_SPREADS * spread) / ROOM_STEP))

    def _word_starts(self, tokens: Array) -> Array:
        """For each token, where its word begins: a special token ends every word, and so the document."""
        ordinary = self._ordinary[tokens]
        goes_on = self.vocabulary.continues[tokens] & ordinary
        goes_on[:, 1:] &= ordinary[:, :-1]
        goes_on[:, 0] = False
        return np.maximum.accumulate(np.where(goes_on, 0, np.arange(tokens.shape[1])), axis=1)

    def _channels(self, again: U64) -> Array:
        """Which of CHANNELS each chosen token goes; by the upper half of its second draw."""
        masked = round(self.options.masked_share * 2**32)
        not_kept = round(min(1.0, self.options.masked_share + self.options.random_share) * 2**32)
        drawn = again >> np.uint64(32)
        return (drawn >= np.uint64(masked)).astype(np.uint8) + (drawn >= np.uint64(not_kept))

    # ----------------------------------------------------------------------------------------------------------- model

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The SUM of cross-entropies over the chosen places."""
        inputs, targets, places = (batch.tensors[name] for name in ("inputs", "targets", "places"))
        return {"loss": model(inputs, targets, places_M=places, documents_BL=self._numbered(inputs))}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Sum]:
        """Loss, and how often the most likely token was the right one: of all, and by what became of the token."""
        inputs, targets, places = (batch.tensors[name] for name in ("inputs", "targets", "places"))
        losses_M, correct_M = model(
            inputs, targets, places_M=places, documents_BL=self._numbered(inputs), per_target=True
        )
        weight = batch.weights["loss"]
        sums = {"loss": Sum(losses_M.sum(), weight), "accuracy": Sum(correct_M.sum(), weight)}
        which = [batch.tensors["channels"] == channel for channel in range(len(CHANNELS))]
        counts: list[int] = torch.stack([among.sum() for among in which]).tolist()
        for name, among, count in zip(CHANNELS, which, counts, strict=True):
            sums[f"accuracy_{name}"] = Sum((correct_M & among).sum(), count)
        return sums

    def _numbered(self, inputs_BL: Tensor) -> Tensor | None:
        """The documents of each row, from 1 on; 0 is padding. Special tokens are never chosen, so they still say it."""
        if self.documents not in APART:
            return None
        special = self.vocabulary.specials
        numbers_BL = (inputs_BL == special["cls"]).cumsum(1, dtype=torch.int32)
        return numbers_BL.masked_fill(inputs_BL == special["pad"], 0)

    # ----------------------------------------------------------------------------------------------------------- blanks

    @torch.no_grad()
    def sample(self, model: nn.Module, prompt: list[int], options: SampleOptions) -> list[int]:
        """The prompt with every [MASK] filled: the surest first, and the others know what it became."""
        ids = list(prompt)
        generator = torch.Generator().manual_seed(options.seed)  # on the CPU: the same draws on every device
        while blanks := self._blanks(ids, prompt):
            logits_MV = self._logits(model, ids, blanks)
            surest = int(torch.softmax(logits_MV, dim=-1).amax(-1).argmax())
            ids[blanks[surest]] = draw_token(logits_MV[surest], options, generator)
        return ids

    @torch.no_grad()
    def fill(self, model: nn.Module, ids: list[int], *, top: int = 5) -> list[tuple[int, list[tuple[int, float]]]]:
        """For each [MASK]: its place, and the likeliest ids with their probabilities. Each for itself."""
        blanks = self._blanks(ids, ids)
        best = torch.softmax(self._logits(model, ids, blanks), dim=-1).topk(min(top, len(self._ordinary_ids)))
        answers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [(place, list(zip(*answer, strict=True))) for place, answer in zip(blanks, answers, strict=True)]

    def _blanks(self, ids: list[int], prompt: list[int]) -> list[int]:
        """Where [MASK] stands."""
        mask = self.vocabulary.specials["mask"]
        if mask not in prompt:
            raise ConfigError("the prompt has nothing to fill in", hint='a [MASK] in it, as in "the [MASK] sat"')
        return [place for place, token in enumerate(ids) if token == mask]

    def _logits(self, model: nn.Module, ids: list[int], blanks: list[int]) -> Tensor:
        """Logits at some places, on the CPU; of special tokens -inf. A long text is seen around each place."""
        special, shape = self.vocabulary.specials, _shape(model)
        room = shape.max_position_embeddings - 2
        device = next(model.parameters()).device
        found: list[Tensor] = []
        was_training = model.training
        model.eval()
        try:
            with eager(model):
                known: tuple[int, Tensor] | None = None
                for place in blanks:
                    start = max(0, min(place - room // 2, len(ids) - room))
                    if known is None or known[0] != start:
                        seen = [special["cls"], *ids[start : start + room], special["sep"]]
                        known = start, model(torch.tensor([seen], device=device))[0]
                    found.append(known[1][place - start + 1, : self.vocabulary.size].float().cpu())
        finally:
            model.train(was_training)
        return torch.stack(found).masked_fill(torch.from_numpy(~self._ordinary), -math.inf)


def _noise(rows: Rows, seed: int, length: int) -> U64:
    """64 random bits for each position of each row."""
    keys = splitmix64(np.array([PURPOSE, seed & (1 << 64) - 1], np.uint64))
    of_epoch = splitmix64((keys[0] ^ keys[1]) + rows.epochs.astype(np.uint64))
    of_row = splitmix64(of_epoch + rows.ids.astype(np.uint64))
    return splitmix64(of_row[:, None] + splitmix64(np.arange(length, dtype=np.uint64)))


def _longer(values: Array, more: Array) -> Array:
    return np.concatenate((values, more.astype(values.dtype))) if len(more) else values


def _below(random: U64, limit: int) -> Array:
    """Whole numbers from 0 to limit - 1, from the lower half of the bits."""
    return ((random & np.uint64(0xFFFF_FFFF)) * np.uint64(limit)) >> np.uint64(32)


def _shape(model: nn.Module) -> Any:
    return model.shape
