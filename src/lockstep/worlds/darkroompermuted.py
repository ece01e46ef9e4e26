"""Permuted darkroom: the goal is known, the opposite corner; what the five actions do is not. One task per order."""

from __future__ import annotations

import itertools

import torch

from lockstep.worlds.table import MOVES, World, check, moves


def build(*, size: int = 9, horizon: int = 20) -> World:
    """The player starts in the corner (0, 0); task k is the k-th order of the moves, as itertools counts them."""
    check("darkroompermuted", size, horizon)
    orders = torch.tensor(list(itertools.permutations(range(len(MOVES)))))
    return World(
        name="darkroompermuted",
        size=size,
        start=0,
        horizon=horizon,
        moves_CA=moves(size),
        meaning_KA=orders,
        targets_KP=torch.full((len(orders), 1), size * size - 1),
        after_P=torch.zeros(1, dtype=torch.int64),
    )
