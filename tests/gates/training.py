"""Short runs of the real engine inside this process, with every step's bits on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config.load import load
from lockstep.contracts import Objective, StepRecord
from lockstep.engine import loop
from lockstep.engine.build import assemble, plan
from lockstep.engine.parts import Parts
from lockstep.engine.resume import ResumePoint
from lockstep.engine.train import rehearse
from lockstep.rundir import RunDir
from lockstep.runtime.group import Group
from lockstep.runtime.signals import StopRequest

FEW_WORDS = str(Path(__file__).parents[1] / "few_words.txt")  # a table of a few rows: short runs walk over it often
FEW_DOCUMENTS = str(Path(__file__).parents[1] / "few_documents.jsonl")  # the same, a document for each clause
FEW_ANSWERS = str(Path(__file__).parents[1] / "few_answers.jsonl")  # the same, cut into prompts and answers


@dataclass
class Recorder:
    """A sink that keeps what it is given, and the host's and the scaler's state at that moment."""

    records: list[StepRecord] = field(default_factory=list)
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    parts: Parts | None = None

    def write(self, record: StepRecord) -> None:
        self.records.append(record)
        if self.parts is None:
            return
        scaler = self.parts.stepper.precision.scaler
        bits = (record.step, record.loss.hex(), record.grad_norm.hex(), record.lr.hex(), record.digest)
        state = (self.parts.progress.state_dict(), scaler.state_dict() if scaler else None)
        self.trace.append((*bits, *state))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.events.append((kind, fields))

    def close(self) -> None: ...


def flags(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value).lower() if isinstance(value, bool) else str(value)) for key, value in settings.items()]


def run(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    family: str = "llama",
    point: Path | None = None,
    preset: str = "tiny",
    stop: StopRequest | None = None,
    group: Group | None = None,
    objective: Objective | None = None,
    recorder: Recorder | None = None,
) -> tuple[Parts, Recorder]:
    """Train `preset` with `settings` changed, in this process; from a checkpoint if `point` is given.

    With a group: as one of its ranks.
    """
    loaded = load(family, preset=preset, flags=flags({"system.device": "cpu", **settings}))
    planned = plan(loaded, torch.device(loaded.config.system.device))
    if objective:
        planned = replace(planned, objective=objective)
    recorder = recorder or Recorder()
    resume, stop = ResumePoint(point, None) if point else None, StopRequest() if stop is None else stop
    assembled = assemble(planned, RunDir(folder), point=resume, sinks=[recorder], stop=stop, group=group)
    recorder.parts = assembled.parts
    try:
        if not assembled.parts.is_over(assembled.parts.progress.step):
            rehearse(assembled.parts, planned)
        loop.run(assembled.parts)
    finally:
        assembled.loader.close()
    return assembled.parts, recorder


def losses(records: Sequence[StepRecord]) -> list[float]:
    return [record.loss for record in records]
