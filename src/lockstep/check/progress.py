"""How far a check is, on the screen: a line when a workload is done."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.check.crew import Member
from lockstep.check.records import Workload
from lockstep.guard import say


class Progress:
    """Hears of the members of a round, five times a second. `shown` False: says nothing."""

    def __init__(self, workloads: Sequence[Workload], *, shown: bool) -> None:
        self.workloads, self.shown = list(workloads), shown
        self._ahead = 0  # workloads that everybody has left behind
        self._since = time.monotonic()

    def begin(self, words: str) -> None:
        """A new round."""
        self._ahead, self._since = 0, time.monotonic()
        self.say(words)

    def say(self, words: str) -> None:
        if self.shown and words:
            say(words)

    def tell(self, members: Sequence[Member]) -> None:
        """A workload counts as done when nobody is still at it or before it."""
        while self._ahead < len(self.workloads) and not any(
            member.child.alive and member.place.done <= self._ahead for member in members
        ):
            done = sum(member.place.done > self._ahead for member in members)
            if done:
                seconds, self._since = time.monotonic() - self._since, time.monotonic()
                workload = self.workloads[self._ahead]
                lost = f", {len(members) - done} not" if done < len(members) else ""
                self.say(f"  {workload.name:<16} {done} of {len(members)} done{lost}  ({seconds:.1f} s)")
            self._ahead += 1
