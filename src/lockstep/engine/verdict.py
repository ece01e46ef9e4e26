"""What the tries of a bad step mean: the verdict of `lockstep replay`, and what to do next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config.load import from_saved
from lockstep.contracts import Batch, Objective
from lockstep.engine import first_loss
from lockstep.engine.bundle import Bundle
from lockstep.engine.checkpoint import MODEL
from lockstep.engine.shards import Stored
from lockstep.errors import ExitCode
from lockstep.health.finding import Finding, Place
from lockstep.health.words import SUSPECT
from lockstep.models import shapes

LARGE_WEIGHT, MOST_FLIPS = 1e6, 8
EXPLODING = 10.0  # times the usual gradient norm
RUINED = 2.0  # times the loss of a blind guess
NEXT = {  # by the first word of the verdict
    "data": "look at what the row says (bundle.json has its text), then leave it out or mend it",
    "overflow": "--precision fp32, or bf16 instead of fp16, for the whole run",
    "learning rate": "a lower training.learning_rate or more training.warmup_steps, from an earlier checkpoint",
    "kernel": "the run with the flag that helps: model.attention_backend=native_math or model.compile=off",
    "hardware-suspect": "go on with lockstep resume; if it happens again on this device, do without it",
    "model": "the line above; a lower model.init_std or training.learning_rate often helps",
}
IN_WEIGHTS = (  # of the same suspicion, where the bad value is in what was saved
    "the checkpoint of this step has it too: go on from an earlier one (lockstep resume RUN/checkpoints/step_N); "
    "if it happens again on this device, do without it"
)


@dataclass(frozen=True)
class Change:
    """One thing that is done differently."""

    name: str  # the flag
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    drop: int = -1  # this row

    @property
    def changes(self) -> bool:
        return bool(self.training or self.model or self.drop >= 0)


AS_IT_WAS = Change("as it was")
FP32 = Change("--fp32", training={"precision": "fp32"})
NO_COMPILE = Change("--no-compile", model={"compile": "off"})
EAGER_ATTENTION = Change("--eager-attention", model={"attention_backend": "native_math"})


@dataclass(frozen=True)
class Outcome:
    """What a step did this time."""

    change: Change
    fine: bool
    place: Place | None
    compiled: bool = False
    attention: str = ""
    ruined: str = ""  # what it says of the weights that it is finite, if it does

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
        others = [each for each in self.outcomes if each.change.drop < 0 or each.fine]
        kept = [each for each in self.outcomes if each.change.drop >= 0 and not each.fine]
        rest = [f"--drop-sample, {len(kept)} tried: not finite"] if kept else []
        return [
            f"Step {finding.step} of rank {finding.rank}: {finding.kind}, {was}",
            *(outcome.text() for outcome in others),
            *rest,
            f"{'Reproduced' if self.reproduced else 'Not reproduced'}",
            f"Verdict: {self.verdict}",
            f"Next: {self.next}",
        ]


def judge(read: Bundle, outcomes: Sequence[Outcome], device: torch.device, *, same: bool) -> str:
    """data, overflow, learning rate, kernel, hardware-suspect, or the model itself."""
    finding, first = read.finding, outcomes[0]
    if first.fine and finding.reproduced and first.change != AS_IT_WAS:
        return "overflow: without float8, which this device does not have, it does not happen"
    if first.fine and finding.reproduced and read.about["device"] != device.type:  # where it was, it came again
        own = read.about["device"]
        return f"kernel: {device.type} has others than {own}, and it does not happen; --device {own} can tell more"
    if first.fine:
        return SUSPECT
    gone = [outcome.change for outcome in outcomes[1:] if outcome.fine]
    ids = finding.row_ids
    if first.place and first.place.phase == "input":
        return f"data: {first.place.tensors[0].name} is not finite before the model sees it"
    if first.place and first.place.phase == "weights":
        if not first.place.tensors or first.place.tensors[0].nans:  # a bad step never updates: nothing wrote this
            return f"hardware-suspect: {first.place.module} was NaN before the step, and no update writes NaN"
        return f"learning rate: {first.place.module} had grown to infinity before the step"
    if FP32 in gone:
        ruined = next(outcome.ruined for outcome in outcomes if outcome.change == FP32)
        place = first.place.brief() if first.place else "place unknown"
        return ruined or f"overflow: in fp32 it goes away ({place})"
    if NO_COMPILE in gone or EAGER_ATTENTION in gone or (first.place and not first.place.eager):
        return f"kernel: it goes away with {' and '.join(each.name for each in gone if each.drop < 0) or 'no compiler'}"
    rows = [change.drop for change in gone if change.drop >= 0]
    if rows:
        named = ", ".join(f"{row} (row {ids[row]} of the table)" if row < len(ids) else str(row) for row in rows)
        return f"data: it goes away without sample {named}"
    if weights := _large_weights(read):
        return weights
    if _was_exploding(finding):
        return "learning rate: losses or gradient norms had been growing over the last steps"
    where = first.place.module if first.place else "the model"
    return f"model: {where} does it {'in every way that was tried' if same else ', elsewhere than in the run'}"


def _large_weights(read: Bundle) -> str:
    """A weight beyond all others of its tensor was not learnt; if many are large, they were."""
    stored = Stored(read.weights, MODEL)
    for name in stored:
        tensor = stored[name].float().abs()
        large = int((tensor > LARGE_WEIGHT).sum())
        if large > MOST_FLIPS:
            return f"learning rate: {large} values of {name} had grown beyond {LARGE_WEIGHT:g} before the step"
        if large:
            usual = tensor.median().item()
            return (
                f"hardware-suspect: a value of {name} is {tensor.max().item():.3g}, usually {usual:.3g}: a flipped bit?"
            )
    return ""


def ruined(read: Bundle, loss: float, batches: Sequence[Batch], objective: Objective) -> str:
    """Weights that do far worse than a blind guess, and did not before, were driven there: fp16 only shows it first.

    `loss`: of the same step in fp32, this rank's part of the mean over all of them.
    """
    config, before = from_saved(read.about["config"]), _finite(read.finding, "loss")
    guess = first_loss.foreseen(config, shapes.from_hf(read.about["shape"]), batches, objective=objective).loss
    own = sum(sum(batch.weights.values()) for batch in batches)
    now = loss * sum(read.about["denominators"].values()) / max(1, own)
    worst = max([now, *before[-3:]])
    if not before or worst <= RUINED * max(guess, min(before)):
        return ""
    grown = f"the loss had grown from {min(before):.4g} to {worst:.4g}, a blind guess has {guess:.4g}"
    return _large_weights(read) or f"learning rate: {grown}"


def _finite(finding: Finding, name: str) -> list[float]:
    """A figure of the last steps, where it was a number."""
    return [value for each in finding.history if math.isfinite(value := float(each[name]))]


def _was_exploding(finding: Finding) -> bool:
    norms = _finite(finding, "grad_norm")
    if len(norms) < 4:
        return False
    usual = sorted(norms)[len(norms) // 2]
    return max(norms[-3:]) > EXPLODING * usual
