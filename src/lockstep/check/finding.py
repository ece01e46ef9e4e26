"""What one look at a card says, and how many looks make one verdict. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.check.outcome import Difference, Status
from lockstep.check.records import Work

SEVERITY = (Status.PASS, Status.UNDECIDED, Status.FAIL)


@dataclass(frozen=True)
class Finding:
    """Of one card: its bits in a workload, its speed, or its state of health."""

    status: Status = Status.PASS
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    difference: Difference | None = None
    right: Work | None = None  # a record of the same workload with the right bits, beside a difference
    letters: str = ""  # one a stamp, see outcome.Judgement


def merge(findings: Sequence[Finding]) -> Finding:
    """All of them in one: the worst status, every reason once, and the first difference of that status."""
    worst = max((finding.status for finding in findings), key=SEVERITY.index, default=Status.PASS)
    first = next((finding for finding in findings if finding.difference and finding.status is worst), Finding())
    return Finding(
        worst,
        tuple(dict.fromkeys(reason for finding in findings for reason in finding.reasons)),
        tuple(dict.fromkeys(note for finding in findings for note in finding.notes)),
        first.difference,
        first.right,
        next((finding.letters for finding in findings if finding.letters), ""),
    )
