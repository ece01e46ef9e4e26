"""Replicas on the CPU inside the test's own process: small workloads, their errands and what became of them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.check import records
from lockstep.check.errand import Errand
from lockstep.check.records import Card, Replica, Workload
from lockstep.check.workloads import MADE, prepare_all

SMALL = {"training.batch_size": 2, "training.context_length": 32, **MADE}
LLAMA = Workload("llama", settings=SMALL, steps=6, batches=2)
GRADIENT, WEIGHT = "layers.1.mlp.w2.weight", "layers.0.attention.wq.weight"
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def data() -> Path:
    """Rows, made once for the whole session."""
    _KEPT.append(tempfile.TemporaryDirectory(prefix="lockstep-check-"))
    folder = Path(_KEPT[-1].name)
    prepare_all([LLAMA], folder)
    return folder


def errand(folder: Path, *workloads: Workload, card: int = 0, **more: Any) -> Errand:
    return Errand(Card(card, card), "cpu", workloads or (LLAMA,), folder, data(), **more)


def run(own: Errand, fault: str = "") -> tuple[int, Replica]:
    """Its exit code and its record."""
    from lockstep.check import replica

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        code = replica.run(own)
    return code, records.read(own.record, own.card)


def done(folder: Path, *workloads: Workload, fault: str = "", **more: Any) -> Replica:
    code, told = run(errand(folder, *workloads, **more), fault)
    assert code == 0, [work.error for work in told.works]
    return told
