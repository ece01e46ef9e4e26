"""How likely a masked-diffusion model finds an answer to a prompt.

Maths (Nie et al. 2025; Ou et al. 2024). Of an answer x_1..x_n a number l is drawn uniformly from 1..n and exactly l of
its tokens are hidden, every choice of l places alike; y is what is left, with the prompt before it. Then

    -log p(x | prompt)  <=  E over l, places of  (n / l) * sum over hidden i of  -log q(x_i | y, prompt),

equal at the optimum: it is the mean over all orders in which the tokens could be uncovered. Hiding exactly l instead of
each with chance l / n has the same expectation and far less variance. Over the samples b together l is stratified,
l_i = (k + floor(i n / b)) mod n + 1 with one k uniform in 0..n-1: each l_i is uniform by itself, so the expectation is
exact for any b. Guidance (Ho and Salimans 2022): logits = u + (s + 1) (c - u), u those for a hidden prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.objectives.causal import eager

if TYPE_CHECKING:
    from lockstep.contracts import Array

PASS_TOKENS = 1 << 14  # seen by the model at a time
LOGIT_BYTES = 1 << 28  # of one pass with guidance, where all logits exist


@torch.no_grad()
def log_likelihood(  # noqa: PLR0913 - a question and how to answer it, by name
    model: nn.Module,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    mask: int,
    bias_V: Tensor | None = None,
    samples: int = 128,
    cfg_scale: float = 0.0,
    seed: int = 0,
) -> float:
    """The lower bound of log p(answer | prompt) in nats; the same seed gives the same number.

    A prompt that is too long loses its beginning. One token alone can be hidden in one way only, and is asked for once.
    """
    shape: Any = model.shape
    if not 0 < len(answer) <= shape.max_position_embeddings:
        raise ConfigError(
            f"an answer of {len(answer)} tokens cannot be scored", hint=f"1 to {shape.max_position_embeddings} tokens"
        )
    seen = list(prompt)[max(0, len(prompt) + len(answer) - shape.max_position_embeddings) :]
    samples = samples if len(answer) > 1 else 1
    hidden, counts = hidden_places(len(answer), samples, np.random.default_rng(seed))
    device = next(model.parameters()).device
    row = torch.tensor([*seen, *answer], device=device)
    rows = max(1, PASS_TOKENS // len(row))
    if cfg_scale:
        rows = max(1, min(rows, LOGIT_BYTES // (8 * shape.vocab_size * len(answer))))
    was_training, total = model.training, 0.0
    model.eval()
    try:
        with eager(model):
            for first in range(0, samples, rows):
                part = slice(first, first + rows)
                hidden_BL = np.pad(hidden[part], ((0, 0), (len(seen), 0)))
                losses_M = _losses(model, row, hidden_BL, len(seen), mask=mask, bias_V=bias_V, cfg_scale=cfg_scale)
                weights_M = torch.from_numpy(np.repeat(len(answer) / counts[part], counts[part])).to(device)
                total += float((losses_M.double() * weights_M).sum())
    finally:
        model.train(was_training)
    return -total / samples


def hidden_places(length: int, samples: int, random: np.random.Generator) -> tuple[Array, Array]:
    """(samples, length) bool and how many are hidden in each: l stratified over the samples, places without return."""
    offset = int(random.integers(length))
    counts = (offset + np.arange(samples) * length // samples) % length + 1
    ranks = random.random((samples, length)).argsort(1).argsort(1)
    return ranks < counts[:, None], counts


def _losses(  # noqa: PLR0913 - what one pass needs
    model: nn.Module,
    row: Tensor,
    hidden_BL: Array,
    prompt: int,
    *,
    mask: int,
    bias_V: Tensor | None,
    cfg_scale: float,
) -> Tensor:
    """The cross-entropy of each hidden token, row after row."""
    where_BL = torch.from_numpy(hidden_BL).to(row.device)
    places_M = torch.from_numpy(np.flatnonzero(hidden_BL)).to(row.device)
    inputs_BL = row.repeat(len(hidden_BL), 1)
    targets_M = inputs_BL.flatten()[places_M]
    inputs_BL = inputs_BL.masked_fill(where_BL, mask)
    if not cfg_scale:
        return model(inputs_BL, targets_M, places_M=places_M, logit_bias_V=bias_V, per_target=True)[0]
    known_MV = model(inputs_BL, places_M=places_M)
    inputs_BL[:, :prompt] = mask
    unknown_MV = model(inputs_BL, places_M=places_M)
    logits_MV = unknown_MV + (cfg_scale + 1) * (known_MV - unknown_MV)
    logits_MV = logits_MV if bias_V is None else logits_MV + bias_V  # not before: -inf less -inf is no number
    return F.cross_entropy(logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float(), targets_M,
                           reduction="none")  # fmt: skip
