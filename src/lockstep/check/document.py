"""From a finished check to what check.json holds: clean texts, finite numbers, no secrets. Torch-free.

Table and page are made from this and nothing else, so that what a driver, a host name or a dying process has said is
cleaned in one place.
"""

from __future__ import annotations

import hashlib
import math
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import JsonValue

from lockstep.check import schema
from lockstep.check.advice import advice
from lockstep.check.condition import peak_temperature
from lockstep.check.golden import digest
from lockstep.check.outcome import CardVerdict, Checked, Difference, Pace, Status, labels
from lockstep.check.records import Replica, Work, Workload
from lockstep.health.records import DIGITS
from lockstep.runtime.scrub import scrubber

LONGEST_TEXT = 2000
MOST_SAMPLES = 600
UNSEEN = ("Cf", "Cs", "Co", "Zl", "Zp")  # direction and zero-width marks, halves of letters, line ends
LIMITS = (
    "Equal bits prove agreement, not correctness: a fault common to all passes.",
    "Defects under other kernels, temperatures or data are not excluded.",
)
Clean = Callable[[str], str]


def document(checked: Checked, *, name: str = "") -> schema.Report:
    """Everything that is known of a check."""
    clean = cleaner()
    verdicts = checked.judgement.verdicts
    main = main_workload(checked.workloads)
    begins = min((_moment(sample) for replica in checked.replicas for sample in replica.samples), default=0.0)
    named = zip(verdicts, labels([verdict.card for verdict in verdicts]), strict=True)
    cards = tuple(_Of(checked, verdict, label, clean).entry(main, begins) for verdict, label in named)
    return schema.Report(
        name=clean(name),
        status=overall([verdict.status for verdict in verdicts]),
        exit_code=int(checked.exit_code),
        level=clean(checked.level),
        device=clean(checked.device),
        began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(checked.began)),
        seconds=_finite(checked.seconds) or 0.0,
        config_hash=clean(checked.config_hash),
        versions=_texts(checked.versions, clean),
        golden=_mapping(checked.golden, clean),
        main_workload=clean(main),
        workloads=tuple(_workload(each, checked.replicas, clean) for each in checked.workloads),
        gpus=cards,
        coverage=schema.Coverage(
            covered=tuple(map(clean, checked.covered)),
            not_covered=tuple(map(clean, checked.not_covered)),
            limits=LIMITS,
        ),
    )


def overall(statuses: Sequence[Status]) -> schema.Verdict:
    """FAIL weighs more than UNDECIDED, and that more than PASS."""
    if Status.FAIL in statuses:
        return "FAIL"
    return "UNDECIDED" if Status.UNDECIDED in statuses or not statuses else "PASS"


def main_workload(workloads: Sequence[Workload]) -> str:
    """The one whose times are shown first: the first that trains."""
    names = [each.name for each in workloads if each.kind == "train"] or [each.name for each in workloads]
    return names[0] if names else ""


def cleaner() -> Clean:
    """A function that makes one line of any text: no secret, no control byte, nothing that is not seen."""
    scrub = scrubber()

    def clean(text: str) -> str:
        seen = (letter for letter in text if unicodedata.category(letter) not in UNSEEN)  # a secret must not hide so
        text = " ".join(scrub("".join(seen)).split())
        return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"

    return clean


class _Of:
    """What is known of one card."""

    def __init__(self, checked: Checked, verdict: CardVerdict, label: str, clean: Clean) -> None:
        self._checked, self._verdict, self._label, self._clean = checked, verdict, label, clean
        self._replica = replica_of(verdict, checked.replicas) or Replica(verdict.card)

    def entry(self, main: str, begins: float) -> schema.CardEntry:
        verdict, replica, clean = self._verdict, self._replica, self._clean
        card, difference = verdict.card, verdict.difference
        samples = _samples(replica.samples, begins)
        works = tuple(self._work(work) for work in replica.works)
        return schema.CardEntry(
            name=clean(self._label),
            index=card.index,
            slot=card.slot,
            node=card.node,
            host=clean(card.host),
            uuid=clean(card.uuid),
            serial=clean(card.serial),
            model=clean(card.model),
            driver=clean(card.driver),
            status=verdict.status.value,
            reasons=tuple(map(clean, verdict.reasons)),
            notes=tuple(map(clean, verdict.notes)),
            advice=clean(advice(verdict, self._checked, failed=bool(replica.error))),
            exit_code=replica.exit_code,
            error=clean(replica.error),
            difference=_difference(difference, clean) if difference else None,
            weight_hash=next((work.weight_hash for work in works if work.workload == main), ""),
            peak_temperature_c=peak_temperature(replica),
            works=works,
            versions=_texts(replica.versions, clean),
            before=_mapping(replica.before, clean),
            after=_mapping(replica.after, clean),
            samples=samples,
        )

    def _work(self, work: Work) -> schema.WorkEntry:
        clean, stamps = self._clean, work.stamps
        letters = self._checked.judgement.agreement.get(work.workload, {}).get(self._label, "")
        pace = next((each for each in self._verdict.paces if each.workload == work.workload), None)
        return schema.WorkEntry(
            workload=clean(work.workload),
            complete=work.complete,
            error=clean(work.error),
            damaged_lines=len(work.damaged),
            agreement=clean(letters),
            pace=_pace(pace) if pace else None,
            weight_hash=weight_hash(work),
            steps=tuple(stamp.step for stamp in stamps),
            losses=tuple(_real(stamp.loss) for stamp in stamps),
            norms=tuple(_real(stamp.norm) for stamp in stamps),
            bits=tuple(digest(stamp) for stamp in stamps),
            seconds=tuple(round(_finite(stamp.seconds) or 0.0, 6) for stamp in stamps),
            facts=_mapping(work.facts, clean),
        )


