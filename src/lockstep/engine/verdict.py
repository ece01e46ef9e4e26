"""What the tries of a bad step mean: the verdict of `lockstep replay`, and what to do next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.engine.bundle import Bundle
from lockstep.errors import ExitCode
from lockstep.health.finding import Finding, Place
from lockstep.health.words import SUSPECT

NEXT = {  # by the first word of the verdict
    "data": "look at what the row says (bundle.json has its text), then leave it out or mend it",
    "overflow": "--precision fp32, or bf16 instead of fp16, for the whole run",
    "kernel": "the run with what helps: model.compile=off or model.attention_backend=native_math",
    "hardware-suspect": "go on with lockstep resume; if it happens again on this device, do without it",
    "model": "an earlier checkpoint with a lower training.learning_rate, or from the start with a lower model.init_std",
}
IN_WEIGHTS = (  # of the same suspicion, where the bad value is in what was saved
    "the checkpoint of this step has it too: go on from an earlier one (lockstep resume RUN/checkpoints/step_N); "
    "if it happens again on this device, do without it"
)


@dataclass(frozen=True)
class Change:
    """One thing that is done differently."""

    name: str
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    drop: int = -1  # this row

    @property
    def changes(self) -> bool:
        return bool(self.training or self.model or self.drop >= 0)


AS_IT_WAS = Change("as it was")
FP32 = Change("in fp32", training={"precision": "fp32"})
NO_COMPILE = Change("without the compiler", model={"compile": "off"})
PLAIN_ATTENTION = Change("with plain attention", model={"attention_backend": "native_math"})


@dataclass(frozen=True)
class Outcome:
    """What a step did this time."""

    change: Change
    fine: bool
    place: Place | None
    compiled: bool = False
    attention: str = ""

    def text(self) -> str:
        where = f", first in {self.place.brief()}" if self.place else ""
        return f"{self.change.name}: {'finite' if self.fine else f'not finite{where}'}"


@dataclass(frozen=True)
class Replayed:
    """All that was tried, and what it says."""

    reproduced: bool
    outcomes: tuple[Outcome, ...]
    verdict: str

    @property
    def exit_code(self) -> int:
        return ExitCode.DONE if self.reproduced else ExitCode.FAILED

    @property
    def next(self) -> str:
        word = self.verdict.partition(":")[0]
        return IN_WEIGHTS if word == "hardware-suspect" and not self.outcomes[0].fine else NEXT[word]

    def lines(self, finding: Finding) -> list[str]:
        was = f"first in {finding.place.text()}" if finding.place else "the run could not say where"
        return [
            f"Step {finding.step} of rank {finding.rank}: {finding.kind}, {was}",
            *(outcome.text() for outcome in self.outcomes),
            f"{'Reproduced' if self.reproduced else 'Not reproduced'}",
            f"Verdict: {self.verdict}",
            f"Next: {self.next}",
        ]


def judge(read: Bundle, outcomes: Sequence[Outcome], device: torch.device, *, same: bool) -> str:
    """data, overflow, kernel, hardware-suspect, or the model itself. `same`: the same first bad tensor came back."""
    finding, first = read.finding, outcomes[0]
    if first.fine and finding.reproduced and first.change != AS_IT_WAS:
        return "overflow: without float8, which this device does not have, it does not happen"
    if first.fine and finding.reproduced and read.about["device"] != device.type:  # where it was, it came again
        own = read.about["device"]
        return f"kernel: {device.type} has others than {own}, and it does not happen; --device {own} can tell more"
    if first.fine:
        return SUSPECT
    where = first.place.module if first.place else "the model"
    if first.place and first.place.phase == "input":
        return f"data: {first.place.tensors[0].name} is not finite before the model sees it"
    if first.place and first.place.phase == "weights":
        if not first.place.tensors or first.place.tensors[0].nans:  # a bad step never updates: nothing wrote this
            return f"hardware-suspect: {where} was NaN before the step, and no update writes NaN"
        return f"model: {where} had grown to infinity before the step"
    gone = [outcome.change for outcome in outcomes if outcome.fine]
    if FP32 in gone:
        return f"overflow: in fp32 it goes away ({first.place.brief() if first.place else 'place unknown'})"
    if NO_COMPILE in gone or PLAIN_ATTENTION in gone:
        return f"kernel: it goes away {' and '.join(change.name for change in gone if change.drop < 0)}"
    if gone:
        [row], ids = [change.drop for change in gone], finding.row_ids
        return f"data: it goes away without sample {row}{f' (row {ids[row]} of the table)' if row < len(ids) else ''}"
    return f"model: {where} does it{' in every way that was tried' if same else ', elsewhere than in the run'}"
