"""Encoders: every token sees the whole row, or its own document of it; the head is computed where a target is.

Shapes: B rows, L tokens, N = B * L, M chosen places of the N, D width, H heads, E head width, V vocabulary.

Three architectures share the class. `bert` is transformers' BertForMaskedLM and `modern` its ModernBertForMaskedLM.
`prenorm` has BERT's parts (learned positions, biases, GELU), with the norms before each branch and one after the last.
Head and loss live in here for the same reasons as in llama.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.kernels.linear_cross_entropy import IGNORE, has_kernel, linear_cross_entropy, score_targets
from lockstep.models.attention import attend, document_mask, window_mask
from lockstep.models.embedding import as_residual, check_ids, table
from lockstep.models.encoder_shapes import EncoderShape
from lockstep.models.layers import plain_frequencies, rope_tables, rotate
from lockstep.models.shapes import chunk_tokens

Rope = tuple[Tensor, Tensor] | None  # cos and sin


class LayerNorm(nn.Module):
    """(x - mean) / std in fp32 at least, times a weight, plus a bias where there is one; cast back."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        wide_BLD = x_BLD if x_BLD.dtype == torch.float64 else x_BLD.float()
        return F.layer_norm(wide_BLD, self.weight.shape, self.weight, self.bias, self.eps).to(x_BLD.dtype)


