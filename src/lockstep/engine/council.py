"""What all ranks agree on before each step: the weight of the global batch, its tokens, whether to stop, saves.

One small sum over ranks per step, on the host and one step ahead: it is begun when a step has been launched and read
when the next one is, so that no step waits for it.

Rows of a stream may not have come yet, on one node or on several that share no disk. Who has none says so in this sum;
all then sum again, now and then, until all have theirs, one has failed, or one is asked to stop: nobody is ever stuck
in a step that another rank cannot begin.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.contracts import Batch
from lockstep.errors import LockstepError, Stopped
from lockstep.runtime.group import Group, Sum
from lockstep.runtime.signals import EXIT_CODES, StopRequest

SIGNALS = tuple(EXIT_CODES)
ROUND_SECONDS = 0.2  # between two sums of ranks that wait for rows


class NotYet(Exception):
    """The rows of the next step have not come; ask again."""


@dataclass(frozen=True)
class Agreed:
    """The same on every rank."""

    weights: Mapping[str, int]  # loss term -> targets in the global batch
    tokens: int
    stop: signal.Signals | None = None
    saves: int = 0  # that have ended, on all ranks together


class Council:
    """Decides with the others; on its own where there are none."""

    def __init__(self, terms: Iterable[str], group: Group | None = None) -> None:
        self.terms = tuple(terms)
        self.group = group or Group()
        self.alone = self.group.world == 1
        self.agreed = Agreed({}, 0)  # for the step that was agreed on last
        self._ahead: list[Batch] | Exception | None = None
        self._sum: Sum | None = None
        self._stop = StopRequest()
        self._saves = 0

    def fetch(self, source: Iterator[list[Batch]], stop: StopRequest) -> list[Batch]:
        """This rank's micro-batches of the step at hand. What went wrong for a step is raised at that step."""
        if self.alone:
            return next(source)
        if self._ahead is None:
            self.look_ahead(source, stop)
        while isinstance(self._ahead, NotYet):
            assert self._sum is not None
            self._read(self._sum)
            self._pause("data")
            self.look_ahead(source, stop)
        batches, self._ahead = self._ahead, None
        if isinstance(batches, LockstepError) and batches.between_steps:
            assert self._sum is not None
            self._read(self._sum, batches)  # all ranks end alike: if another one failed, there is nothing to save
        if isinstance(batches, Exception):
            raise batches
        assert batches is not None
        return batches

    def agree(self, batches: Sequence[Batch]) -> Agreed:
        """What holds for the step of these batches; waits only if nobody looked ahead."""
        if self.alone:
            self.agreed = Agreed(self._weights(batches), sum(batch.tokens for batch in batches))
        else:
            begun, self._sum = self._sum or self._begin(batches, None), None
            while (agreed := self._read(begun)) is None:
                self._pause("communication")
                begun = self._begin(batches, self._stop.signal)
            self.agreed = agreed
        return self.agreed

    def look_ahead(self, source: Iterator[list[Batch]], stop: StopRequest, *, saves: int = 0) -> None:
        """Fetch the next step's batches and begin to agree on it. Call it once the step before was launched.

        `saves`: how many have ended here so far, well or badly.
        """
        if self.alone:
            return
        self._stop, self._saves = stop, max(self._saves, saves)
        try:
            self._ahead = next(source)
        except Exception as error:
            if isinstance(error, Stopped) and not error.between_steps:
                raise  # now, not at the next step
            self._ahead = error
        self._sum = self._begin(self._ahead, stop.signal)  # in any case: the others count on it

    def _weights(self, batches: Sequence[Batch]) -> dict[str, int]:
        return {term: sum(batch.weights[term] for batch in batches) for term in self.terms}

    def _begin(self, batches: Sequence[Batch] | Exception, wish: signal.Signals | None) -> Sum:
        """With an error instead of batches: this rank has failed to make them, or there are no rows, and says so."""
        made = () if isinstance(batches, Exception) else batches
        waits = isinstance(batches, NotYet)
        starved = isinstance(batches, LockstepError) and batches.between_steps
        failed = isinstance(batches, Exception) and not starved and not waits
        tokens = sum(batch.tokens for batch in made)
        wishes = [int(wish == each) for each in SIGNALS]
        states = [int(failed), int(starved), int(waits)]
        return self.group.control_sum([*states, self._saves, *self._weights(made).values(), tokens, *wishes])

    def _pause(self, section: str) -> None:
        """Between two rounds of ranks that wait for rows, none of which is stuck."""
        self.group.link.enter(section)
        time.sleep(ROUND_SECONDS)

    def _read(self, begun: Sum, own: LockstepError | None = None) -> Agreed | None:
        """None: some wait for rows. Of several signals the one that most ranks heard, of these the first.

        `own`: why this rank will have no rows.
        """
        failed, starved, waiting, saves, *sums = begun.wait()
        if failed:
            error = LockstepError("another worker has no batch for this step")
            error.secondary = True  # it tells the reason itself
            raise error
        count = len(self.terms)
        weights, tokens, wishes = sums[:count], sums[count], sums[count + 1 :]
        stop = SIGNALS[wishes.index(max(wishes))] if any(wishes) else None
        if starved or (waiting and stop):
            raise own or _without_rows(stop)
        if waiting:
            return None
        return Agreed(dict(zip(self.terms, weights, strict=True)), tokens, stop, saves)


def _without_rows(stop: signal.Signals | None) -> LockstepError:
    """Why nobody makes the next step: asked to stop while waiting for rows, or another rank waits in vain."""
    if stop:
        error: LockstepError = Stopped(f"stopped by {stop.name}", exit_code=EXIT_CODES[stop])
    else:
        error = LockstepError("another worker waits for rows that do not come")
        error.secondary = True  # it tells the reason itself
    error.between_steps = True
    return error
