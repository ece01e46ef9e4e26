"""One workload on cards that must agree: who has other bits, since when, and who cannot be judged. Torch-free.

Whose bits are right is decided by a golden record where there is one, then by the majority of the cards, then, on a
tie, by who repeats its own bits when it is run again. Where none of them decides, nobody is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.check import golden as goldens
from lockstep.check.finding import Finding, merge
from lockstep.check.outcome import Difference, Status
from lockstep.check.records import CHAIN, Replica, Work
from lockstep.health import vote as voting
from lockstep.health.records import Stamp, first_tensor
from lockstep.health.vote import AGREES, DIFFERS, MISSING, UNDECIDED

GOLDEN = -1  # in place of the voter who is right: only the golden record is
Bits = tuple[str, str, str]


@dataclass(frozen=True)
class Entrant:
    """A run of a card in one workload. `work`: None if it never got there. `again`: what it gave when run again."""

    label: str
    replica: Replica
    work: Work | None
    again: tuple[Work, ...] = ()


@dataclass
class Poll:
    """Those who may vote on one workload, and what is known of them so far."""

    workload: str
    voters: Sequence[Entrant]
    works: Sequence[Work]
    golden: Mapping[int, str]
    elsewhere: Sequence[Mapping[int, Bits]]
    wrong: dict[int, voting.Outvoted] = field(default_factory=dict[int, voting.Outvoted])
    told: dict[int, str] = field(default_factory=dict[int, str])  # why, of those in `wrong`

    @property
    def voter_word(self) -> str:
        return "cards" if len({voter.label for voter in self.voters}) > 1 else "runs"

    def bits(self, place: int) -> dict[int, Bits]:
        return bits_of(self.works[place])


def bits_of(work: Work) -> dict[int, Bits]:
    """Step -> all that must be equal on every card."""
    return {stamp.step: stamp.bits for stamp in work.stamps}


def compare(
    workload: str,
    entrants: Sequence[Entrant],
    *,
    golden: Mapping[int, str],
    elsewhere: Sequence[Mapping[int, Bits]] = (),
    alike: bool = False,
) -> list[Finding]:
    """Of each entrant. `golden`: step -> digest of the right bits. `elsewhere`: records of cards of other kinds, where
    to agree is as good, and to differ means nothing. `alike`: every card has failed with the same words."""
    findings: list[Finding | None] = [_turned_away(workload, entrant) for entrant in entrants]
    admitted = [place for place, finding in enumerate(findings) if finding is None]
    voters, strangers = _of_one_software(entrants, admitted)
    for place in strangers:
        words = f"{workload}: other tensors or other data than on other cards: not the same software"
        findings[place] = _unjudged(entrants[place].work, words)
    works = [work for place in voters if (work := entrants[place].work)]
    poll = Poll(workload, [entrants[place] for place in voters], works, golden, elsewhere)
    for place, finding in zip(voters, _count(poll), strict=True):
        tied = finding.status is Status.UNDECIDED and finding.difference is not None
        findings[place] = merge([finding, *_ending(workload, entrants[place], alike=alike, tied=tied)])
    return [finding or Finding() for finding in findings]


def _turned_away(workload: str, entrant: Entrant) -> Finding | None:
    """None: its stamps may vote. Otherwise what is to be said of a card that has none to give."""
    work, replica = entrant.work, entrant.replica
    if work is None:
        if any(each.damaged for each in replica.works):
            return Finding(Status.UNDECIDED, (f"{workload}: its record is damaged: no card is to blame, run it again",))
        if replica.error:
            return Finding(Status.FAIL, (f"did not finish: {replica.error}",))
        return Finding(Status.UNDECIDED, (f"{workload}: not run here, or its record is lost: no card is to blame",))
    if work.damaged:
        lines = ", ".join(str(number + 1) for number in work.damaged if number != CHAIN)
        where = f"line {lines}" if lines else "it has other sums than the card has added up"
        return _unjudged(work, f"{workload}: its record is damaged ({where}): no card is to blame, run it again")
    if reason := work.facts.get("skipped"):
        return Finding(notes=(f"{workload}: not run here: {reason}",))
    if not work.stamps and work.complete:
        return Finding(Status.UNDECIDED, (f"{workload}: it left no fingerprints to compare",))
    return None


def _unjudged(work: Work | None, reason: str) -> Finding:
    return Finding(Status.UNDECIDED, (reason,), letters=UNDECIDED * len(work.stamps if work else ()))


def _of_one_software(entrants: Sequence[Entrant], admitted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those whose tensors and data are alike, and the others. No kind of more than half: all are strangers."""
    kinds: dict[object, list[int]] = {}
    silent: list[int] = []  # ended before the first stamp: nothing is known of their tensors
    for place in admitted:
        work = entrants[place].work
        if work and work.stamps:
            kinds.setdefault((work.tensors, work.shapes, work.dtypes, work.facts.get("data")), []).append(place)
        else:
            silent.append(place)
    most = max(kinds.values(), key=len, default=[])
    alike = most if 2 * len(most) > sum(map(len, kinds.values())) else []
    return sorted(alike + silent), sorted(place for kind in kinds.values() if kind is not alike for place in kind)


