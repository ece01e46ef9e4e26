"""What every model does with ids: the table they are looked up in, what comes out of it, ids that are in no table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.errors import DataError


def table(rows: int, width: int) -> nn.Embedding:
    """Filled later: torch's own way loads dynamo, a second."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def as_residual(x_BLD: Tensor) -> Tensor:
    """What the blocks add to: under bf16, which has fp32's range, it may live in that; in fp16 it may not."""
    kind = x_BLD.device.type
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return x_BLD.to(torch.bfloat16) if half else x_BLD


def check_ids(vocab_size: int, *ids: Tensor) -> None:
    """After a failure: was it an id outside the vocabulary?

    On a GPU such an id is a device assert, after which nothing can be asked any more. A run does not get there:
    before any training the tokenizer's highest id is compared with the vocabulary (engine/choices.py).
    """
    for each in ids:
        if each.device.type != "cpu":
            return
        outside = each[(each < 0) | (each >= vocab_size)]
        if outside.numel():
            raise DataError(
                f"token id {int(outside.flatten()[0])} is outside the vocabulary of {vocab_size}",
                hint="a larger model.vocab_size, or the tokenizer this data was made with",
            )
