"""`model.attention_backend: auto` on a GPU: the kernel of the run that goes on, else the one that is fastest here.

All ranks compute with the same one. Only kernels that do not repeat their bits anyway are compared by the clock:
system.deterministic promises the same bits in every run, and so has a fixed order, which no clock may change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep.models import attention, attention_timing
from lockstep.models.attention_timing import Layer
from lockstep.runtime import hardware, measured

if TYPE_CHECKING:
    from lockstep.engine.build import Plan
    from lockstep.runtime.group import Group

logger = logging.getLogger(__name__)

COMPARED = ("cudnn", "native_flash")  # flex would have to be compiled for it, and is behind where these run
LEAST_TOKENS = 512  # of a row: shorter ones spend too little time in attention for it to matter
MOST_TOKENS = 1 << 15  # of a timing: more rows take longer, in proportion


@dataclass(frozen=True)
class Chooser:
    """attention.resolve, for whom a plan, the other ranks and an earlier run are known."""

    plan: Plan
    group: Group  # all workers of the run
    saved: Mapping[str, Any]  # what the checkpoint to go on from belongs to; empty: there is none
    about: Mapping[str, Any]  # what those of this run will belong to

    def __call__(self, backend: str, **facts: Any) -> tuple[str, str]:
        """(kernel that runs, one line that says so)."""
        if backend != "auto" or facts["device_type"] != "cuda":
            return attention.resolve(backend, **facts)
        common = self._runnable(facts)
        if (before := self._before()) in common:
            return before, f"attention: {before} (auto; as in the checkpoint)"
        layer = self._layer(facts["dtype_name"])
        compared = [name for name in COMPARED if name in common]
        if layer is None or facts["deterministic"] or len(compared) < 2:
            return attention.resolve(backend, **facts)
        times, day = self.group.together(lambda: self._times(compared, layer))
        compared = [name for name in compared if math.isfinite(times[name])]
        if not compared:
            return attention.resolve(backend, **facts)
        best = attention_timing.fastest({name: times[name] for name in compared})
        others = "".join(f", {name} {times[name]:.3g}" for name in compared if name != best)
        return best, f"attention: {best} (auto; {times[best]:.3g} ms a layer{others}; measured {day})"

    def _runnable(self, facts: Mapping[str, Any]) -> list[str]:
        """What `auto` may choose from, where every rank can run it."""
        allowed = attention.allowed(
            use_flash=facts["use_flash"],
            deterministic=facts["deterministic"],
            masked=facts.get("documents_apart", False) or facts.get("windowed", False),
        )
        where = ("cuda", facts["dtype_name"], facts["head_dim"])
        own = [name for name in allowed if not attention.obstacle(name, *where)]
        everyones = self.group.gather(own)
        return [name for name in own if all(name in theirs for theirs in everyones)]

    def _before(self) -> str:
        """The kernel that the run that goes on has computed with, if that was on such a card and asked for as now."""
        was, now = ((each.get("device_name"), _repeats(each)) for each in (self.saved, self.about))
        return str(self.saved.get("attention", "")) if was == now else ""

    def _layer(self, dtype_name: str) -> Layer | None:
        training, length = self.plan.config.training, self.plan.config.training.context_length
        if length < LEAST_TOKENS:
            return None
        rows = max(1, min(training.batch_size, MOST_TOKENS // length))
        return attention_timing.layer_of(self.plan.shape, rows=rows, length=length, dtype_name=dtype_name)

    def _times(self, compared: list[str], layer: Layer) -> tuple[dict[str, float], str]:
        """Milliseconds of each kernel, and when they were taken."""
        device = self.plan.device
        deciding = {
            "what": "attention",
            "card": self.about["device_name"],
            "card_bytes": hardware.total_memory_bytes(device),
            "kernels": compared,
            "layer": vars(layer),
            "versions": self.about["versions"],
        }
        known = measured.known(deciding)
        times = known.get("milliseconds") if known else None
        if known and isinstance(times, dict) and all(isinstance(times.get(name), float) for name in compared):
            return times, known["day"]
        times = {name: _milliseconds(name, layer, device) for name in compared}
        if all(map(math.isfinite, times.values())):
            measured.keep(deciding, {"milliseconds": times})
        return times, "now"


def _milliseconds(kernel: str, layer: Layer, device: torch.device) -> float:
    """Infinitely many where it fails at this shape, or for want of memory: to measure is no reason not to train."""
    try:
        return attention_timing.milliseconds(kernel, layer, device)
    except RuntimeError as error:
        logger.warning("attention: %s was not timed: %s", kernel, str(error).splitlines()[0][:200])
        return math.inf


def _repeats(about: Mapping[str, Any]) -> Any:
    """Whether a run was to repeat its bits."""
    return about.get("config", {}).get("system", {}).get("deterministic")