def _count(poll: Poll) -> list[Finding]:
    """The vote, step by step, again after every tie that could be resolved."""
    _hold_against_golden(poll)
    while True:
        result = voting.vote([_while_right(poll, place) for place in range(len(poll.works))])
        if result.undecided_step is None or not _resolve(poll, result):
            break
    for place, outvoted in result.outvoted.items():
        right = poll.bits(outvoted.right)[outvoted.step]
        votes = [poll.bits(other).get(outvoted.step) for other in range(len(poll.works))]
        poll.wrong[place] = outvoted
        poll.told[place] = f"other bits than {votes.count(right)} of {len(votes)} {poll.voter_word}"
    return [_finding(poll, place, result) for place in range(len(poll.works))]


def _while_right(poll: Poll, place: int) -> dict[int, Bits]:
    """What a voter may vote with: everything before it is known to be wrong."""
    wrong = poll.wrong.get(place)
    return {step: bits for step, bits in poll.bits(place).items() if wrong is None or step < wrong.step}


def _hold_against_golden(poll: Poll) -> None:
    first: dict[int, int] = {}  # voter -> its first step that is not golden
    for place, work in enumerate(poll.works):
        steps = (s.step for s in work.stamps if s.step in poll.golden and goldens.digest(s) != poll.golden[s.step])
        if (step := next(steps, None)) is not None:
            first[place] = step
    for place, step in first.items():
        right = (other for other in range(len(poll.works)) if first.get(other, math.inf) > step)
        holder = next((other for other in right if step in poll.bits(other)), GOLDEN)
        poll.wrong[place] = voting.Outvoted(step, holder)
        poll.told[place] = "other bits than the golden record"
    if len(first) == len(poll.works) > 1 and len({poll.bits(place)[step] for place, step in first.items()}) == 1:
        poll.told = dict.fromkeys(first, f"the {poll.voter_word} agree, but have other bits than the golden record")


def _resolve(poll: Poll, result: voting.Vote) -> bool:
    """A tie ends if some of the tied repeat their own bits when run again, and others do not: these are wrong."""
    step = result.undecided_step
    assert step is not None
    repeats = {place: _repeats(poll, place, step) for place in result.undecided}
    right = [place for place, same in repeats.items() if same]
    wrong = [place for place, same in repeats.items() if same is False]
    if not right or not wrong:
        return False
    for place in wrong:
        poll.wrong[place] = voting.Outvoted(step, right[0])
        poll.told[place] = "bits that it did not have when it was run again,"
    return True


def _repeats(poll: Poll, place: int, step: int) -> bool | None:
    """Whether a card had the same bits again, up to a step; None: it was not run again."""
    own = poll.bits(place)
    told = [bits_of(again) for again in poll.voters[place].again if not again.damaged]
    told = [bits for bits in told if step in bits]
    return all(bits.get(at, own[at]) == own[at] for bits in told for at in own if at <= step) if told else None


def _finding(poll: Poll, place: int, result: voting.Vote) -> Finding:
    """What the vote says of one voter."""
    work = poll.works[place]
    found = [Finding(letters=_letters(poll, place, result))]
    if wrong := poll.wrong.get(place):
        holder = poll.works[wrong.right] if wrong.right != GOLDEN else None
        first = difference(poll.workload, wrong.step, work, holder)
        where = f", first in {first.tensor}" if first.tensor else ""
        stamp = _at(work, wrong.step)
        nan = ", and its loss is no number" if stamp and not _finite(stamp.loss) else ""
        reason = f"{poll.workload}: {poll.told[place]} from step {wrong.step} on{where}{nan}"
        found.append(Finding(Status.FAIL, (reason,), difference=first, right=holder))
    elif place in result.undecided:
        found.append(_tied(poll, place, result))
    else:
        reasons = tuple(f"{poll.workload}: {doubt}" for doubt in _doubts(poll, place, result))
        found.append(Finding(Status.UNDECIDED if reasons else Status.PASS, reasons))
    return merge(found)


