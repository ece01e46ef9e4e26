"""`model.attention_backend: auto` on a GPU: the kernel of the run that goes on, else the one that is fastest here.

All ranks compute with the same one. Only kernels that do not repeat their bits anyway are compared by the clock:
system.deterministic promises the same bits in every run, and so has a fixed order, which no clock may change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lockstep.engine.clocked import Clocked
from lockstep.models import attention, attention_timing
from lockstep.models.attention_timing import Layer

COMPARED = ("cudnn", "native_flash")  # flex would have to be compiled for it, and is behind where these run
LEAST_TOKENS = 512  # of a row: shorter ones spend too little time in attention for it to matter


class Chooser(Clocked):
    """attention.resolve, for whom more is known."""

    def __call__(self, backend: str, **facts: Any) -> tuple[str, str]:
        """(kernel that runs, one line that says so)."""
        if backend != "auto" or facts["device_type"] != "cuda":
            return attention.resolve(backend, **facts)
        common = self._runnable(facts)
        if (before := self.before("attention", "system.deterministic")) in common:
            return before, f"attention: {before} (auto; as in the checkpoint)"
        layer = self._layer(facts["dtype_name"])
        compared = [name for name in COMPARED if name in common]
        if layer is None or facts["deterministic"] or len(compared) < 2:
            return attention.resolve(backend, **facts)
        device = self.plan.device
        times, day = self.times(
            "attention",
            compared,
            lambda name: attention_timing.milliseconds(name, layer, device),
            kernels=compared,
            layer=vars(layer),
        )
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

    def _layer(self, dtype_name: str) -> Layer | None:
        length = self.plan.config.training.context_length
        if length < LEAST_TOKENS:
            return None
        return attention_timing.layer_of(self.plan.shape, rows=self.rows, length=length, dtype_name=dtype_name)
