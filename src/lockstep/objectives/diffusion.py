"""Masked diffusion: a random share of the tokens is hidden, and predicted from all that are left (LLaDA).

Maths (Nie et al. 2025; the bound: Ou et al. 2024, Sahoo et al. 2024, Shi et al. 2024). Of a row x_1..x_L a time t is
drawn uniformly from [0, 1), and each token becomes the mask token with probability p = (1 - eps) t + eps, independently
of all others; the model sees the result y from both sides and is not told t. The loss of a batch is the SUM over the
hidden places H of all rows,

    loss = sum over rows, i in H of  -log q(x_i | y) / p,      weight = rows * L,

divided over all micro-batches and ranks by ALL tokens and never by |H|: only then is its expectation an upper bound of
the negative log-likelihood per token, and equal to it at the optimum, the entropy rate of the source. Divided by |H|
each row would count 1/p too often once more. How t is spread over the global batch: objectives/noise.py. With
probability `random_length_probability` a step's rows are cut to a length uniform in 1..L: short texts are to be known.

Answers (`data.documents` = answers). A row is a prompt, its answer, the end token, and end tokens up to the longest row
of the global batch. The prompt is never hidden, all that follows it may be and is learnt, the end tokens too: that is
how the length of an answer is learnt. With A = length after the cut - prompt,

    loss = sum over rows, i in H of  -log q(x_i | y) / (p A),      weight = rows.

No attention mask, as its authors train. The mask itself, and rows of the output matrix that no token has, are no
possible answer: their logits are -inf, in training, evaluation and generation alike. A mask token that stands in the
text is therefore no target, and stays what it is.

What is hidden is a hash of (seed, epoch, row, position), t of (seed, step, slot): new in every epoch, and the same for
any cut into batches, ranks and workers, and after a resume. Validation has the same noise each time, `eval_draws`
times each row. A row in which nothing is hidden is a row of loss 0.
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
from lockstep.objectives import conversations, noise
from lockstep.objectives.causal import is_compiled
from lockstep.objectives.options import DiffusionOptions

if TYPE_CHECKING:
    from lockstep.contracts import Array

PACK_TOKENS = 1 << 20  # tokens gathered before rows are cut
BUCKETS = 10  # of t, in the report


def build(options: DiffusionOptions, *, documents: str = "separated") -> Diffusion:
    """The objective `diffusion`; `documents` is `data.documents`."""
    options.check(documents)
    return Diffusion(options, documents=documents)


class Diffusion:
    """Predict hidden tokens, be they few or all."""

    terms: Mapping[str, float] = {"loss": 1.0}

    def __init__(self, options: DiffusionOptions, *, documents: str = "separated") -> None:
        self.options = options
        self.documents = documents
        self.answers = documents == "answers"
        self.columns: Mapping[str, str] = DiffusionOptions.columns_of(documents)
        self.whole_columns = ("lengths",) if self.answers else ()
        self._vocabulary: Vocabulary | None = None
        self._biases: dict[tuple[Any, ...], Tensor] = {}
        self.mask = -1

    def with_vocabulary(self, vocabulary: Vocabulary) -> Diffusion:
        """The same, told the ids: decides which one hides a token."""
        mask = self.options.mask_token_id
        own = vocabulary.specials.get("mask")
        if mask is not None and mask != own:
            _check_mask(mask, vocabulary)
        bound = copy.copy(self)
        bound._vocabulary, bound._biases = vocabulary, {}
        bound.mask = mask if mask is not None else vocabulary.size if own is None else own
        return bound

    @property
    def vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "with_vocabulary was not called"
        return self._vocabulary

    @property
    def possible_ids(self) -> int:
        """How many ids the model chooses from."""
        return self.vocabulary.size - (self.mask < self.vocabulary.size)

    # ------------------------------------------------------------------------------------------------------------ rows

    def pack(self, documents: Iterable[Array], *, context_length: int, separator: int) -> Iterator[dict[str, Array]]:
        """Blocks of rows of context_length tokens; each document is followed by the separator (none if < 0).

        Only the tail that does not fill a row is dropped. Answers: one conversation in a row.
        """
        if separator >= 0 and separator == self.mask:
            raise ConfigError(
                f"id {separator} ends the documents and cannot hide tokens too", where="objective.mask_token_id"
            )
        if self.answers:
            return conversations.pack(documents, context_length=context_length, separator=separator)
        return self._stream(documents, context_length, separator)

    def _stream(self, documents: Iterable[Array], length: int, separator: int) -> Iterator[dict[str, Array]]:
        parts: list[Array] = []
        gathered = 0
        end = np.array([separator] if separator >= 0 else [], np.int32)
        for document in documents:
            if len(document) == 0:
                continue
            parts += [np.asarray(document, np.int32), end]
            gathered += len(document) + len(end)
            if gathered >= max(PACK_TOKENS, length):
                stream = np.concatenate(parts)
                whole = gathered // length * length
                yield {"tokens": stream[:whole].reshape(-1, length)}
                parts, gathered = [stream[whole:].copy()], gathered - whole
        if gathered >= length:
            stream = np.concatenate(parts)
            yield {"tokens": stream[: gathered // length * length].reshape(-1, length)}

    # --------------------------------------------------------------------------------------------------------- batches

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        """Hide tokens, and say where and what was there. Made here, so that the device never has to be asked."""
        draws = 1 if draw.steps else self.options.eval_draws  # of no run: validation
        tokens, count = rows.columns["tokens"], len(rows.ids)
        width = tokens.shape[1]
        length = self._length(width, draw)
        tokens = tokens[:, :length]
        ids, epochs, slots = rows.ids, rows.epochs, rows.slots
        if draws > 1:
            which = np.repeat(np.arange(draws), count)
            tokens, ids = np.tile(tokens, (draws, 1)), np.tile(ids, draws)
            epochs, slots = np.tile(epochs, draws) + which, np.tile(slots, draws) + which * draw.batch_rows
        times = noise.times(slots, seed=draw.seed, step=draw.step, batch_rows=draw.batch_rows * draws)
        shares = (1 - self.options.eps) * times + self.options.eps
        hidden = noise.hidden(ids, epochs, shares, seed=draw.seed, length=length)
        hidden &= tokens != self.mask
        per_token = 1 / shares
        if self.answers:
            prompts = np.tile(rows.columns["lengths"][:, :1], (draws, 1))
            hidden &= np.arange(length) >= prompts
            per_token /= np.maximum(1, length - prompts[:, 0])
        places = np.flatnonzero(hidden)
        counts = np.count_nonzero(hidden, axis=1)
        inputs = tokens.astype(np.int64).reshape(-1)
        targets = inputs[places]
        inputs[places] = self.mask
        tensors = {
            "inputs": torch.from_numpy(inputs.reshape(-1, length)),
            "targets": torch.from_numpy(targets),
            "places": torch.from_numpy(places),
            "token_weights": torch.from_numpy(np.repeat(per_token.astype(np.float32), counts)),
            "times": torch.from_numpy(times.astype(np.float32)),
        }
        if draws > 1:
            tensors["hidden"] = torch.from_numpy(counts.reshape(draws, count).sum(1))
        if length < width:
            tensors["cut"] = torch.empty(0)
        weight = draws * count * (1 if self.answers else length)
        return Batch(tensors, {"loss": weight}, count, count * length)

    def _length(self, width: int, draw: Draw) -> int:
        """Of the rows of this step."""
        if self.answers:
            return int(draw.whole["lengths"][:, 1].max())
        chance = self.options.random_length_probability
        if not draw.steps or not chance:
            return width
        return noise.cut_length(width, seed=draw.seed, step=draw.step, probability=chance)

    # ----------------------------------------------------------------------------------------------------------- model

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The SUM of weighted cross-entropies over the hidden places."""
        parts = batch.tensors
        _set_stance(model, eager="cut" in parts)
        total = model(
            parts["inputs"],
            parts["targets"],
            parts["token_weights"],
            places_M=parts["places"],
            logit_bias_V=self.logit_bias(model),
        )
        return {"loss": total}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Sum]:
        """The bound, how often the most likely token was the right one, and the cross-entropy by tenths of t."""
        parts = batch.tensors
        _set_stance(model, eager="cut" in parts)
        sizes: list[int] = parts["hidden"].tolist() if "hidden" in parts else [len(parts["places"])]
        length, rows, first = parts["inputs"].shape[1], len(parts["inputs"]) // len(sizes), 0
        losses: list[Tensor] = []
        correct: list[Tensor] = []
        for index, size in enumerate(sizes):
            some = slice(first, first + size)
            losses_M, correct_M = model(
                parts["inputs"][index * rows : (index + 1) * rows],
                parts["targets"][some],
                places_M=parts["places"][some] - index * rows * length,
                logit_bias_V=self.logit_bias(model),
                per_target=True,
            )
            losses.append(losses_M)
            correct.append(correct_M)
            first += size
        losses_M, correct_M = torch.cat(losses), torch.cat(correct)
        sums = {
            "loss": Sum((losses_M * parts["token_weights"]).sum(), batch.weights["loss"]),
            "accuracy": Sum(correct_M.sum(), len(losses_M)),
        }
        bucket_M = (parts["times"] * BUCKETS).long().clamp_(max=BUCKETS - 1)[parts["places"] // length]
        totals = losses_M.new_zeros(BUCKETS).index_add_(0, bucket_M, losses_M)
        counts: list[int] = torch.bincount(bucket_M, minlength=BUCKETS).tolist()
        for bucket, count in enumerate(counts):
            sums[f"loss_t_{bucket}"] = Sum(totals[bucket], count)
        return sums

    def logit_bias(self, model: nn.Module) -> Tensor:
        """(V,) what is added to all logits: -inf forbids the mask and the rows that no token has."""
        shape: Any = model.shape
        weight = next(model.parameters())
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        key = (weight.device, shape.vocab_size, dtype)
        if key not in self._biases:
            self.check_rows(shape.vocab_size)
            bias_V = torch.zeros(shape.vocab_size, dtype=dtype)
            bias_V[self.vocabulary.size :] = -math.inf
            bias_V[self.mask] = -math.inf
            self._biases[key] = bias_V.to(weight.device)
        return self._biases[key]

    def check_rows(self, rows: int) -> None:
        """Refuse a mask that has no row among those of the model: known before it is loaded."""
        if self.mask >= rows:
            raise ConfigError(
                f"the mask has id {self.mask}, the model only rows 0 to {rows - 1}",
                where="objective.mask_token_id",
                hint=f"model.vocab_size={self.mask + 1}, or a smaller tokenizer",
            )

    def sample(self, model: nn.Module, prompt: list[int], options: SampleOptions) -> list[int]:
        """Token ids that follow the prompt: all hidden at first, then uncovered step by step."""
        from lockstep.objectives import denoise

        return denoise.sample(model, prompt, options, mask=self.mask, bias_V=self.logit_bias(model))


def _check_mask(mask: int, vocabulary: Vocabulary) -> None:
    """Refuse to hide tokens behind one that means something. Ids that the tokenizer only reserves are welcome."""
    roles = [role for role, place in vocabulary.specials.items() if place == mask and role != "mask"]
    ends = mask == vocabulary.separator
    if ends or roles or (mask < vocabulary.size and vocabulary.continues[mask]):
        what = (
            "what ends each document"
            if ends
            else f"the tokenizer's [{roles[0].upper()}]"
            if roles
            else "part of a word"
        )
        raise ConfigError(
            f"id {mask} cannot hide tokens, it is {what}",
            where="objective.mask_token_id",
            hint=f"{vocabulary.specials.get('mask', vocabulary.size)}, or leave it out",
        )


def _set_stance(model: nn.Module, *, eager: bool) -> None:
    """Rows that were cut run without the compiler: it would compile each length, or one for all that computes other
    bits after a resume. Until the next call, since a backward pass may run a block again."""
    if is_compiled(model):
        torch.compiler.set_stance("force_eager" if eager else "default")