def _letters(poll: Poll, place: int, result: voting.Vote) -> str:
    wrong, own = poll.wrong.get(place), poll.bits(place)
    voted = dict(zip(result.steps, result.letters[place], strict=True))

    def letter(step: int) -> str:
        if step not in own:
            return MISSING
        return DIFFERS if wrong and step >= wrong.step else voted.get(step, UNDECIDED)

    return "".join(letter(step) for step in sorted({step for work in poll.works for step in bits_of(work)}))


def _tied(poll: Poll, place: int, result: voting.Vote) -> Finding:
    step = result.undecided_step
    assert step is not None
    own = poll.bits(place)[step]
    other = poll.works[next(other for other in result.undecided if poll.bits(other)[step] != own)]
    names = list(dict.fromkeys(poll.voters[each].label for each in result.undecided))
    words = f"{', '.join(names)} have different bits" if len(names) > 1 else "its own runs have different bits"
    reason = f"{poll.workload}: from step {step} on {words}, and no majority says which are right"
    first = difference(poll.workload, step, poll.works[place], other)
    return Finding(Status.UNDECIDED, (reason,), difference=first, right=other)


def _doubts(poll: Poll, place: int, result: voting.Vote) -> list[str]:
    """What speaks against a voter whom nobody has outvoted: steps nobody else has, or it has not; a loss of NaN."""
    own = poll.bits(place)
    voted = [dict(zip(result.steps, letters, strict=True)) for letters in result.letters]
    others = [*poll.elsewhere, *(bits_of(again) for voter in poll.voters for again in voter.again if not again.damaged)]

    def confirmed(step: int) -> bool:
        agreeing = sum(letters.get(step) == AGREES for letters in voted)
        return agreeing > 1 or step in poll.golden or any(bits.get(step) == own[step] for bits in others)

    doubts: list[str] = []
    alone = [step for step in own if not confirmed(step)]
    if alone:
        since = "" if len(alone) == len(own) else f"from step {alone[0]} on "
        doubts.append(f"{since}nothing to compare it with: no second card of its kind, run or golden record")
    missing = sorted({step for work in poll.works for step in bits_of(work)} - set(own))
    if missing and poll.works[place].complete:
        doubts.append(f"its record lacks step {missing[0]}, which others have")
    bad = next((stamp.step for stamp in poll.works[place].stamps if not _finite(stamp.loss)), None)
    if bad is not None:
        doubts.append(f"the loss is no number from step {bad} on, wherever it was run: that is not this card's fault")
    return doubts


def _ending(workload: str, entrant: Entrant, *, alike: bool, tied: bool) -> list[Finding]:
    """How a workload ended, if not well. `tied`: nobody can say whether the bits it went on with were right."""
    work = entrant.work
    if work is None or work.complete:
        return []
    after = f"after step {work.stamps[-1].step}" if work.stamps else "before its first step"
    if entrant.replica.exit_code == 0 and not work.error and not entrant.replica.error:
        cut = f"{workload}: its record ends {after}, but its process ended well: no card is to blame, run it again"
        return [Finding(Status.UNDECIDED, (cut,))]
    words = f"{workload}: ended {after}: {work.error or entrant.replica.error or 'nobody knows why'}"
    if alike:
        return [Finding(Status.UNDECIDED, (f"{words} (on every card alike: hardly a card's fault)",))]
    if tied and work.stamps and not (_finite(work.stamps[-1].loss) and _finite(work.stamps[-1].norm)):
        return [Finding(Status.UNDECIDED, (f"{words} (it follows from bits that nobody can judge)",))]
    return [Finding(Status.FAIL, (words,))]


def difference(workload: str, step: int, wrong: Work, right: Work | None) -> Difference:
    """Where a record differs at this step. The tensor is "" where no record has the right bits."""
    a, b = _at(wrong, step), _at(right, step) if right else None
    return Difference(workload, step, first_tensor(a, b, wrong.tensors) if a and b else "")


def _at(work: Work, step: int) -> Stamp | None:
    return next((stamp for stamp in work.stamps if stamp.step == step), None)


def _finite(text: str) -> bool:
    return not text or math.isfinite(float.fromhex(text))
