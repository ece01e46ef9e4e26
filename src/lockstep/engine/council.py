"""What all ranks agree on before each step: the weight of the global batch, its tokens, whether to stop, saves.

One small sum over ranks per step, on the host and one step ahead: it is begun when a step has been launched and read
when the next one is, so that no step waits for it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.contracts import Batch
from lockstep.errors import LockstepError, Stopped
from lockstep.runtime.group import Group, Sum
from lockstep.runtime.signals import EXIT_CODES, StopRequest

SIGNALS = tuple(EXIT_CODES)


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
        self._saves = 0

    def fetch(self, source: Iterator[list[Batch]], stop: StopRequest) -> list[Batch]:
        """This rank's micro-batches of the step at hand. What went wrong for a step is raised at that step."""
        if self.alone:
            return next(source)
        if self._ahead is None:
            self.look_ahead(source, stop)
        batches, self._ahead = self._ahead, None
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
            self.agreed = self._read(begun)
        return self.agreed

    def look_ahead(self, source: Iterator[list[Batch]], stop: StopRequest, *, saves: int = 0) -> None:
        """Fetch the next step's batches and begin to agree on it. Call it once the step before was launched.

        `saves`: how many have ended here so far, well or badly.
        """
        if self.alone:
            return
        self._saves = max(self._saves, saves)
        try:
            self._ahead = next(source)
        except Stopped:
            raise  # now, not at the next step
        except Exception as error:
            self._ahead = error
        self._sum = self._begin(self._ahead, stop.signal)  # in any case: the others count on it

    def _weights(self, batches: Sequence[Batch]) -> dict[str, int]:
        return {term: sum(batch.weights[term] for batch in batches) for term in self.terms}

    def _begin(self, batches: Sequence[Batch] | Exception, wish: signal.Signals | None) -> Sum:
        """With an error instead of batches: this rank has failed to make them, and says so."""
        failed = isinstance(batches, Exception)
        made = () if failed else batches
        tokens = sum(batch.tokens for batch in made)
        wishes = [int(wish == each) for each in SIGNALS]
        return self.group.control_sum([int(failed), self._saves, *self._weights(made).values(), tokens, *wishes])

    def _read(self, begun: Sum) -> Agreed:
        """Of several signals the one that most ranks heard, of these the first."""
        failed, saves, *sums = begun.wait()
        if failed:
            error = LockstepError("another worker has no batch for this step")
            error.secondary = True  # it tells the reason itself
            raise error
        count = len(self.terms)
        weights, tokens, wishes = sums[:count], sums[count], sums[count + 1 :]
        stop = SIGNALS[wishes.index(max(wishes))] if any(wishes) else None
        return Agreed(dict(zip(self.terms, weights, strict=True)), tokens, stop, saves)
