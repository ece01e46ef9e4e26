"""How far a check is, on the screen: a line when a workload is done; on a terminal also where each card stands."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from lockstep.check.crew import Member
from lockstep.check.records import Workload
from lockstep.guard import say

DRAWN_SECONDS = 0.5


class Progress:
    """Hears of the members of a round, five times a second. `shown` False: says nothing."""

    def __init__(self, workloads: Sequence[Workload], *, shown: bool) -> None:
        self.workloads, self.shown = list(workloads), shown
        self._ahead = 0  # workloads that everybody has left behind
        self._since = self._drawn = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._draw: Callable[[str], None] | None = None

    def __enter__(self) -> Self:
        if self.shown and sys.stdout.isatty():
            from lockstep.report.live import Place

            self._draw = self._stack.enter_context(Place(sys.stdout)).draw
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw = None
        self._stack.close()

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
        if self._draw and time.monotonic() > self._drawn + DRAWN_SECONDS:
            self._drawn = time.monotonic()
            self._draw("\n".join(f"  {member.task.name:<10} {self._standing(member)}" for member in members))

    def _standing(self, member: Member) -> str:
        steps = {workload.name: workload.steps for workload in self.workloads}
        if not member.child.alive:
            return "ended"
        place = member.place
        if not place.workload:
            return "starts"
        return f"{place.workload} {place.step + 1}/{steps.get(place.workload, 0)}"
