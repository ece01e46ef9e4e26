"""LLaMA: embedding, blocks, norm, output matrix; the loss sum is computed inside forward.

Shapes: B rows, L tokens, N = B * L, M places among them, D width, V vocabulary.

The head and the loss live in here because a sharded head can only be touched inside the model's own forward, and so
that a fused kernel can take the head's place without any objective knowing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.kernels.linear_cross_entropy import (
    IGNORE,
    has_kernel,
    linear_cross_entropy,
    score_next_tokens,
    score_targets,
)
from lockstep.models.attention import causal_block_mask, document_mask, everyones_block_mask
from lockstep.models.embedding import as_residual, check_ids, table
from lockstep.models.layers import Block, RMSNorm, rope_frequencies, rope_tables
from lockstep.models.shapes import LlamaShape, chunk_tokens


class Llama(nn.Module):
    """The model of every LLaMA run. Weights are fp32; the engine's autocast decides what they are multiplied in."""

    rope_frequency: Tensor

    def __init__(self, shape: LlamaShape, *, attention: str, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.attention = attention
        self.checkpointing = checkpointing
        self.dropout = dropout
        self.float8_head = False  # whether gradients of the output matrix are made by float8 products
        self.tok_embed = table(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, backend=attention, dropout=dropout) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.output = None if shape.tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.register_buffer("rope_frequency", rope_frequencies(shape), persistent=False)

    def rebuild_buffers(self) -> None:
        """Fill what no checkpoint holds; call it after `to_empty`."""
        self.rope_frequency.copy_(rope_frequencies(self.shape, self.rope_frequency.dtype))

    def forward(  # noqa: PLR0913 - what an objective may ask of one pass, by name
        self,
        inputs_BL: Tensor,
        targets: Tensor | None = None,
        token_weights: Tensor | None = None,
        *,
        places_M: Tensor | None = None,
        documents_BL: Tensor | None = None,
        logit_bias_V: Tensor | None = None,
        count_correct: bool = False,
        per_target: bool = False,
    ) -> Any:
        """Without targets the logits; with targets the SUM of cross-entropies over targets != -100, times the weights.

        `places_M` are places of the flattened rows: the head sees these only, and targets and weights are (M,); else
        they are (B, L). `logit_bias_V` is added to all logits: -inf forbids an id.
        `documents_BL` numbers the documents of each row: a token sees those of its own only. Positions count on over
        them, which changes nothing, because rotary positions act by their differences.
        `count_correct` gives (sum, number of targets that were the most likely token) instead, `per_target` the
        cross-entropy of each target and whether it was the most likely; both without gradients.
        """
        try:
            x_BLD = self._hidden(inputs_BL, documents_BL)
            in_place = has_kernel(x_BLD) and not (per_target or count_correct)  # scores are by plain operations
            chunk, head_VD = chunk_tokens(self.shape.vocab_size, in_place=in_place), self._head()
            bias_V = None if logit_bias_V is None else logit_bias_V.to(x_BLD.dtype)
            if places_M is None and targets is None:
                return F.linear(x_BLD, head_VD, bias_V)
            x_ND = x_BLD.flatten(0, 1)
            x_ND = x_ND if places_M is None else x_ND[places_M]
            if targets is None:
                return F.linear(x_ND, head_VD, bias_V)
            targets_N = targets.flatten()
            if per_target:
                return score_targets(x_ND, head_VD, targets_N, chunk_tokens=chunk, bias_V=bias_V)
            if count_correct:
                return score_next_tokens(x_ND, head_VD, targets_N, chunk_tokens=chunk, bias_V=bias_V)
            weights_N = None if token_weights is None else token_weights.flatten()
            return linear_cross_entropy(
                x_ND, head_VD, targets_N, weights_N, chunk_tokens=chunk, bias_V=bias_V, float8=self.float8_head
            )
        except (IndexError, RuntimeError) as error:
            if isinstance(error, IndexError) or "out of bounds" in str(error):  # not out of memory: this takes some
                self._check_ids(inputs_BL, targets)
            raise

    def _head(self) -> Tensor:
        return self.tok_embed.weight if self.output is None else self.output.weight

    def _hidden(self, inputs_BL: Tensor, documents_BL: Tensor | None) -> Tensor:
        length = inputs_BL.shape[1]
        assert length <= self.shape.max_position_embeddings, "rows longer than the model's positions"
        x_BLD = as_residual(self.tok_embed(inputs_BL))
        cos_L1R, sin_L1R = rope_tables(self.rope_frequency, length)
        wants_grad = torch.is_grad_enabled()
        mask = None  # causal or not, which every kernel knows by itself, flex apart
        causal = not self.shape.bidirectional
        if documents_BL is not None:
            mask = document_mask(documents_BL, backend=self.attention, causal=causal)
        elif self.attention == "flex" and wants_grad and not causal:
            mask = everyones_block_mask(length, x_BLD.device)
        elif self.attention == "flex" and wants_grad:
            mask = causal_block_mask(length, x_BLD.device)
        for block in self.layers:
            if self.checkpointing and wants_grad:
                x_BLD = checkpoint(
                    block, x_BLD, cos_L1R, sin_L1R, mask,
                    use_reentrant=False, preserve_rng_state=self.dropout > 0 and self.training,
                )  # fmt: skip
            else:
                x_BLD = block(x_BLD, cos_L1R, sin_L1R, mask)
        return self.norm(x_BLD)

    def _check_ids(self, inputs_BL: Tensor, targets: Tensor | None) -> None:
        real = () if targets is None else (targets[targets != IGNORE],)
        check_ids(self.shape.vocab_size, inputs_BL, *real)
