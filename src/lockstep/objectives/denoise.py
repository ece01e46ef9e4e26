"""Text out of a masked-diffusion model: hidden places are filled, block by block (Nie et al. 2025, Large Language
Diffusion Models).

Maths. A row is a prompt and `tokens` hidden places after it; a hidden place inside the prompt is a blank and is filled
too, all else of the prompt stays. The places after the prompt are cut into blocks of `block_length`, filled one after
another; the prompt's blanks belong to the first. Each pass predicts every hidden place i up to the end of the block,

    x_i = argmax over v of  logit_v + T g_v,    g_v = -ln(-ln u_v), u_v uniform: a draw from softmax(logit / T)

in float64 (float32 has 2^24 uniforms at most: g_v would end near 17, and rare tokens would come too seldom); T = 0 is
the plain argmax. The places of highest confidence keep their prediction for good, the others stay hidden. Confidence is

    low_confidence   softmax(logit)[x_i]: what the model is sure of comes first
    random           uniform: with T = 1 and a pass for each token an exact draw from an exact denoiser, in random order

A block of n places gets steps / blocks passes, each commits n // passes places, the first n % passes one more; so the
number of forward passes is `steps`. `threshold` commits all that are at least so sure (one at the least) instead, and
the passes are as few as that makes them.

Guidance: logits = u + (s + 1)(c - u), where u are those for the row with its prompt hidden, blanks or not. Ids that
the objective forbids (the mask, rows of the embedding that are no token) are forbidden after that, so that no infinity
meets another. Ends of text (`stop`): `forbid_eos` forbids them too; `delay_eos` commits them only where nothing else
of the block is left.

Draws are a hash of (seed + row, pass of the block, place, id): the same on every device, for any batch, and whatever
else is drawn. Rows of different lengths are padded on the left, and the padding is hidden from attention.

A threshold needs a third fewer passes at the same quality, fewer steps cost quality (benchmarks/llada_decoding.py). No
prefix cache: where all see each other every key and value changes with each token that is committed, so a cache would
be an approximation with a quality of its own to be shown.

Shapes: B rows, W places with padding, M hidden places that are predicted, V ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.contracts import SampleOptions
from lockstep.errors import ConfigError, NonFiniteError
from lockstep.objectives.causal import eager

REMASKING = ("low_confidence", "random")
PURPOSE = 0x64656E6F697365  # so that no other hash of the same numbers is this one
GOLDEN, FIRST, SECOND = (  # of splitmix64, as the signed numbers torch has
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
GUMBEL_BYTES = 256 << 20  # of one chunk of noise


@dataclass(frozen=True)
class DiffusionSampleOptions(SampleOptions):
    """How to fill hidden places. `stop` are the ids that end a text."""

    top_k: int = 0
    steps: int | None = None  # forward passes; None: one for each token
    block_length: int | None = None  # None: all at once
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    cfg_scale: float = 0.0
    forbid_eos: bool = False
    delay_eos: bool = False
    threshold: float | None = None

    @classmethod
    def of(cls, options: SampleOptions) -> DiffusionSampleOptions:
        """The same for this sampler, if it was made for any."""
        if isinstance(options, cls):
            return options
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(SampleOptions)})

    def passes(self, blanks: int) -> list[int]:
        """Forward passes of each block; `blanks` are those of the prompt, of the row that has most."""
        if self.remasking not in REMASKING:
            raise ConfigError(f"got {self.remasking!r}", where="--remasking", hint=" or ".join(REMASKING))
        if self.threshold is not None and (self.steps is not None or self.remasking == "random"):
            what = "decides the number of steps by itself" if self.steps is not None else "needs a confidence"
            raise ConfigError(what, where="--threshold", hint="without --steps, and with --remasking low_confidence")
        if self.tokens == 0 and self.block_length is not None:
            raise ConfigError(
                "blocks are cut from what is appended, and nothing is", where="--block-length", hint="--tokens N too"
            )
        length = self.block_length or self.tokens or 1
        if self.tokens % length:
            fitting, more = math.gcd(self.tokens, length), (self.tokens // length + 1) * length
            raise ConfigError(
                f"{self.tokens} tokens are no whole number of blocks of {length}",
                where="--block-length",
                hint=f"--block-length {fitting}, or --tokens {more}",
            )
        blocks = max(1, self.tokens // length)
        hidden = [min(length, self.tokens) + blanks, *[length] * (blocks - 1)]
        if self.steps is None:
            return hidden
        if self.steps % blocks:
            hint = f"--steps {-(-self.steps // blocks) * blocks}"
            raise ConfigError(f"{self.steps} are not the same for each of {blocks} blocks", where="--steps", hint=hint)
        each = self.steps // blocks
        if each > min(hidden):
            what = f"{self.steps} passes for {sum(hidden)} tokens: each commits one at the least"
            raise ConfigError(what, where="--steps", hint=f"--steps {blocks * min(hidden)}")
        return [each] * blocks


@dataclass(frozen=True)
class Denoised:
    """Whole rows, prompts included, and how many forward passes they took."""

    rows: list[list[int]]
    passes: int


def sample(
    model: nn.Module, prompt: list[int], options: SampleOptions, *, mask: int, bias_V: Tensor | None
) -> list[int]:
    """What follows the prompt, up to the end of the text; of a prompt with blanks itself, with all filled."""
    chosen = DiffusionSampleOptions.of(options)
    if mask in prompt:
        fill = dataclasses.replace(chosen, tokens=0, block_length=None)
        return generate(model, [prompt], fill, mask=mask, bias_V=bias_V).rows[0]
    added = generate(model, [prompt], chosen, mask=mask, bias_V=bias_V).rows[0][len(prompt) :]
    return cut(added, chosen.stop)


def cut(added: list[int], stop: Sequence[int]) -> list[int]:
    """Up to the first end of the text, and with it."""
    ends = [place for place, token in enumerate(added) if token in stop]
    return added[: ends[0] + 1] if ends else added


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    options: DiffusionSampleOptions,
    *,
    mask: int,
    bias_V: Tensor | None,
) -> Denoised:
    """Fill the blanks of the prompts and `options.tokens` hidden places after each of them.

    Row r of a batch is what its prompt alone gives with the seed `options.seed + r`.
    """
    device = next(model.parameters()).device
    canvas = _Canvas(prompts, options.tokens, mask, device)
    if not bool(canvas.hidden_BW.any()):
        raise ConfigError("there is nothing to fill in", hint="--tokens of at least 1, or a [MASK] in the prompt")
    blanks = int(canvas.hidden_BW[:, : canvas.start].sum(1).max())
    plan = options.passes(blanks)
    longest = _shape(model).max_position_embeddings
    if canvas.start + options.tokens > longest:
        raise ConfigError(
            f"a prompt of {canvas.start} and {options.tokens} more are over the model's {longest} positions",
            where="--tokens",
            hint=f"--tokens {longest - canvas.start}" if canvas.start < longest else "a shorter prompt",
        )
    sampler = _Sampler(model, options, mask, _forbidding(options, bias_V, _shape(model).vocab_size, device))
    was_training = model.training
    model.eval()
    try:
        with eager(model):
            passes = sampler.run(canvas, plan)
    finally:
        model.train(was_training)
    return Denoised(canvas.rows(), passes)


def _forbidding(options: DiffusionSampleOptions, bias_V: Tensor | None, size: int, device: torch.device) -> Tensor:
    """What is added to the logits, in float64."""
    bias = torch.zeros(size, dtype=torch.float64, device=device)
    if bias_V is not None:
        bias += bias_V.to(device)
    if options.forbid_eos:
        bias[list(options.stop)] = -math.inf
    return bias


class _Canvas:
    """The rows, padded on the left, and which places are hidden."""

    def __init__(self, prompts: Sequence[Sequence[int]], tokens: int, mask: int, device: torch.device) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self.start = max(lengths, default=0)
        padded = [[mask] * (self.start + tokens) for _ in prompts]
        for row, prompt in zip(padded, prompts, strict=True):
            row[self.start - len(prompt) : self.start] = prompt
        self.ids_BW = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(padded), -1)
        self.padding_B = self.start - torch.tensor(lengths, dtype=torch.long, device=device)
        self.places_W = torch.arange(self.start + tokens, device=device)
        real_BW = self.places_W >= self.padding_B[:, None]
        self.hidden_BW = (self.ids_BW == mask) & real_BW
        self.documents_BW = None if min(lengths, default=0) == self.start else real_BW.int()

    def rows(self) -> list[list[int]]:
        return [row[skip:] for row, skip in zip(self.ids_BW.tolist(), self.padding_B.tolist(), strict=True)]


@dataclass(frozen=True)
class _Sampler:
    """One pass after another."""

    model: nn.Module
    options: DiffusionSampleOptions
    mask: int
    bias_V: Tensor

    def run(self, canvas: _Canvas, plan: list[int]) -> int:
        """All blocks; the number of forward passes."""
        done, options = 0, self.options
        for block, passes in enumerate(plan):
            end = canvas.start + (block + 1) * (options.block_length or options.tokens)
            open_BW = canvas.hidden_BW & (end > canvas.places_W)
            left_B = open_BW.sum(1)
            base_B, more_B = left_B // passes, left_B % passes
            for number in range(passes):
                if options.threshold is not None and not bool(open_BW.any()):
                    break
                chosen_M, scores_BW = self._predict(canvas, open_BW, number)
                rank_BW = torch.sort(scores_BW, dim=1, descending=True, stable=True).indices.argsort(1)
                if options.threshold is None:
                    kept_BW = rank_BW < (base_B + (number < more_B))[:, None]
                else:
                    kept_BW = (scores_BW >= options.threshold) | (rank_BW == 0)
                kept_BW &= open_BW
                canvas.ids_BW[kept_BW] = chosen_M[kept_BW[open_BW]]
                canvas.hidden_BW &= ~kept_BW
                open_BW = open_BW & ~kept_BW
                done += 1
        assert not bool(canvas.hidden_BW.any()), "a place was left hidden"
        return done

    def _predict(self, canvas: _Canvas, open_BW: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """(ids of the open places, what says which of them to keep: -inf where nothing is open)."""
        options = self.options
        rows_M, columns_M = open_BW.nonzero(as_tuple=True)
        logits_MV = self._logits(canvas, open_BW.flatten().nonzero().flatten()).double() + self.bias_V
        keys_M = self._keys(rows_M, columns_M - canvas.padding_B[rows_M], number)
        chosen_M = _draw(logits_MV, keys_M, options)
        if options.remasking == "random":
            confidence_M = uniform(keys_M)
        else:
            confidence_M = logits_MV.softmax(-1).gather(1, chosen_M[:, None])[:, 0]
            if bool(confidence_M.isnan().any()):
                raise NonFiniteError("the model gives NaN where it should give a text", hint="another checkpoint")
        scores_BW = torch.full(open_BW.shape, -math.inf, dtype=torch.float64, device=open_BW.device)
        scores_BW[open_BW] = confidence_M
        if options.delay_eos and options.stop:
            ends_BW = torch.zeros_like(open_BW)
            ends_BW[open_BW] = torch.isin(chosen_M, chosen_M.new_tensor(options.stop))
            others_B1 = (open_BW & ~ends_BW).any(1, keepdim=True)
            scores_BW = torch.where(ends_BW & others_B1, scores_BW - 2, scores_BW)  # under all others, over -inf
        return chosen_M, scores_BW

    def _logits(self, canvas: _Canvas, places_M: Tensor) -> Tensor:
        ids_BW, documents_BW, scale = canvas.ids_BW, canvas.documents_BW, self.options.cfg_scale
        if scale == 0:
            return self.model(ids_BW, places_M=places_M, documents_BL=documents_BW)
        without_BW = ids_BW.masked_fill(canvas.places_W < canvas.start, self.mask)
        both = torch.cat([places_M, places_M + ids_BW.numel()])
        documents = None if documents_BW is None else documents_BW.repeat(2, 1)
        given_MV, free_MV = self.model(torch.cat([ids_BW, without_BW]), places_M=both, documents_BL=documents).chunk(2)
        return guided(given_MV.double(), free_MV.double(), scale)

    def _keys(self, rows_M: Tensor, places_M: Tensor, number: int) -> Tensor:
        """64 random bits for each place in this pass."""
        purpose, seed, passed = (
            torch.tensor(_signed(n), device=rows_M.device) for n in (PURPOSE, self.options.seed, number)
        )
        return mix(mix(mix(mix(purpose) + seed + rows_M) + passed) + places_M)


def guided(given: Tensor, free: Tensor, scale: float) -> Tensor:
    """Logits that follow the prompt more than the model does: u + (s + 1)(c - u)."""
    return free + (scale + 1) * (given - free)


def _draw(logits_MV: Tensor, keys_M: Tensor, options: DiffusionSampleOptions) -> Tensor:
    """An id for each place."""
    if options.temperature == 0:
        return logits_MV.argmax(-1)
    size = logits_MV.shape[1]
    if 0 < options.top_k < size:
        lowest = logits_MV.topk(options.top_k).values[:, -1:]
        logits_MV = logits_MV.masked_fill(logits_MV < lowest, -math.inf)
    ids_V = mix(torch.arange(size, device=logits_MV.device))
    found: list[Tensor] = []
    at_once = max(1, GUMBEL_BYTES // (8 * size))
    for logits_CV, keys_C in zip(logits_MV.split(at_once), keys_M.split(at_once), strict=True):
        noise_CV = uniform(keys_C[:, None] + ids_V).log_().neg_().log_()  # -g
        found.append(logits_CV.add(noise_CV, alpha=-options.temperature).argmax(-1))
    return torch.cat(found)


def mix(x: Tensor) -> Tensor:
    """splitmix64 of 64-bit numbers, on their device; as runtime.splitmix, but torch has signed ones only."""
    x = x + GOLDEN
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def uniform(keys: Tensor) -> Tensor:
    """Numbers between 0 and 1, never one of the two: 52 bits and a half."""
    return _shifted(mix(keys), 12).double().add_(0.5).mul_(2.0**-52)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The same 64 bits as torch would hold them."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shape(model: nn.Module) -> Any:
    return model.shape
