"""The judge: from what all cards have on record to PASS, FAIL or UNDECIDED of each. Pure, and torch-free.

Cards are compared with cards of their kind: the same model, driver and versions. A card is one that one process drove;
what the same process ran a second time is the same card again, later.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.check import ballots, stragglers
from lockstep.check.ballots import Bits, Entrant, bits_of
from lockstep.check.condition import condition
from lockstep.check.finding import SEVERITY, Finding, merge
from lockstep.check.golden import DECIDING, Golden
from lockstep.check.outcome import CardVerdict, Judgement, Pace, Status, labels
from lockstep.check.records import Card, Replica, Work, Workload
from lockstep.health.vote import MISSING

SLOW_RATIO = 1.05


@dataclass(frozen=True)
class Seat:
    """A card before the judge: all its runs, the first one first, and what was run again because of a doubt."""

    label: str
    runs: tuple[Replica, ...]
    reruns: tuple[Replica, ...] = ()

    @property
    def first(self) -> Replica:
        return self.runs[0]

    @property
    def kind(self) -> tuple[str, ...]:
        card, versions = self.first.card, self.first.versions
        return (card.model, card.driver, *(versions.get(name, "") for name in DECIDING))

    def again(self) -> tuple[Replica, ...]:
        """Whatever it ran once more."""
        return (*self.runs[1:], *self.reruns)


def judge(
    replicas: Sequence[Replica],
    *,
    golden: Golden | None = None,
    slow_ratio: float = SLOW_RATIO,
    shortest_seconds: float = 0.0,
    reruns: Sequence[Replica] = (),
    workloads: Sequence[Workload] = (),
) -> Judgement:
    """Of each card. `shortest_seconds`: of a workload that is judged by its times. `reruns`: until a doubtful step, or
    whole. `workloads`: the plan, for the steps of each that are warm-up, and for those that nobody got to."""
    seats = _seats(replicas, reruns)
    planned = {workload.name: workload for workload in workloads}
    names = list(dict.fromkeys([*planned, *(work.workload for seat in seats for work in seat.first.works)]))
    names = [name for name in names if name != "?"]  # of a record whose beginning is damaged
    findings: dict[str, list[Finding]] = {seat.label: [] for seat in seats}
    paces: dict[str, list[Pace]] = {seat.label: [] for seat in seats}
    agreement: dict[str, dict[str, str]] = {}
    for name in names:
        of_workload = _compare(name, seats, golden)
        steps = max(len(finding.letters) for finding in of_workload.values())
        agreement[name] = {label: finding.letters.ljust(steps, MISSING) for label, finding in of_workload.items()}
        warmup = planned[name].warmup_steps if name in planned else Workload(name).warmup_steps
        limits = {"slow_ratio": slow_ratio, "shortest_seconds": shortest_seconds}
        for label, pace in _paces(name, seats, warmup=warmup, **limits).items():
            paces[label].append(pace)
        for seat in seats:
            finding = of_workload[seat.label]
            findings[seat.label].append(_attributed(finding, name, seat))
    verdicts = tuple(
        _verdict(seat, [*findings[seat.label], *_kinds(seat, seats)], paces[seat.label], golden) for seat in seats
    )
    return Judgement(verdicts, agreement)


def _place(card: Card) -> tuple[int, int, str, int]:
    return card.node, card.index, card.uuid, card.slot


def _seats(replicas: Sequence[Replica], reruns: Sequence[Replica]) -> list[Seat]:
    runs: dict[tuple[int, int, str, int], list[Replica]] = {}
    for replica in replicas:
        runs.setdefault(_place(replica.card), []).append(replica)
    named = labels([own[0].card for own in runs.values()])
    return [
        Seat(label, tuple(own), tuple(rerun for rerun in reruns if _place(rerun.card) == place))
        for label, (place, own) in zip(named, runs.items(), strict=True)
    ]


def _compare(name: str, seats: Sequence[Seat], golden: Golden | None) -> dict[str, Finding]:
    """Of each card in one workload, each kind of card by itself."""
    kinds: dict[tuple[str, ...], list[Seat]] = {}
    for seat in seats:
        kinds.setdefault(seat.kind, []).append(seat)
    alike = _failed_alike(name, seats)
    found: dict[str, Finding] = {}
    for kind, own in kinds.items():
        entrants = [entrant for seat in own for entrant in _entrants(name, seat, alone=len(own) == 1)]
        known = golden.of(own[0].first.card, own[0].first.versions).get(name) if golden else None
        results = ballots.compare(
            name,
            entrants,
            golden=known.steps if known else {},
            elsewhere=[] if len(kinds) == 1 else _others(name, seats, kind),
            alike=alike,
        )
        for seat in own:
            mine = [pair for pair in zip(entrants, results, strict=True) if pair[0].label == seat.label]
            found[seat.label] = _of_all_runs(seat, mine)
    return found


def _entrants(name: str, seat: Seat, *, alone: bool) -> list[Entrant]:
    """A card among others has one vote, however often it ran. A card alone is compared with itself in time."""
    if alone:
        return [Entrant(seat.label, run, run.work(name)) for run in _with(name, (*seat.runs[:1], *seat.again()))]
    again = tuple(work for run in seat.again() if (work := run.work(name)))
    return [Entrant(seat.label, seat.first, seat.first.work(name), again)]


def _of_all_runs(seat: Seat, mine: Sequence[tuple[Entrant, Finding]]) -> Finding:
    """One finding of a card's runs: the worst of them. A rerun ends early: only wrong bits of it count."""
    counted = [
        finding
        for entrant, finding in mine
        if entrant.replica in seat.runs or (finding.difference and finding.status is Status.FAIL)
    ]
    worst = max((finding.status for finding in counted), key=SEVERITY.index, default=Status.PASS)
    return merge([finding for finding in counted if finding.status is worst])


