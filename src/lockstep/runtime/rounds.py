"""Which round of a start this is, where a launcher starts its workers again after a failure: our own, or torchrun's."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.runtime import env

NUMBER = "LOCKSTEP_ROUND"  # of our own launcher's workers: 1/3 after the first of three restarts
ELASTIC_NUMBER, ELASTIC_MOST = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"


@dataclass(frozen=True)
class Round:
    """One of the times that the workers of a start were started."""

    number: int = 0  # restarts before it
    most: int = 0  # restarts there can be; 0: the first round is the only one

    @property
    def is_last(self) -> bool:
        return self.number >= self.most


def current() -> Round:
    """The round that this process belongs to."""
    number, _, most = env.get(NUMBER).partition("/")
    if not most:
        number, most = env.get(ELASTIC_NUMBER), env.get(ELASTIC_MOST)
    return Round(int(number), int(most)) if number.isdecimal() and most.isdecimal() else Round()