class Attention(nn.Module):
    """Both directions; rotary positions where it is given some."""

    def __init__(self, shape: EncoderShape, backend: str) -> None:
        super().__init__()
        self.head_dim, self.backend = shape.head_dim, backend
        width, bias = shape.hidden_size, shape.architecture != "modern"
        self.wqkv = nn.Linear(width, 3 * width, bias=bias)
        self.wo = nn.Linear(width, width, bias=bias)

    def forward(self, x_BLD: Tensor, rope: Rope, mask: Any) -> Tensor:
        heads = (*x_BLD.shape[:2], -1, self.head_dim)
        q_BLHE, k_BLHE, v_BLHE = (part.view(heads) for part in self.wqkv(x_BLD).chunk(3, dim=-1))
        if rope is not None:
            q_BLHE, k_BLHE = rotate(q_BLHE, *rope), rotate(k_BLHE, *rope)
        q_BHLE, k_BHLE, v_BHLE = (part.transpose(1, 2) for part in (q_BLHE, k_BLHE, v_BLHE))
        out_BHLE = attend(q_BHLE, k_BHLE, v_BHLE, backend=self.backend, causal=False, mask=mask)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """w2(gelu(w1(x))); modern: GeGLU, w1 makes the input and its gate."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.gated = shape.architecture == "modern"
        width, inner, bias = shape.hidden_size, shape.intermediate_size, not self.gated
        self.w1 = nn.Linear(width, 2 * inner if self.gated else inner, bias=bias)
        self.w2 = nn.Linear(inner, width, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if not self.gated:
            return self.w2(F.gelu(self.w1(x_BLD)))
        kept, gate = self.w1(x_BLD).chunk(2, dim=-1)
        return self.w2(F.gelu(kept) * gate)


class EncoderBlock(nn.Module):
    """Norms before each branch, or (bert) after adding it. The first block of modern has none before attention."""

    def __init__(self, shape: EncoderShape, layer: int, *, backend: str, dropout: float) -> None:
        super().__init__()
        width, eps, modern = shape.hidden_size, shape.norm_eps, shape.architecture == "modern"
        self.norm_last = shape.architecture == "bert"
        self.dropout = dropout
        self.attention = Attention(shape, backend)
        self.attention_norm = None if modern and layer == 0 else LayerNorm(width, eps, bias=not modern)
        self.mlp = FeedForward(shape)
        self.mlp_norm = LayerNorm(width, eps, bias=not modern)

    def forward(self, x_BLD: Tensor, rope: Rope, mask: Any) -> Tensor:
        if self.norm_last:
            assert self.attention_norm is not None
            x_BLD = self.attention_norm(x_BLD + self._drop(self.attention(x_BLD, rope, mask)))
            return self.mlp_norm(x_BLD + self._drop(self.mlp(x_BLD)))
        normed_BLD = x_BLD if self.attention_norm is None else self.attention_norm(x_BLD)
        x_BLD = x_BLD + self._drop(self.attention(normed_BLD, rope, mask))
        return x_BLD + self._drop(self.mlp(self.mlp_norm(x_BLD)))

    def _drop(self, x_BLD: Tensor) -> Tensor:
        return F.dropout(x_BLD, self.dropout, self.training) if self.dropout else x_BLD


class Head(nn.Module):
    """What stands between the last block and the output matrix, and that matrix's bias.

    Without the transform a tied output matrix would recognise the token it was given, [MASK] for the most part.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width, bias = shape.hidden_size, shape.architecture != "modern"
        self.dense = nn.Linear(width, width, bias=bias)
        self.norm = LayerNorm(width, shape.norm_eps, bias=bias)
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Encoder(nn.Module):
    """The model of every encoder run. Weights are fp32; the engine's autocast decides what they are multiplied in."""

    rope_frequency: Tensor
    local_frequency: Tensor

    def __init__(
        self, shape: EncoderShape, *, attention: str, dropout: float = 0.0, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.shape, self.attention, self.dropout, self.checkpointing = shape, attention, dropout, checkpointing
        width, modern = shape.hidden_size, shape.architecture == "modern"
        self.tok_embed = table(shape.vocab_size, width)
        self.pos_embed = None if modern else table(shape.max_position_embeddings, width)
        self.type_embed = table(shape.types, width) if shape.architecture == "bert" else None
        self.embed_norm = LayerNorm(width, shape.norm_eps, bias=not modern)
        self.layers = nn.ModuleList(
            EncoderBlock(shape, layer, backend=attention, dropout=dropout) for layer in range(shape.num_layers)
        )
        self.norm = None if shape.architecture == "bert" else LayerNorm(width, shape.norm_eps, bias=not modern)
        self.head = Head(shape)
        if modern:
            for name, frequency in self._frequencies(torch.float32).items():
                self.register_buffer(name, frequency, persistent=False)

    def _frequencies(self, dtype: torch.dtype) -> dict[str, Tensor]:
        thetas = {"rope_frequency": self.shape.rope_theta, "local_frequency": self.shape.local_rope_theta}
        return {name: plain_frequencies(self.shape.head_dim, theta, dtype) for name, theta in thetas.items()}

    def rebuild_buffers(self) -> None:
        """Fill what no checkpoint holds; call it after `to_empty`."""
        if self.shape.architecture == "modern":
            for name, frequency in self._frequencies(self.rope_frequency.dtype).items():
                getattr(self, name).copy_(frequency)

    def forward(
        self,
        inputs_BL: Tensor,
        targets_M: Tensor | None = None,
        *,
        places_M: Tensor | None = None,
        documents_BL: Tensor | None = None,
        per_target: bool = False,
    ) -> Any:
        """Without targets the logits (B, L, V); with targets the SUM of cross-entropies over the chosen places.

        `places_M` are indices into the B * L tokens. `documents_BL` numbers the documents of each row, padding being
        document 0: a token sees those of its own only, and learned positions begin anew with each.
        `per_target` gives (cross-entropy of each target, whether it was the most likely token), without gradients.
        """
        try:
            x_BLD = self.hidden(inputs_BL, documents_BL)
            if targets_M is None:
                return F.linear(self.head(x_BLD), self.tok_embed.weight, self.head.bias)
            assert places_M is not None, "targets have places"
            x_MD = self.head(x_BLD.flatten(0, 1)[places_M])
            chunk = chunk_tokens(self.shape.vocab_size, in_place=has_kernel(x_MD) and not per_target)
            score = score_targets if per_target else linear_cross_entropy
            return score(x_MD, self.tok_embed.weight, targets_M, chunk_tokens=chunk, bias_V=self.head.bias)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, IndexError) or "out of bounds" in str(error):  # not out of memory: this takes some
                real = () if targets_M is None else (targets_M[targets_M != IGNORE],)
                check_ids(self.shape.vocab_size, inputs_BL, *real)
            raise

    def hidden(self, inputs_BL: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        """What the last block (and norm) says of each token, (B, L, D)."""
        length, wants_grad = inputs_BL.shape[1], torch.is_grad_enabled()
        assert length <= self.shape.max_position_embeddings, "rows longer than the model's positions"
        x_BLD = self._embedded(inputs_BL, documents_BL)
        masks, ropes = self._surroundings(length, documents_BL, x_BLD.device, wants_grad=wants_grad)
        for layer, block in enumerate(self.layers):
            window = self.shape.window(layer)
            if self.checkpointing and wants_grad:
                x_BLD = checkpoint(
                    block, x_BLD, ropes[window], masks[window],
                    use_reentrant=False, preserve_rng_state=self.dropout > 0 and self.training,
                )  # fmt: skip
            else:
                x_BLD = block(x_BLD, ropes[window], masks[window])
        return x_BLD if self.norm is None else self.norm(x_BLD)

    def _embedded(self, inputs_BL: Tensor, documents_BL: Tensor | None) -> Tensor:
        x_BLD = self.tok_embed(inputs_BL)
        if self.type_embed is not None:
            x_BLD = x_BLD + self.type_embed.weight[0]
        if self.pos_embed is not None:
            x_BLD = x_BLD + self.pos_embed(_positions(inputs_BL, documents_BL))
        x_BLD = self.embed_norm(as_residual(x_BLD))
        return F.dropout(x_BLD, self.dropout, self.training) if self.dropout else x_BLD

    def _surroundings(
        self, length: int, documents_BL: Tensor | None, device: torch.device, *, wants_grad: bool
    ) -> tuple[dict[int, Any], dict[int, Rope]]:
        """Masks and rotary tables of the row, by how far a layer sees; made once for all blocks."""
        masks: dict[int, Any] = {}
        ropes: dict[int, Rope] = {}
        for window in {self.shape.window(layer) for layer in range(self.shape.num_layers)}:
            if documents_BL is not None:
                masks[window] = document_mask(documents_BL, backend=self.attention, causal=False, window=window)
            elif self.attention == "flex" and not wants_grad and not 0 < window < length - 1:
                masks[window] = None  # any kernel's forward pass will do
            else:
                masks[window] = window_mask(length, device, backend=self.attention, window=window)
            if self.shape.architecture == "modern":
                ropes[window] = rope_tables(self.local_frequency if window else self.rope_frequency, length)
            else:
                ropes[window] = None
        return masks, ropes


def _positions(inputs_BL: Tensor, documents_BL: Tensor | None) -> Tensor:
    """0, 1, 2, ... in each row, or in each document of it."""
    places_L = torch.arange(inputs_BL.shape[1], device=inputs_BL.device)
    if documents_BL is None:
        return places_L
    begins_BL = documents_BL[:, 1:] != documents_BL[:, :-1]
    first_BL = F.pad(torch.where(begins_BL, places_L[1:], 0), (1, 0)).cummax(1).values
    return places_L - first_BL
