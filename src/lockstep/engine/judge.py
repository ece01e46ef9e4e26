"""Whether a step may count: NaN, Inf and an fp16 scale that finds no footing end the run, with a report of where."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence

from lockstep.contracts import Batch, StepRecord
from lockstep.engine import autopsy, evidence
from lockstep.engine.autopsy import BadStep
from lockstep.engine.parts import Parts
from lockstep.engine.step import Reading
from lockstep.errors import NonFiniteError
from lockstep.health import words
from lockstep.health.finding import Finding, from_json
from lockstep.runtime.group import is_lost_peer

logger = logging.getLogger(__name__)

MAX_OVERFLOWS_IN_A_ROW = 20


def judge(
    parts: Parts, record: StepRecord, reading: Reading, batches: Sequence[Batch], weights: Mapping[str, int]
) -> None:
    """Stop the run on NaN, on Inf, and on an fp16 scale that finds no footing. All ranks come to the same end."""
    if reading.fatal:
        known = {"loss": record.loss, "gradient norm": record.grad_norm, "a weight": reading.weights}
        name, value = next((name, value) for name, value in known.items() if not math.isfinite(value))
        what = f"{name} is {value}{{whose}}; {{first}}the weights before this step are kept"
        wider = "" if parts.config.training.precision == "fp32" else ", or use --precision fp32"
        hint = f"lower training.learning_rate or model.init_std{wider}"
    elif parts.progress.overflow_run >= MAX_OVERFLOWS_IN_A_ROW or record.loss_scale < 1:
        count = f"{parts.progress.overflow_run} times in a row"
        what = f"fp16 overflowed {count} (loss scale {record.loss_scale:g}){{whose}}; {{first}}no weight was changed"
        hint = "--precision bf16 or fp32"
    else:
        return
    bad = BadStep(record, reading, batches, weights)
    finding = _look(parts, bad)
    error = NonFiniteError(what, where=f"step {record.step}", hint=hint)
    if finding:
        _tell(parts, bad, finding, error)
    error.what = what.format(whose=_whose(parts, finding, reading), first=_first(error))
    raise error


def warn(parts: Parts, record: StepRecord) -> None:
    """Remember the step, and say so if its loss or gradient norm is far above the usual."""
    parts.history.append(
        {"step": float(record.step), "loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr,
         "loss_scale": record.loss_scale}
    )  # fmt: skip
    for line in () if record.skipped else parts.spikes.note(record.step, record.loss, record.grad_norm):
        parts.tell("spike", step=record.step, text=line, count=parts.spikes.count)
        if parts.council.group.rank == 0:
            logger.warning("%s", line)


def _look(parts: Parts, bad: BadStep) -> Finding | None:
    """What can be found out. Whatever fails here must not hide that the step was bad."""
    try:
        return autopsy.examine(parts, bad)
    except Exception as failure:
        if is_lost_peer(failure):
            raise
        said = f"{type(failure).__name__}: {str(failure)[:200]}"
        logger.error("Looking for the place failed: %s", said)
        return autopsy.without_looking(parts, bad, said) if parts.council.alone else None


def _whose(parts: Parts, finding: Finding | None, reading: Reading) -> str:
    """On which ranks it began."""
    if parts.council.alone:
        return ""
    if finding is None:
        return " on this rank" if not math.isfinite(reading.own_loss) else ""
    return f" on rank {', '.join(map(str, finding.ranks))}" if finding.ranks else ""


def _first(error: NonFiniteError) -> str:
    """Where it began, if that was found out."""
    finding = from_json(error.finding) if error.finding else None
    if finding and finding.place:
        return f"first in {finding.place.brief()}; "
    return f"{words.SUSPECT}; " if finding and not finding.reproduced else ""


def _tell(parts: Parts, bad: BadStep, finding: Finding, error: NonFiniteError) -> None:
    """Keep the evidence, print the report, and let the error know both. The first guilty rank speaks for all."""
    finding, error.kept = evidence.keep(parts, bad, finding)
    speaks = finding.guilty or (not finding.ranks and finding.rank == 0)
    told = parts.council.group.gather(finding.as_json() if speaks else None)
    first = from_json(next((each for each in told if each), finding.as_json()))
    if finding.guilty or (finding.rank == 0 and not _is_shown(parts, first.rank)):
        for line in words.report(finding if finding.guilty else first):
            logger.error("%s", line)
    error.finding, error.elsewhere = first.as_json(), bool(finding.ranks) and finding.rank != first.rank
    parts.link.enter("backward" if first.place and first.place.phase == "backward" else "forward", finding.step)
    if not first.reproduced:
        error.hint = "lockstep resume goes on from the step before; if it happens again here, the device is to blame"
    if path := first.files.get("bundle"):
        error.hint = f"lockstep replay {shlex.quote(path)}; {error.hint}"


def _is_shown(parts: Parts, rank: int) -> bool:
    """Whether a rank's lines are seen by who looks at the screen."""
    return rank == 0 or parts.config.report.log_all_ranks
