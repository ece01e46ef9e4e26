"""Which tasks are learnt from and which are kept unseen: one answer for collection, training and evaluation.

Torch-free. The order is that of Python's own generator, so that the unseen goals of the documented settings (81 goals,
seed 0, ratio 0.9: 73 and 8) are the published ones.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from lockstep.errors import ConfigError


class Split(NamedTuple):
    """Task numbers, in the order of the draw."""

    train: tuple[int, ...]
    test: tuple[int, ...]


def split(tasks: int, *, seed: int = 0, ratio: float = 0.9) -> Split:
    """All tasks of a world, shuffled and cut; both parts have at least one."""
    order = list(range(tasks))
    random.Random(seed).shuffle(order)
    train = round(tasks * ratio)
    if not 0 < train < tasks:
        raise ConfigError(
            f"{train} of {tasks} tasks to train on leaves {tasks - train} to test on",
            where="train_env_ratio",
            hint="train_env_ratio=0.9",
        )
    return Split(tuple(order[:train]), tuple(order[train:]))
