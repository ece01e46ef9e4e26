"""How long attention takes, by kernel: forward and backward at the shape of a layer, by the GPU's own clock.

Shapes: B rows, L tokens, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lockstep.models.attention import HALF, attend
from lockstep.models.shapes import AgentShape, AnyShape, LlamaShape
from lockstep.runtime import gpu_clock

AHEAD = 1.05  # how much faster than the one before it a kernel must be: else the next start might choose the other


@dataclass(frozen=True)
class Layer:
    """What a layer asks of attention."""

    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype_name: str


def layer_of(shape: AnyShape, *, rows: int, length: int, dtype_name: str) -> Layer | None:
    """Of a model; None: its rows are cut into regions, or the kernels that are compared cannot compute in this type."""
    if isinstance(shape, AgentShape) or dtype_name not in HALF:
        return None
    if isinstance(shape, LlamaShape):
        heads, kv_heads, causal = shape.num_heads, shape.num_kv_heads, not shape.bidirectional
    else:
        heads, kv_heads, causal = shape.num_heads, shape.num_heads, False
    return Layer(rows, length, heads, kv_heads, shape.head_dim, causal, dtype_name)


def milliseconds(kernel: str, layer: Layer, device: torch.device) -> float:
    """Of one forward and backward pass: the median of a few. The generators of the run are left alone."""
    generator = torch.Generator(device).manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        """As a layer has it: heads side by side in memory."""
        sizes = (layer.rows, layer.length, heads, layer.head_dim)
        return torch.randn(sizes, generator=generator, device=device, dtype=HALF[layer.dtype_name]).transpose(1, 2)

    q_BHLE, k_BKLE, v_BKLE = (random(heads).requires_grad_() for heads in (layer.heads, layer.kv_heads, layer.kv_heads))
    back_BHLE = random(layer.heads)

    def both_ways() -> None:
        out_BHLE = attend(q_BHLE, k_BKLE, v_BKLE, backend=kernel, causal=layer.causal)
        torch.autograd.grad(out_BHLE, (q_BHLE, k_BKLE, v_BKLE), back_BHLE)

    return gpu_clock.milliseconds(both_ways)


def fastest(times: Mapping[str, float]) -> str:
    """Of kernels in the order they are preferred in: the first, unless another is clearly faster."""
    best = next(iter(times))
    for name, taken in times.items():
        if taken * AHEAD < times[best]:
            best = name
    return best
