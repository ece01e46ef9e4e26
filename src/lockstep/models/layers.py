"""The pieces of a LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and the block made of them.

Shapes: B rows, L tokens, D width, F inner width, H query heads, K key/value heads, E head width, R = E / 2 rotated
pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.models.attention import attend
from lockstep.models.shapes import LlamaShape


def rope_frequencies(shape: LlamaShape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angle per position of each pair, (R,), with the llama3 scaling; in fp32 bit-equal to transformers' inv_freq."""
    frequency_R = plain_frequencies(shape.head_dim, shape.rope_theta, dtype)
    if (scaling := shape.rope_scaling) is None:
        return frequency_R
    wavelength_R = 2 * math.pi / frequency_R
    kept_R = ((scaling.original / wavelength_R - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept_R) * frequency_R / scaling.factor + kept_R * frequency_R


def plain_frequencies(head_dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same without any scaling."""
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / head_dim
    return 1.0 / (theta**exponents_R)


def rope_tables(frequency_R: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0..length-1, (L, 1, R), never in less than fp32."""
    angle_LR = torch.arange(length, device=frequency_R.device, dtype=frequency_R.dtype)[:, None] * frequency_R
    return angle_LR.cos()[:, None], angle_LR.sin()[:, None]


def rotate(x_BLHE: Tensor, cos_L1R: Tensor, sin_L1R: Tensor) -> Tensor:
    """Turn pair (i, i + E/2) of each head by its angle; in fp32, because bf16 angles lose far positions."""
    first, second = x_BLHE.chunk(2, dim=-1)
    turned = torch.cat((first * cos_L1R - second * sin_L1R, second * cos_L1R + first * sin_L1R), dim=-1)
    return turned.to(x_BLHE.dtype)


def made_again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """What it returns; under the compiler none of it is kept, because the backward pass makes it again on its way."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


class Linear(nn.Linear):
    """A compiled block keeps no copy of its weight in half precision, which autocast would: two bytes a parameter."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        if torch.compiler.is_compiling() and torch.is_autocast_enabled(kind):
            return F.linear(input, made_again(Tensor.to, self.weight, torch.get_autocast_dtype(kind)), self.bias)
        return super().forward(input)


class RMSNorm(nn.Module):
    """x / rms(x) in fp32, cast back, then times the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BLD: Tensor) -> Tensor:
        wide_BLD = x_BLD if x_BLD.dtype == torch.float64 else x_BLD.float()
        scale_BL1 = torch.rsqrt(wide_BLD.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((wide_BLD * scale_BL1).to(x_BLD.dtype) * self.weight).to(x_BLD.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; LLaMA's own has neither biases nor norms."""

    def __init__(self, shape: LlamaShape, backend: str) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.backend = backend
        self.causal = not shape.bidirectional
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.wq = Linear(shape.hidden_size, query, bias=shape.qkv_bias)
        self.wk = Linear(shape.hidden_size, key, bias=shape.qkv_bias)
        self.wv = Linear(shape.hidden_size, key, bias=shape.qkv_bias)
        self.wo = Linear(query, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def forward(self, x_BLD: Tensor, cos_L1R: Tensor, sin_L1R: Tensor, mask: Any) -> Tensor:
        heads = (*x_BLD.shape[:2], -1, self.head_dim)
        q_BLHE, k_BLKE = self.wq(x_BLD).view(heads), self.wk(x_BLD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHE, k_BLKE = self.q_norm(q_BLHE), self.k_norm(k_BLKE)
        q_BHLE = rotate(q_BLHE, cos_L1R, sin_L1R).transpose(1, 2)
        k_BKLE = rotate(k_BLKE, cos_L1R, sin_L1R).transpose(1, 2)
        v_BKLE = self.wv(x_BLD).view(heads).transpose(1, 2)
        out_BHLE = attend(q_BHLE, k_BKLE, v_BKLE, backend=self.backend, causal=self.causal, mask=mask)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): w1 is gate, w2 down, w3 up."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.w2 = Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.w3 = Linear(shape.hidden_size, shape.intermediate_size, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(made_again(_gated, self.w1(x_BLD), self.w3(x_BLD)))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Block(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, shape: LlamaShape, *, backend: str, dropout: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attention = Attention(shape, backend)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape)
        self.dropout = dropout

    def forward(self, x_BLD: Tensor, cos_L1R: Tensor, sin_L1R: Tensor, mask: Any) -> Tensor:
        x_BLD = x_BLD + self._drop(self.attention(self.attention_norm(x_BLD), cos_L1R, sin_L1R, mask))
        return x_BLD + self._drop(self.mlp(self.mlp_norm(x_BLD)))

    def _drop(self, x_BLD: Tensor) -> Tensor:
        return F.dropout(x_BLD, self.dropout, self.training) if self.dropout else x_BLD
