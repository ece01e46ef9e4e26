"""What the ranks of the data-parallel tests do: real training of a small model, rightly and, as a control, wrongly."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lockstep.contracts import Batch, Draw, Rows, StepRecord
from lockstep.engine.council import Agreed, Council
from lockstep.engine.parts import Parts
from lockstep.errors import LockstepError
from lockstep.objectives.causal import Causal, expanded
from lockstep.runtime.group import Group
from lockstep.runtime.reduce import Reducer
from lockstep.runtime.signals import StopRequest
from tests.gates.training import FEW_WORDS, Recorder, run

IGNORE = -100
ROWS = 12  # of a global batch: divided by 1, 2, 3 and 4 ranks
SMALL: dict[str, Any] = {
    "model.vocab_size": 300,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
    "model.intermediate_size": 24,
    "training.context_length": 8,
    "training.eval_interval": 0,
    "training.eval_batches": 3,
    "training.save_interval": 0,
    "training.max_steps": 50,
    "training.learning_rate": 1e-2,
    "training.schedule": "constant",  # a shorter run is the beginning of a longer one
    "data.num_workers": 0,
    "data.data_path": FEW_WORDS,  # so few rows that 50 steps walk over them several times
}
EVERYTHING: dict[str, Any] = {
    "training.batch_size": 1,
    "training.max_grad_norm": 0.5,
    "training.weight_decay": 0.1,
    "model.dropout": 0.1,
    "system.gradient_checkpointing": True,
    "data.num_workers": 1,
}


class Odd(Causal):
    """Rows with different numbers of targets; the first third of a global batch has none at all."""

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        batch = super().collate(rows, draw)
        targets = expanded(batch)["targets"].clone()
        for row, slot in enumerate(rows.slots.tolist()):
            targets[row, slot % 7 + 1 :] = IGNORE
            if slot < draw.batch_rows // 3:
                targets[row] = IGNORE
        count = int((targets != IGNORE).sum())
        return Batch({**expanded(batch), "targets": targets}, {"loss": count}, rows=batch.rows, tokens=batch.tokens)


@dataclass(frozen=True)
class Trained:
    """What training led to, in numbers that can travel between processes."""

    numbers: list[tuple[float, float, int]]  # loss, gradient norm and tokens of each step
    validation: dict[str, float]
    weights: Any


def train(group: Group, folder: Path, settings: Mapping[str, Any], odd: bool = False, mistake: str = "") -> Trained:
    """Train with a global batch of ROWS rows, whatever the number of ranks."""
    rows = int(settings.get("training.batch_size", ROWS // group.world))
    share = {"training.batch_size": rows, "training.grad_accum_nums": ROWS // rows // group.world}
    with _mistaken(mistake):
        parts, recorder = run(folder, {**SMALL, **settings, **share}, group=group, objective=Odd() if odd else None)
    parameters = [parameter.detach().double().flatten().numpy() for parameter in parts.stepper.model.parameters()]
    measures = {name: value for kind, fields in recorder.events if kind == "eval" for name, value in fields.items()}
    numbers = [(record.loss, record.grad_norm, record.tokens) for record in recorder.records]
    return Trained(numbers, measures, np.concatenate(parameters))


@contextlib.contextmanager
def _mistaken(kind: str) -> Iterator[None]:
    """What other trainers do: each rank divides by its own weight, and gradients are summed or averaged."""
    finish = Reducer.finish

    def average(self: Reducer) -> None:
        finish(self)
        for bucket in self.buckets:
            bucket.flat /= self.group.world

    agree = Council.agree

    def alone(self: Council, batches: Sequence[Batch]) -> Agreed:
        agreed = agree(self, batches)
        self.agreed = Agreed(self._weights(batches), agreed.tokens)
        return self.agreed

    patches = {"local weights": [(Council, "agree", alone)], "average": [(Reducer, "finish", average)]}
    patches["average of local means"] = [*patches["local weights"], *patches["average"]]
    with contextlib.ExitStack() as stack:
        for owner, name, new in patches[kind] if kind else ():
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


class Watching(Recorder):
    """A sink that acts when a step is written: here, on one rank, a signal arrives."""

    def __init__(self, stop: StopRequest, *, at: int, heard: signal.Signals | None) -> None:
        super().__init__()
        self.stop, self.at, self.heard = stop, at, heard

    def write(self, record: StepRecord) -> None:
        super().write(record)
        if record.step == self.at and self.heard:
            self.stop.signal = self.heard


@dataclass(frozen=True)
class Ended:
    """How a rank's run ended."""

    kind: str
    words: str
    code: int
    step: int
    losses: list[float]
    digest: str


def end(group: Group, folder: Path, settings: Mapping[str, Any], heard: Mapping[int, int] | None = None) -> Ended:
    """Train until something ends it; `heard`: rank -> the signal that reaches it after step 3."""
    stop = StopRequest()
    stop.patient = True
    number = (heard or {}).get(group.rank)
    recorder = Watching(stop, at=3, heard=signal.Signals(number) if number else None)
    share = {"training.batch_size": 1, "training.grad_accum_nums": 2}
    kind, words, code = "", "", 0
    try:
        run(folder, {**SMALL, **share, **settings}, group=group, stop=stop, recorder=recorder)
    except LockstepError as error:
        kind, words, code = type(error).__name__, str(error), int(error.exit_code)
    parts = recorder.parts
    assert isinstance(parts, Parts)
    from lockstep.health.fingerprint import digest_model

    digest = digest_model(parts.stepper.model.named_parameters())
    return Ended(kind, words, code, parts.progress.step, [record.loss for record in recorder.records], digest)
