"""How much a model keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, forward: Callable[[], object], *, bf16: bool = False) -> int:
    """Bytes kept by a forward pass, weights not counted, each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext(),
    ):
        forward()
    return sum(size for size, _ in kept.values())
