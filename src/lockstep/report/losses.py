"""The steps of two runs side by side, from their events: where are their bits first different?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.report.jsonl import read_events

EXACT = ("loss_hex", "grad_norm_hex", "digest")  # of a step; a digest only where both have one

Steps = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class FirstDifference:
    """The first step that is not the same in both."""

    step: int
    what: str  # loss, grad_norm or digest
    one: str
    other: str

    def text(self) -> str:
        return f"step {self.step}: {self.what} {self.one} | {self.other}"


@dataclass(frozen=True)
class Compared:
    """Steps that both runs have on record, and the first that differs."""

    steps: int
    first: FirstDifference | None


def steps_of(events: Path) -> dict[int, dict[str, Any]]:
    """The steps that count, by number; {} where nothing is on record."""
    try:
        return {int(event["step"]): event for event in read_events(events) if event["kind"] == "step"}
    except (OSError, KeyError, ValueError, TypeError):
        return {}


def compare(one: Steps, other: Steps) -> Compared:
    """Step by step, by exact bits."""
    common = sorted(one.keys() & other.keys())
    for step in common:
        for key in EXACT:
            ours, theirs = str(one[step].get(key) or ""), str(other[step].get(key) or "")
            if ours != theirs and (key != "digest" or (ours and theirs)):
                return Compared(len(common), FirstDifference(step, key.removesuffix("_hex"), ours, theirs))
    return Compared(len(common), None)
