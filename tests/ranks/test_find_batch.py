"""Two ranks look for a micro-batch, and only one of them runs out of memory: nobody hangs, and both take the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch
from lockstep.engine import find_batch
from lockstep.engine.step import Stepper
from lockstep.runtime import hardware
from lockstep.runtime.group import Group
from lockstep.runtime.memory_limits import Bounds
from tests.gates.training import flags
from tests.ranks.data_parallel import SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]


def search(group: Group, settings: dict[str, Any], too_many: list[int]) -> tuple[int, int]:
    """On cards of which so many rows are too much; the split that is taken."""
    real = Stepper.rehearse

    def rehearse(self: Stepper, batches: list[Batch]) -> Any:
        if batches[0].rows >= too_many[group.rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, batches)

    with (
        mock.patch.object(find_batch, "DEVICES", ("cpu",)),
        mock.patch.object(Stepper, "rehearse", rehearse),
        mock.patch.object(hardware, "memory_bounds", return_value=Bounds(0, 80 << 30, "the card has")),
        mock.patch.object(hardware, "peak_memory_bytes", return_value=1 << 30),
    ):
        loaded = load("llama", preset="tiny", flags=[*flags({**SMALL, **settings}), ("batch-size", "auto")])
        training = find_batch.resolved(loaded, torch.device("cpu"), group).config.training
    return training.batch_size, training.grad_accum_nums


@pytest.mark.parametrize(
    ("too_many", "split"), [([100, 100], (12, 1)), ([100, 5], (4, 3)), ([3, 100], (2, 6)), ([100, 1], (1, 12))]
)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_smallest_card_decides(ranks: Pool, too_many: list[int], split: tuple[int, int], mode: str) -> None:
    """Also of a model that is cut later: what fits one device whole fits several in parts."""
    settings = {"training.batch_size": 3, "training.grad_accum_nums": 4, "system.mode": mode}
    assert ranks(2, search, settings, too_many) == [split, split]
