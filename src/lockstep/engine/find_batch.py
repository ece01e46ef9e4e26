"""The largest micro-batch that fits a device: what `lockstep bench --find-batch` prints, and `auto` stands for.

A size is tried by a step that changes nothing, on one device and with nobody else, before the run itself is built.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from lockstep.config.given import Origin
from lockstep.config.load import Loaded
from lockstep.config.schema import RunConfig
from lockstep.engine import predecessor
from lockstep.engine.build import make_loader, make_stepper, plan, with_words
from lockstep.engine.prepare import prepare
from lockstep.engine.shortage import is_shortage
from lockstep.models.build import forget_compiled
from lockstep.runtime import env, faults, hardware
from lockstep.runtime.group import Group
from lockstep.runtime.marks import NoMarks

logger = logging.getLogger(__name__)

ROOM = 0.92  # of the card: the rest is for what torch does not count
DEVICES = ("cuda",)  # where running out of memory is an error that can be caught
GIB = 2**30


class Found(NamedTuple):
    """The largest size that fits, and what it needs; no rows: not even the smallest fits."""

    rows: int
    peak_bytes: float


def resolved(loaded: Loaded, device: torch.device, group: Group) -> Loaded:
    """The configuration with the number that `auto` stands for. All ranks call it, and take what fits each of them.

    A step has the rows that it had before. A run that goes on keeps the number that it was begun with.
    """
    training = loaded.config.training
    rows, step_rows = training.batch_size, training.batch_size * training.grad_accum_nums
    earlier = group.together(lambda: predecessor.rows_before(loaded.config, loaded.asked))
    if earlier:
        rows, why = earlier, "as the run was begun"
    elif loaded.config.system.canonical:
        why = "as without it, since canonical sums are of micro-batches"
    elif device.type not in DEVICES:
        why = "as without it, since want of memory ends a process on the CPU"
    else:
        here = find(loaded, device, sizes=divisors(step_rows))
        everywhere = group.gather([here.rows, here.peak_bytes, hardware.device_name(device)])
        rows, peak, name = min(everywhere)
        why = f"largest that fits {name}, peak {peak / GIB:.1f} GiB" if rows else f"not even that fits {name}"
        rows = max(1, rows)
    count = step_rows // rows
    line = f"batch: {rows} row{'s' * (rows > 1)} x {count} (auto: {why}; {step_rows} rows of a step on each worker)"
    if group.rank == 0:
        logger.info("%s", line)
    origins = dict.fromkeys(
        ("training.batch_size", "training.grad_accum_nums"), Origin("auto", line.removeprefix("batch: "))
    )
    return replace(loaded, config=_with(loaded.config, rows, count), origins={**loaded.origins, **origins})


def divisors(rows: int) -> list[int]:
    """The sizes that so many rows can be cut into equally."""
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    return sorted({*small, *(rows // size for size in small)})


def find(loaded: Loaded, device: torch.device, *, sizes: Sequence[int]) -> Found:
    """Try rising sizes on this device, from the configured one on."""
    bounds = hardware.memory_bounds(device)
    room = ROOM * bounds.limit - bounds.taken
    try:
        return largest(sizes, Trial(loaded, device).peak_bytes, room=room, first=loaded.config.training.batch_size)
    except Exception as error:  # the model alone is too much
        if not _is_shortage(error):
            raise
        return Found(0, 0.0)
    finally:
        hardware.let_go(device)


def largest(sizes: Sequence[int], need: Callable[[int], float], *, room: float, first: int) -> Found:
    """The largest of rising sizes that fits. Doubles from `first` on, then halves what is between."""
    best, fitting, too_large, place = Found(0, 0.0), -1, len(sizes), sizes.index(first)
    while fitting + 1 < too_large:
        peak = need(sizes[place])
        if peak <= room:
            best, fitting = Found(sizes[place], peak), place
        else:
            too_large = place
        doubled = min(bisect_left(sizes, 2 * sizes[place]), len(sizes) - 1)
        place = doubled if too_large == len(sizes) else (fitting + too_large) // 2
    return best


class Trial:
    """The model of a configuration on a device, and rows to try it with: those of its validation."""

    def __init__(self, loaded: Loaded, device: torch.device) -> None:
        planned = plan(loaded, device)
        prepared = prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
        self.planned = with_words(planned, prepared)
        self.prepared = replace(prepared, train=prepared.validation)
        self.stepper, _ = make_stepper(self.planned, Group(), NoMarks(), planned_faults=faults.Plan())

    def peak_bytes(self, rows: int) -> float:
        """Of a step; inf: it is too much. Rows that are shorter than they may be are counted as the longest.

        Of two micro-batches the second meets the gradients of the first, and so does the only one of several workers.
        """
        config, device = self.planned.config, self.planned.device
        count = 1 if config.training.grad_accum_nums == 1 and env.detect().world == 1 else 2
        planned = replace(self.planned, config=_with(config, rows, count))
        batches = next(make_loader(planned, self.prepared, start_step=0, workers=0))
        forget_compiled()  # else blocks would be compiled for sizes of any kind, and not for this one
        self.stepper.exchange.zero()
        hardware.let_go(device)
        resting = hardware.peak_memory_bytes(device)
        try:
            self.stepper.rehearse(batches)
        except Exception as error:
            if not _is_shortage(error):
                raise
            return math.inf
        most = rows * config.training.context_length
        seen = min(batch.tensors["inputs"].numel() if "inputs" in batch.tensors else most for batch in batches)
        return resting + (hardware.peak_memory_bytes(device) - resting) * max(1.0, most / max(1, seen))


def _with(config: RunConfig, rows: int, count: int) -> RunConfig:
    training = config.training.model_copy(update={"batch_size": rows, "grad_accum_nums": count})
    return config.model_copy(update={"training": training})


def _is_shortage(error: Exception) -> bool:
    """Also as the compiler tells of it."""
    return is_shortage(error) or (error.__cause__ is not None and is_shortage(error.__cause__))
