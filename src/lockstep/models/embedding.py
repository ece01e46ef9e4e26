"""What every model does with ids: the table they are looked up in, what comes out of it, ids that are in no table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.errors import DataError


def table(rows: int, width: int) -> nn.Embedding:
    """Filled later: torch's own way loads dynamo, a second."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def sum_table(rows: int, width: int) -> SumTable:
    """The same for tokens of several features."""
    return SumTable(rows, width, _weight=torch.empty(rows, width))


class SumTable(nn.Embedding):
    """A table of few rows: looks up all features of a token and adds what it finds, (B, L, F) ids to (B, L, D)."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type == "cuda" and torch.is_grad_enabled():
            found = SummedRows.apply(input, self.weight)
            assert isinstance(found, Tensor)
            return found
        return F.embedding(input, self.weight).sum(-2)


class SummedRows(torch.autograd.Function):
    """The same, with the gradient as a product: for each row of the batch, which rows of the table it looked up.

    torch's own on a GPU sorts all ids, and one thread adds up what a row of the table gets: with 120,000 tokens that
    look up one of two rows, longer than the rest of a step.
    """

    @staticmethod
    def forward(ctx: Any, ids_BLF: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(ids_BLF)
        ctx.rows = weight_VD.shape[0]
        return F.embedding(ids_BLF, weight_VD).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *args
        ctx: Any, *grads: Any
    ) -> tuple[None, Tensor]:
        (grad_BLD,), (ids_BLF,) = grads, ctx.saved_tensors
        rows_V = torch.arange(ctx.rows, device=ids_BLF.device)
        with torch.autocast(grad_BLD.device.type, enabled=False):  # which the compiler takes over from the forward pass
            looked_up_BLV = (ids_BLF[..., None] == rows_V).sum(-2, dtype=grad_BLD.dtype)
            return None, torch.bmm(looked_up_BLV.transpose(1, 2), grad_BLD).sum(0)


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
