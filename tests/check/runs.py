"""Made-up records of replicas, right ones and wrong ones, for the judge."""

from __future__ import annotations

import dataclasses
from typing import Any

from lockstep.check.outcome import CardVerdict, Judgement, Status
from lockstep.check.records import Card, Replica, Work
from lockstep.health.records import Stamp

TENSORS = ("gradients:a", "gradients:b", "weights:a", "weights:b", "moments:exp_avg.a")
STEPS = 12
VERSIONS = {"torch": "2.11.0", "cuda": "12.8"}
PASS, FAIL, UNDECIDED = Status.PASS, Status.FAIL, Status.UNDECIDED


def stamp(step: int, *, wrong: str = "", salt: int = 0, loss: str = "", seconds: float = 0.1) -> Stamp:
    """One step; `wrong`: the first tensor with other bits, and those after it; "loss": only the loss differs."""
    differs = False
    sums = ""
    for place, name in enumerate(TENSORS):
        differs = differs or name == wrong
        sums += f"{(step + 1) * 1000 + place + (1 + salt if differs else 0) * 7919:032x}"
    told = loss or (1.0 / (step + 1) + (salt + 1 if wrong == "loss" else 0)).hex()
    return Stamp(step, told, (0.5).hex(), sums, seconds)


def work(name: str = "production", *, wrong_at: int | None = None, tensor: str = "weights:b", **more: Any) -> Work:
    salt, steps = int(str(more.pop("salt", 0))), int(str(more.pop("steps", STEPS)))
    stamps = tuple(
        stamp(step, wrong="" if wrong_at is None or step < wrong_at else tensor if step == wrong_at else TENSORS[0],
              salt=salt)
        for step in range(steps)
    )  # fmt: skip
    whole = Work(name, TENSORS, ((2, 3),) * len(TENSORS), ("float32",) * len(TENSORS), stamps, complete=True)
    return dataclasses.replace(whole, **more)


def card(index: int, **more: Any) -> Card:
    told: dict[str, Any] = {"uuid": f"GPU-{index}", "model": "H200", "driver": "570"} | more
    return Card(index, int(str(told.pop("slot", index))), **told)


def replica(index: int, *works: Work, **more: Any) -> Replica:
    own = Replica(card(index), works or (work(),), VERSIONS, exit_code=0)
    return dataclasses.replace(own, **more)


def statuses(judgement: Judgement) -> list[Status]:
    return [verdict.status for verdict in judgement.verdicts]


def said(verdict: CardVerdict) -> str:
    return "; ".join(verdict.reasons)