def replica_of(verdict: CardVerdict, replicas: Sequence[Replica]) -> Replica | None:
    """The first run of a card; a lone card has two."""
    return next((replica for replica in replicas if replica.card == verdict.card), None)


def weight_hash(work: Work) -> str:
    """Of all weights after the last step; empty where there are none."""
    if not work.stamps:
        return ""
    places = [place for place, name in enumerate(work.tensors) if name.startswith("weights:")]
    sums = "".join(work.stamps[-1].sum_of(place) for place in places)
    whole = places and len(sums) == DIGITS * len(places)
    return hashlib.sha256(sums.encode()).hexdigest()[:32] if whole else ""


def _workload(workload: Workload, replicas: Sequence[Replica], clean: Clean) -> schema.WorkloadEntry:
    works = [work for replica in replicas if (work := replica.work(workload.name))]
    return schema.WorkloadEntry(
        name=clean(workload.name),
        kind=clean(workload.kind),
        family=clean(workload.family),
        preset=clean(workload.preset),
        settings=_mapping(workload.settings, clean),
        steps=workload.steps,
        interval=workload.interval,
        warmup_steps=workload.warmup_steps,
        compared_steps=tuple(sorted({stamp.step for work in works for stamp in work.stamps})),
    )


def _difference(difference: Difference, clean: Clean) -> schema.DifferenceEntry:
    return schema.DifferenceEntry(
        workload=clean(difference.workload),
        step=difference.step,
        tensor=clean(difference.tensor),
        elements=difference.elements,
        positions=difference.positions,
        right=tuple(map(clean, difference.right)),
        wrong=tuple(map(clean, difference.wrong)),
        nature=clean(difference.nature),
    )


def _pace(pace: Pace) -> schema.PaceEntry | None:
    numbers = [_finite(value) for value in (pace.median_seconds, pace.p95_seconds, pace.ratio)]
    median, p95, ratio = numbers
    if median is None or p95 is None or ratio is None:
        return None
    return schema.PaceEntry(median_seconds=median, p95_seconds=p95, ratio=ratio, slow=pace.slow)


def _samples(samples: Sequence[Mapping[str, Any]], begins: float) -> tuple[schema.Sample, ...]:
    """At most MOST_SAMPLES: of neighbours the hottest is kept."""
    found = [
        schema.Sample(
            seconds=round(_moment(sample) - begins, 3),
            temperature_c=_finite(sample.get("gpu_temperature_c")),
            power_watts=_finite(sample.get("gpu_power_watts")),
        )
        for sample in samples
    ]
    size = -(-len(found) // MOST_SAMPLES) or 1
    groups = [found[start : start + size] for start in range(0, len(found), size)]
    return tuple(max(group, key=lambda sample: sample.temperature_c or -math.inf) for group in groups)


def _moment(sample: Mapping[str, Any]) -> float:
    return _finite(sample.get("time")) or 0.0


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _real(text: str) -> float | None:
    try:
        return _finite(float.fromhex(text))
    except (ValueError, OverflowError):
        return None


def _texts(told: Mapping[str, str], clean: Clean) -> dict[str, str]:
    return {clean(key): clean(value) for key, value in told.items()}


def _mapping(told: Mapping[str, Any], clean: Clean) -> dict[str, JsonValue]:
    return {clean(key): _plain(value, clean) for key, value in told.items()}


def _plain(value: Any, clean: Clean) -> JsonValue:
    """As JSON can hold it; NaN and Inf as words."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return _mapping(value, clean)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, clean) for each in value]
    return clean(str(value) if isinstance(value, str | PurePath) else repr(value))
