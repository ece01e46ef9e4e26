"""Agents: a transformer reads a history, one token per step, and says after each what to do next.

Shapes: B histories, L steps, F features of a step, D width, H heads, E head width, S summary tokens, A actions.

A step is looked up feature by feature in one table and summed. Compressed, the history is read region by region: of
the earlier ones each step sees S summaries only. They are what S learned tokens at the end of a region have become,
having seen the region and the summaries before it (Bulatov et al. 2022; Chevalier et al. 2023); gradients flow back
through all regions of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.models.agent_shapes import FIRST, REWARDS, SIDE, AgentShape
from lockstep.models.attention import attend, causal_block_mask
from lockstep.models.embedding import as_residual, sum_table, table
from lockstep.models.layers import RMSNorm, plain_frequencies, rope_tables, rotate

Rope = tuple[Tensor, Tensor]
ACTION_BEFORE, REWARD_BEFORE = 2, 3  # places among the features of a step
OWN = ("action", "kind")  # what is said of a step before it is taken; all else is its outcome


class Kept:
    """Keys and values of one layer, of the tokens that were read so far; with room for those to come."""

    def __init__(self, room: int) -> None:
        self.room, self.length = room, 0
        self._both: Tensor | None = None  # (2, B, H, room, E)

    def add(self, k_BHLE: Tensor, v_BHLE: Tensor) -> tuple[Tensor, Tensor]:
        """Take these; all there are."""
        if self._both is None:
            rows, heads, _, width = k_BHLE.shape
            self._both = k_BHLE.new_empty(2, rows, heads, self.room, width)
        before, self.length = self.length, self.length + k_BHLE.shape[2]
        self._both[0, :, :, before : self.length] = k_BHLE
        self._both[1, :, :, before : self.length] = v_BHLE
        return self._both[0, :, :, : self.length], self._both[1, :, :, : self.length]


class Attention(nn.Module):
    """Each token sees itself and those before it, also those that are only kept as keys and values."""

    def __init__(self, shape: AgentShape, backend: str) -> None:
        super().__init__()
        self.heads, self.backend, self.dropout = (shape.num_heads, shape.head_dim), backend, shape.attention_dropout
        self.wqkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size, bias=False)
        self.wo = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor, rope: Rope, mask: Any, kept: Kept | None) -> Tensor:
        heads = (*x_BLD.shape[:2], *self.heads)
        q_BLHE, k_BLHE, v_BLHE = (part.view(heads) for part in self.wqkv(x_BLD).chunk(3, dim=-1))
        q_BHLE, k_BHLE = rotate(q_BLHE, *rope).transpose(1, 2), rotate(k_BLHE, *rope).transpose(1, 2)
        v_BHLE, backend = v_BLHE.transpose(1, 2), self.backend
        if kept is not None:
            k_BHLE, v_BHLE = kept.add(k_BHLE, v_BHLE)
            backend = "native_math" if mask is not None else backend  # a few tokens after many: every kernel differs
        dropout = self.dropout if self.training else 0.0
        causal = x_BLD.shape[1] > 1
        out_BHLE = attend(q_BHLE, k_BHLE, v_BHLE, backend=backend, causal=causal, mask=mask, dropout=dropout)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """w2(gelu(w1(x)))."""

    def __init__(self, shape: AgentShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.w2 = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x_BLD)))


class Block(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, shape: AgentShape, *, backend: str, dropout: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention = Attention(shape, backend)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = dropout

    def forward(self, x_BLD: Tensor, rope: Rope, mask: Any, kept: Kept | None) -> Tensor:
        x_BLD = x_BLD + self._drop(self.attention(self.attention_norm(x_BLD), rope, mask, kept))
        return x_BLD + self._drop(self.mlp(self.mlp_norm(x_BLD)))

    def _drop(self, x_BLD: Tensor) -> Tensor:
        return F.dropout(x_BLD, self.dropout, self.training) if self.dropout else x_BLD


class Agent(nn.Module):
    """The model of Algorithm Distillation. Weights are fp32; the engine's autocast decides how they are multiplied."""

    rope_frequency: Tensor
    first_rows_F: Tensor

    def __init__(self, shape: AgentShape, *, attention: str, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape, self.attention, self.dropout, self.checkpointing = shape, attention, dropout, checkpointing
        width = shape.hidden_size
        self.tok_embed = sum_table(shape.input_rows, width)
        if shape.compressed and shape.summary_tokens:
            self.summaries = table(shape.summary_tokens, width)  # before the first region
            self.askers = table(shape.summary_tokens, width)  # at the end of each
        self.layers = nn.ModuleList(Block(shape, backend=attention, dropout=dropout) for _ in range(shape.num_layers))
        self.norm = RMSNorm(width, shape.norm_eps)
        self._own = {name: count for name, count in shape.said.items() if name in OWN}
        self._outcome = {name: count for name, count in shape.said.items() if name not in OWN}
        self.output = nn.Linear(width, sum(self._own.values()), bias=False)
        if shape.dynamics:
            self.taken_embed = sum_table(shape.vocab_size, width)
            self.outcome = nn.Linear(width, sum(self._outcome.values()), bias=False)
        self.register_buffer("rope_frequency", plain_frequencies(shape.head_dim, shape.rope_theta), persistent=False)
        self.register_buffer("first_rows_F", _first_rows(shape), persistent=False)

    def rebuild_buffers(self) -> None:
        """Fill what no checkpoint holds; call it after `to_empty`."""
        dtype = self.rope_frequency.dtype
        self.rope_frequency.copy_(plain_frequencies(self.shape.head_dim, self.shape.rope_theta, dtype))
        self.first_rows_F.copy_(_first_rows(self.shape))

    def forward(
        self, seen_BLF: Tensor, taken_BL: Tensor | None = None, *, reader: Reader | None = None
    ) -> dict[str, Tensor]:
        """The logits (B, L, choices) of each answer; `taken_BL`: the actions whose outcome is to be said too.

        `reader` has read what lies before: in here, because of a model in shards no weight is to be had elsewhere.
        """
        hidden_BLD = self._hidden(seen_BLF) if reader is None else reader.hidden(seen_BLF)
        found = _answers(self._own, self.output(hidden_BLD))
        if self.shape.dynamics and taken_BL is not None:
            outcome = self.outcome(hidden_BLD + self.taken_embed(taken_BL[..., None]).to(hidden_BLD.dtype))
            found |= _answers(self._outcome, outcome)
        return found

    def _hidden(self, seen_BLF: Tensor) -> Tensor:
        summaries, size = self.shape.summary_tokens, self.shape.region
        if not self.shape.compressed:
            return self.read(self.embedded(seen_BLF))
        if not summaries:  # each region is a window of its own
            return torch.cat([self.read(self.embedded(self.as_first(part))) for part in seen_BLF.split(size, 1)], 1)
        said: list[Tensor] = []
        x_BLD = self.embedded(seen_BLF)
        regions = x_BLD.split(size, 1)
        carried_BSD = self.first_summaries(x_BLD)
        for number, region_BLD in enumerate(regions):
            asking = [] if number == len(regions) - 1 else [self.asking(x_BLD)]
            y_BLD = self.read(torch.cat([carried_BSD, region_BLD, *asking], 1))
            end = summaries + region_BLD.shape[1]
            said.append(y_BLD[:, summaries:end])
            carried_BSD = y_BLD[:, end:]
        return torch.cat(said, 1)

    def embedded(self, seen_BLF: Tensor) -> Tensor:
        """Each feature has its own rows of the table."""
        x_BLD = as_residual(self.tok_embed(seen_BLF + self.first_rows_F))
        return F.dropout(x_BLD, self.dropout, self.training) if self.dropout else x_BLD

    def as_first(self, seen_BLF: Tensor) -> Tensor:
        """The same steps where nothing is known of what was before them."""
        first_BLF = seen_BLF.clone()
        first_BLF[:, 0, ACTION_BEFORE], first_BLF[:, 0, REWARD_BEFORE] = self.shape.vocab_size, REWARDS - 1
        return first_BLF

    def first_summaries(self, like_BLD: Tensor) -> Tensor:
        """What is carried into the first region."""
        return self.summaries.weight.to(like_BLD.dtype).expand(len(like_BLD), -1, -1)

    def asking(self, like_BLD: Tensor) -> Tensor:
        """What becomes the summaries of the region before it."""
        return self.askers.weight.to(like_BLD.dtype).expand(len(like_BLD), -1, -1)

    def read(self, x_BLD: Tensor, kept: list[Kept] | None = None) -> Tensor:
        """What the last block and norm say of each token; after those that are `kept`, one of each layer."""
        before, count = kept[0].length if kept else 0, x_BLD.shape[1]
        cos_L1R, sin_L1R = rope_tables(self.rope_frequency, before + count)
        rope, wants_grad = (cos_L1R[before:], sin_L1R[before:]), torch.is_grad_enabled()
        drops_attention = self.training and self.shape.attention_dropout > 0
        mask = None  # causal, which every kernel knows by itself, flex apart
        if before and count > 1:
            mask = torch.ones(count, before + count, dtype=torch.bool, device=x_BLD.device).tril(before)
        elif self.attention == "flex" and wants_grad and not drops_attention:
            mask = causal_block_mask(count, x_BLD.device)
        for number, block in enumerate(self.layers):
            if self.checkpointing and wants_grad:
                noisy = drops_attention or (self.training and self.dropout > 0)
                x_BLD = checkpoint(block, x_BLD, rope, mask, None, use_reentrant=False, preserve_rng_state=noisy)
            else:
                x_BLD = block(x_BLD, rope, mask, kept[number] if kept else None)
        return self.norm(x_BLD)

    def reader(self, rows: int, *, context_length: int, horizon: int) -> Reader:
        """Somebody who reads that many histories step by step."""
        return Reader(self, rows, context_length=context_length, horizon=horizon)


def _answers(choices: dict[str, int], logits_BLC: Tensor) -> dict[str, Tensor]:
    """The logits of each answer; copies, since the hooks of a sharded model do not hold on views."""
    parts = logits_BLC.split(list(choices.values()), -1)
    return {name: part.clone() for name, part in zip(choices, parts, strict=True)}


class Reader:
    """Reads histories as they happen, with the keys and values of all steps at hand: what training would have seen.

    A context that is full loses its oldest episode, and the others are read anew, since they must not remember it.
    Compressed, a region that is full becomes summaries. Of a model in shards all ranks must read equally many steps.
    """

    def __init__(self, agent: Agent, rows: int, *, context_length: int, horizon: int) -> None:
        self.agent, self.rows, self.context_length, self.horizon = agent, rows, context_length, horizon
        shape = agent.shape
        assert shape.compressed or horizon <= context_length, "a context holds at least one episode"
        room = shape.region + 2 * shape.summary_tokens if shape.compressed else context_length
        self._carries = shape.compressed and shape.summary_tokens > 0
        self._kept = [Kept(room) for _ in range(shape.num_layers)]
        self._seen: list[Tensor] = []  # (B, 1, F) each, of the steps at hand

    @torch.no_grad()
    def see(self, seen_BF: Tensor) -> Tensor:
        """One step more of each history: the logits (B, A) of what to do in it. Episodes begin together."""
        assert not self.agent.training, "an agent that walks drops nothing"
        assert len(seen_BF) == self.rows, "a step of each history"
        return self.agent(seen_BF[:, None], reader=self)["action"][:, 0]

    def hidden(self, seen_B1F: Tensor) -> Tensor:
        """What is said of one step more; called by the agent, in its forward pass."""
        agent, shape = self.agent, self.agent.shape
        if shape.compressed and len(self._seen) == shape.region:
            self._compress()
        elif not shape.compressed and len(self._seen) == self.context_length:
            self._forget_an_episode()
        if not self._kept[0].length:
            if self._carries:
                agent.read(agent.first_summaries(agent.embedded(seen_B1F)), self._kept)
            seen_B1F = agent.as_first(seen_B1F)
        self._seen.append(seen_B1F)
        return agent.read(agent.embedded(seen_B1F), self._kept)

    def _forget_an_episode(self) -> None:
        self._empty(self._seen[self.horizon :])
        if self._seen:
            seen_BLF = self.agent.as_first(torch.cat(self._seen, 1))
            self._seen = list(seen_BLF.split(1, 1))
            self.agent.read(self.agent.embedded(seen_BLF), self._kept)

    def _compress(self) -> None:
        asked_BLD = self.agent.asking(self.agent.embedded(self._seen[-1])) if self._carries else None
        carried_BSD = None if asked_BLD is None else self.agent.read(asked_BLD, self._kept)
        self._empty([])
        if carried_BSD is not None:
            self.agent.read(carried_BSD, self._kept)

    def _empty(self, remembered: list[Tensor]) -> None:
        self._seen = remembered
        for kept in self._kept:
            kept.length = 0


def _first_rows(shape: AgentShape) -> Tensor:
    """Where the rows of each feature begin in the table."""
    counts = (0, SIDE, SIDE, shape.vocab_size + 1, REWARDS, FIRST)
    return torch.tensor(counts[:-1], device="cpu").cumsum(0)
