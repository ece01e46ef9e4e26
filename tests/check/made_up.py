"""Checks that never happened, for the table, check.json and the page: cards with times, heat and one wrong bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from lockstep.check.outcome import CardVerdict, Checked, Difference, Judgement, Pace, Status, labels
from lockstep.check.records import Card, Replica, Work, Workload
from lockstep.health.records import Stamp

TENSORS = ("gradients:head", "weights:head", "moments:exp_avg.head")
WORKLOADS = (
    Workload("production", preset="production", settings={"model.num_layers": 2}, steps=60),
    Workload("attention", steps=40),
    Workload("mlm", family="mlm", steps=40),
    Workload("memory", kind="memory", steps=12),
)
WRONG_AT = 23
FLIP = Difference(
    workload="production",
    step=WRONG_AT,
    tensor="gradients:layers.1.feed_forward.w2.weight",
    elements=1,
    positions=((1187, 2003),),
    right=("3c1e",),
    wrong=("3c9e",),
    nature="persistent",
)


def card(index: int, *, node: int = 0, host: str = "") -> Card:
    uuid = f"GPU-{random.Random(index + 64 * node).getrandbits(128):032x}"
    uuid = "-".join((uuid[:12], uuid[12:16], uuid[16:20], uuid[20:24], uuid[24:]))
    return Card(index, index, node, host, uuid, f"16532230{index:05d}", "NVIDIA H200", "570.86.15")


def replica(own: Card, *, steps: int | None = None, pace: float = 1.0, wrong_at: int | None = None) -> Replica:
    noise = random.Random(own.index + 100 * own.node)
    works = tuple(_work(workload, noise, steps=steps, pace=pace, wrong_at=wrong_at) for workload in WORKLOADS)
    heat = [
        {"time": 1.8e9 + 2.0 * place, "gpu_temperature_c": _heat(place) + own.index % 3, "gpu_power_watts": 650.0}
        for place in range(60)
    ]
    return Replica(own, works, {"torch": "2.11.0"}, {"temperature_c": 34}, {"temperature_c": 61}, tuple(heat), 0)


def _heat(place: int) -> int:
    return round(34 + 38 * (1 - math.exp(-place / 14)) - (6 if place % 20 > 14 else 0))


def _work(workload: Workload, noise: random.Random, *, steps: int | None, pace: float, wrong_at: int | None) -> Work:
    stamps: list[Stamp] = []
    for step in range(steps or workload.steps):
        differs = workload.name == "production" and wrong_at is not None and step >= wrong_at
        seconds = pace * (0.212 + 0.4 * math.exp(-2.0 * step)) * (1 + abs(noise.gauss(0, 0.004)))
        sums = f"{step + (7 if differs else 0):032x}" * len(TENSORS)
        stamps.append(Stamp(step, (7.6 * 0.98**step + 0.1).hex(), (1.5).hex(), sums, seconds))
    kernels = {"attention": "compiled flex", "precision": "bf16"} if workload.kind == "train" else {"bytes": 2**37}
    return Work(workload.name, TENSORS, ((64, 64),) * 3, ("float32",) * 3, tuple(stamps), kernels, complete=True)


def paces(ratio: float = 1.0, *, slow: bool = False) -> tuple[Pace, ...]:
    return tuple(Pace(each.name, 0.212 * ratio, 0.2153 * ratio, ratio, ratio if slow else 0.0) for each in WORKLOADS)


def checked(verdicts: Sequence[CardVerdict], replicas: Sequence[Replica], **about: Any) -> Checked:
    """As the judges would put it together; `about`: other fields of Checked."""
    names = labels([verdict.card for verdict in verdicts])
    agreement = {
        workload.name: {
            name: _letters(verdict, own.work(workload.name))
            for name, verdict, own in zip(names, verdicts, replicas, strict=True)
        }
        for workload in WORKLOADS
    }
    told: dict[str, Any] = {
        "level": "quick", "device": "cuda", "config_hash": "9f86d081884c7d65",
        "versions": {"lockstep": "0.1.0", "torch": "2.11.0", "driver": "570.86.15", "cuda": "12.8"},
        "golden": {"file": "golden.json", "state": "used"},
        "covered": ("compiled flex attention, bf16 matrix products, fused AdamW", "1.2 minutes", "peak 73 °C"),
        "not_covered": ("cuDNN attention backward (dQ does not repeat its bits)", "links between the cards"),
        "began": 1.8e9, "seconds": 72.4,
    }  # fmt: skip
    return Checked(Judgement(tuple(verdicts), agreement), tuple(replicas), WORKLOADS, **(told | about))


def _letters(verdict: CardVerdict, work: Work | None) -> str:
    stamps = work.stamps if work else ()
    first = verdict.difference
    if not first or not work or first.workload != work.workload:
        return "." * len(stamps)
    letter = "?" if verdict.status is Status.UNDECIDED else "x"
    return "".join(letter if stamp.step >= first.step else "." for stamp in stamps)


def seven_pass_one_fails() -> Checked:
    """GPU 3 has one flipped bit, GPU 5 a note."""
    cards = [card(index) for index in range(8)]
    verdicts = [CardVerdict(each, Status.PASS, paces=paces()) for each in cards]
    reason = f"production: other bits than 7 of 8 cards from step {WRONG_AT} on, first in {FLIP.tensor}"
    verdicts[3] = CardVerdict(cards[3], Status.FAIL, (reason,), difference=FLIP, paces=paces(1.001))
    verdicts[5] = CardVerdict(cards[5], Status.PASS, notes=("3 corrected ECC errors during the check",), paces=paces())
    replicas = [replica(each, wrong_at=WRONG_AT if each.index == 3 else None) for each in cards]
    return checked(verdicts, replicas)


def two_undecided() -> Checked:
    """Two cards that differ."""
    cards = [card(0), card(1)]
    names = "GPU 0, GPU 1 have different bits"
    reason = f"production: from step {WRONG_AT} on {names}, and no majority says which are right"
    first = Difference("production", WRONG_AT, FLIP.tensor)
    verdicts = [CardVerdict(each, Status.UNDECIDED, (reason,), difference=first, paces=paces()) for each in cards]
    return checked(verdicts, [replica(cards[0]), replica(cards[1], wrong_at=WRONG_AT)], golden={})
