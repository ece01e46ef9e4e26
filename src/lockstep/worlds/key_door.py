"""Dark key-to-door (Laskin et al. 2022): find the key, then the door it opens; each pays once. Tasks: all pairs."""

from __future__ import annotations

import torch

from lockstep.worlds.table import MOVES, NOWHERE, World, check, moves


def build(*, size: int = 9, horizon: int = 50) -> World:
    """The player starts in the middle; task k has its key in cell k // cells and its door in cell k % cells.

    Phases: without the key, with it, door opened. The agent sees its place only; that it has the key it must remember.
    """
    check("key_door", size, horizon)
    cells = size * size
    tasks = torch.arange(cells * cells)
    return World(
        name="key_door",
        size=size,
        start=(size // 2) * size + size // 2,
        horizon=horizon,
        moves_CA=moves(size),
        meaning_KA=torch.arange(len(MOVES)).expand(len(tasks), -1).contiguous(),
        targets_KP=torch.stack((tasks // cells, tasks % cells, torch.full_like(tasks, NOWHERE)), 1),
        after_P=torch.tensor((1, 2, 2)),
    )
