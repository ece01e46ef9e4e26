"""What choices by the clock have in common: a run that goes on, figures of earlier starts, and ranks that agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.runtime import hardware, measured, signals

if TYPE_CHECKING:
    from lockstep.engine.build import Plan
    from lockstep.runtime.group import Group

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 15  # of a timing: more rows take longer, in proportion


@dataclass(frozen=True)
class Clocked:
    """A choice for which a plan, the other ranks and an earlier run are known."""

    plan: Plan
    group: Group  # all workers of the run
    saved: Mapping[str, Any]  # what the checkpoint to go on from belongs to; empty: there is none
    about: Mapping[str, Any]  # what those of this run will belong to

    @property
    def rows(self) -> int:
        """Of a micro-batch, as far as they are timed."""
        training = self.plan.config.training
        return max(1, min(training.batch_size, MOST_TOKENS // training.context_length))

    def before(self, key: str, *settings: str) -> Any:
        """What the run that goes on has computed with, if that was on such a card and in these settings asked as now.

        By rank 0, whose word counts where cards differ.
        """
        was, now = (
            [each.get("device_name"), *(_setting(each, name) for name in settings)] for each in (self.saved, self.about)
        )
        return self.group.together(lambda: self.saved.get(key) if was == now else None)

    def times(
        self, what: str, names: Sequence[str], clock: Callable[[str], float], **of: Any
    ) -> tuple[dict[str, float], str]:
        """Milliseconds of each, and when they were taken: now by rank 0, or on an earlier day. Infinite: it failed."""
        return self.group.together(lambda: self._times(what, names, clock, of))

    def _times(
        self, what: str, names: Sequence[str], clock: Callable[[str], float], of: Mapping[str, Any]
    ) -> tuple[dict[str, float], str]:
        device = self.plan.device
        deciding = {
            "what": what,
            "card": self.about["device_name"],
            "card_bytes": hardware.total_memory_bytes(device),
            **of,
            "versions": self.about["versions"],
        }
        known = measured.known(deciding)
        times = known.get("milliseconds") if known else None
        if known and isinstance(times, dict) and all(isinstance(times.get(name), float) for name in names):
            return times, known["day"]
        times = {name: _milliseconds(what, name, clock) for name in names}
        hardware.let_go(device)
        if all(map(math.isfinite, times.values())):
            measured.keep(deciding, {"milliseconds": times})
        return times, "now"


def _milliseconds(what: str, name: str, clock: Callable[[str], float]) -> float:
    """Infinitely many where it fails at this shape, or for want of memory: to measure is no reason not to train."""
    try:
        return clock(name)
    except Exception as error:  # a compiler has errors of many kinds, and makes one of a signal too
        if asked := signals.behind(error):
            raise asked from None
        cause = getattr(error, "inner_exception", error)  # the compiler's own says first that it is one
        said = (str(cause).splitlines() or [type(cause).__name__])[0]
        logger.warning("%s: %s was not timed: %s", what, name, said[:200])
        return math.inf


def _setting(about: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return about.get("config", {}).get(section, {}).get(key)
