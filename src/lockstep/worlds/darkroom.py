"""Darkroom: somewhere in a dark square room a cell pays, on every step that ends in it. One task per cell."""

from __future__ import annotations

import torch

from lockstep.worlds.table import MOVES, World, check, moves


def build(*, size: int = 9, horizon: int = 20) -> World:
    """The player starts in the middle; task k pays in cell k."""
    check("darkroom", size, horizon)
    cells = size * size
    return World(
        name="darkroom",
        size=size,
        start=(size // 2) * size + size // 2,
        horizon=horizon,
        moves_CA=moves(size),
        meaning_KA=torch.arange(len(MOVES)).expand(cells, -1).contiguous(),
        targets_KP=torch.arange(cells)[:, None],
        after_P=torch.zeros(1, dtype=torch.int64),
    )