def _with(name: str, runs: Sequence[Replica]) -> list[Replica]:
    """The first run, and the later ones that have this workload."""
    return [run for place, run in enumerate(runs) if place == 0 or run.work(name)]


def _others(name: str, seats: Sequence[Seat], kind: tuple[str, ...]) -> list[Mapping[int, Bits]]:
    works = [seat.first.work(name) for seat in seats if seat.kind != kind]
    return [bits_of(work) for work in works if work and not work.damaged]


def _failed_alike(name: str, seats: Sequence[Seat]) -> bool:
    """Every card failed with the same words but for numbers: that is a fault of what was run."""
    works = [seat.first.work(name) for seat in seats]
    words = {re.sub(r"\d+", "", work.error) if work and not work.complete else "" for work in works}
    return len(works) > 1 and len(words) == 1 and "" not in words


def _attributed(finding: Finding, name: str, seat: Seat) -> Finding:
    """A difference with what the reruns say of its nature."""
    first, own = finding.difference, seat.first.work(name)
    if first is None or own is None or finding.right is None or finding.status is not Status.FAIL:
        return finding
    again = [_prefix(work, first.step) for run in seat.again() if (work := run.work(name)) and not work.damaged]
    again = [bits for bits in again if first.step in bits]
    nature = _nature(again, _prefix(own, first.step), _prefix(finding.right, first.step))
    return dataclasses.replace(finding, difference=dataclasses.replace(first, nature=nature))


def _prefix(work: Work, step: int) -> dict[int, Bits]:
    return {at: bits for at, bits in bits_of(work).items() if at <= step}


def _nature(again: Sequence[Mapping[int, Bits]], own: Mapping[int, Bits], right: Mapping[int, Bits]) -> str:
    """Right every time it was run again: transient. The same wrong bits every time: persistent."""
    if not again:
        return ""
    if all(bits == own for bits in again):
        return "persistent"
    return "transient" if all(bits == right for bits in again) else "intermittent"


def _paces(
    name: str, seats: Sequence[Seat], *, warmup: int, slow_ratio: float, shortest_seconds: float
) -> dict[str, Pace]:
    """How fast each card is in one workload, beside those of its kind. Processes that share a card only take turns."""
    found: dict[str, Pace] = {}
    for kind in dict.fromkeys(seat.kind for seat in seats):
        own = [seat for seat in seats if seat.kind == kind]
        shared = len({_place(seat.first.card)[:-1] for seat in own}) < len(own)
        works = {seat.label: seat.first.work(name) for seat in own}
        times = {
            label: [stamp.seconds for stamp in work.stamps[warmup:] if stamp.seconds > 0]
            for label, work in works.items()
            if work
        }
        shortest = math.inf if shared else shortest_seconds
        found |= stragglers.paces(name, times, slow_ratio=slow_ratio, shortest_seconds=shortest)
    return found


def _pattern(seat: Seat) -> Finding:
    """One word of memory that came back wrong fails a card, whatever the others say."""
    works = [work for run in (*seat.runs, *seat.reruns) for work in run.works]
    wrong = [(work.workload, word) for work in works for word in work.facts.get("wrong_words", ())]
    if not wrong:
        return Finding()
    name, first = wrong[0]
    word = f"word {first['word']} of the pattern was {first['wrong']} instead of {first['right']}"
    return Finding(Status.FAIL, (f"{name}: {word} after step {first['step']}",))


def _kinds(seat: Seat, seats: Sequence[Seat]) -> list[Finding]:
    """Cards that are not all alike are told so: their bits may differ for that reason alone."""
    known = [each for each in seats if each.first.versions]  # of one without a record nobody knows what it is like
    if seat not in known or len({each.kind for each in known}) == 1:
        return []
    alike = [each.label for each in known if each.kind == seat.kind and each is not seat]
    card, torch = seat.first.card, seat.first.versions.get("torch", "?")
    kind = ", ".join(filter(None, (card.model, card.driver and f"driver {card.driver}", f"torch {torch}")))
    partners = f"compared with {', '.join(alike)}" if alike else "no other card is of its kind"
    return [Finding(notes=(f"the cards are not all alike: this one is {kind}; {partners}",))]


def _verdict(seat: Seat, findings: Sequence[Finding], paces: Sequence[Pace], golden: Golden | None) -> CardVerdict:
    replica = seat.first
    slow = [
        Finding(
            Status.FAIL,
            (f"slow in {pace.workload}: its median step is {pace.slow_ratio:.2f} times the group's",),
        )
        for pace in paces
        if pace.slow
    ]
    own = [_pattern(seat), condition(replica), *_golden_times(replica, paces, golden)]
    whole = merge([*findings, *slow, *own])
    if replica.error and whole.status is not Status.FAIL:
        whole = merge([whole, Finding(Status.FAIL, (f"did not finish: {replica.error}",))])
    return CardVerdict(replica.card, whole.status, whole.reasons, whole.notes, whole.difference, tuple(paces))


def _golden_times(replica: Replica, paces: Sequence[Pace], golden: Golden | None) -> list[Finding]:
    """Other times than those of the golden record are worth a note: they were taken on another day."""
    known = golden.of(replica.card, replica.versions) if golden else {}
    found: list[Finding] = []
    for pace in paces:
        reference = known[pace.workload].median_seconds if pace.workload in known else 0.0
        if reference and pace.median_seconds > SLOW_RATIO * reference:
            times = pace.median_seconds / reference
            found.append(Finding(notes=(f"{pace.workload}: {times:.2f} times the median step of the golden record",)))
    return found
