"""The vote of equal runs, step by step: who is the first to have other bits, and when can nobody say? Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

AGREES, DIFFERS, UNDECIDED, MISSING = ".", "x", "?", "-"


@dataclass(frozen=True)
class Outvoted:
    """A voter whose bits are not those of the majority, from this step on."""

    step: int
    right: int  # a voter of the majority: what it has at this step is what should be there


@dataclass(frozen=True)
class Vote:
    """What all steps together say. `letters`: of each voter, one a step."""

    steps: tuple[int, ...] = ()
    outvoted: Mapping[int, Outvoted] = field(default_factory=dict[int, Outvoted])
    undecided: tuple[int, ...] = ()  # the voters of whom some are wrong, and nobody can say which
    undecided_step: int | None = None  # the first step without a majority; there is no vote after it
    letters: tuple[str, ...] = ()

    @property
    def agree(self) -> bool:
        return not self.outvoted and not self.undecided


def vote(records: Sequence[Mapping[int, Hashable]]) -> Vote:
    """Of each voter: step -> its bits. More than half of those with bits at a step are right: flips do not flip alike.

    Who was outvoted once has no vote any more: everything after a wrong step is wrong. A lone voter agrees with itself.
    """
    steps = sorted({step for record in records for step in record})
    letters: list[list[str]] = [[] for _ in records]
    outvoted: dict[int, Outvoted] = {}
    undecided: tuple[int, ...] = ()
    undecided_step: int | None = None
    for step in steps:
        voters = [voter for voter, record in enumerate(records) if step in record and voter not in outvoted]
        if undecided_step is None and voters:
            right, count = Counter(records[voter][step] for voter in voters).most_common(1)[0]
            if 2 * count > len(voters):
                first = next(voter for voter in voters if records[voter][step] == right)
                wrong = [voter for voter in voters if records[voter][step] != right]
                outvoted |= {voter: Outvoted(step, first) for voter in wrong}
            else:
                undecided, undecided_step = tuple(voters), step
        for voter, record in enumerate(records):
            letters[voter].append(_letter(step in record, voter in outvoted, undecided_step is not None))
    return Vote(tuple(steps), outvoted, undecided, undecided_step, tuple("".join(each) for each in letters))


def _letter(present: bool, outvoted: bool, undecided: bool) -> str:
    if not present:
        return MISSING
    if outvoted:
        return DIFFERS
    return UNDECIDED if undecided else AGREES
