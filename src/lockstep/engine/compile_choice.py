"""`model.compile: auto` on a GPU: as the run that goes on has it, else compiled unless a block is slower so.

All ranks do alike. Without the compiler a step needs more memory, and must fit all the same. No clock is asked where
bits must repeat (system.deterministic), where float8 would be slow without the compiler, and where a step may become
one CUDA graph: how long its kernels take to launch does not matter there.
"""

from __future__ import annotations

import math
from typing import Any

from lockstep.engine import fitting
from lockstep.engine.clocked import Clocked
from lockstep.engine.present import shards
from lockstep.models import block_timing, build
from lockstep.models.block_timing import BlockWork
from lockstep.models.options import ModelOptions
from lockstep.models.shapes import AgentShape
from lockstep.runtime import env, precision

COMPILED, PLAIN = WAYS = ("compiled", "plain")
ASKED_ALIKE = ("system.deterministic", "debug.enabled", "training.precision")  # float8 is not left as bf16 had it
SLOWER = 1.02  # times what it takes as it is: so much a compiled block may, which needs less memory


class Chooser(Clocked):
    """build.compiles, for whom more is known."""

    def __call__(self, options: ModelOptions, **facts: Any) -> tuple[bool, str]:
        """(whether blocks are compiled, one line that says so where there was a choice).

        A rank that has hooks, and so asks for something else than the run, still does its part in the choice.
        """
        planned = self.plan.config.model
        chosen = self._chosen(planned, **facts)
        return chosen if options.compile == planned.compile else build.compiles(options, **facts)

    def _chosen(self, options: ModelOptions, **facts: Any) -> tuple[bool, str]:
        usual = build.compiles(options, **facts)
        if options.compile != "auto" or not usual[0]:
            return usual
        if isinstance(before := self.before("compiled", *ASKED_ALIKE), bool):
            return before, f"compile: {'on' if before else 'off'} (auto; as in the checkpoint)"
        if facts["deterministic"] or facts["dtype_name"] in precision.FLOAT8 or self._may_be_recorded():
            return usual
        work, device = self._work(options, facts), self.plan.device
        times, day = self.times(
            "compile",
            WAYS,
            lambda way: block_timing.milliseconds(work, device, compiled=way == COMPILED),
            block=work.deciding(),
        )
        compiled, plain = (times[way] for way in WAYS)
        slower = compiled > SLOWER * plain
        if slower and self._fits_without():
            beside = f"{compiled:.3g} compiled" if math.isfinite(compiled) else "and could not be compiled"
            return False, f"compile: off (auto; a block takes {plain:.3g} ms, {beside}; measured {day})"
        if not math.isfinite(compiled + plain):
            return usual
        why = ", for which there is too little memory" if slower else ""
        return True, f"compile: on (auto; a block takes {compiled:.3g} ms, {plain:.3g} as it is{why}; measured {day})"

    def _may_be_recorded(self) -> bool:
        return isinstance(self.plan.shape, AgentShape)  # small encoders too, but their blocks are timed as others' are

    def _work(self, options: ModelOptions, facts: dict[str, Any]) -> BlockWork:
        asked = ("dtype_name", "attention", "checkpointing", "documents_apart", "sharded")
        return BlockWork(
            options,
            self.plan.shape,
            rows=self.rows,
            length=self.plan.config.training.context_length,
            **{name: facts[name] for name in asked},
        )

    def _fits_without(self) -> bool:
        """On every card, by the estimate."""
        config, parted = self.plan.config, shards(self.plan.config.system.mode, env.detect())
        own = fitting.fits_without_compiler(config, self.plan.shape, self.plan.device, shards=parted)
        return all(self.group.gather(own))
