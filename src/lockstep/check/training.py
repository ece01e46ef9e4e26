"""A training workload on one card: the real model, step and data, with the fingerprint of every step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save_file

from lockstep.check.errand import Dump, Errand
from lockstep.check.records import Workload
from lockstep.check.workloads import configuration
from lockstep.contracts import Batch
from lockstep.engine import epochs
from lockstep.engine.build import Plan, make_loader, make_stepper, plan, with_words
from lockstep.engine.prepare import Prepared, prepare
from lockstep.engine.state import trained
from lockstep.engine.step import Pending, Stepper
from lockstep.errors import NonFiniteError
from lockstep.health.prints import GRADIENTS, WEIGHTS, Prints, as_hex
from lockstep.health.records import Stamp
from lockstep.runtime import faults
from lockstep.runtime.group import Group
from lockstep.runtime.host_time import own_seconds
from lockstep.runtime.marks import NoMarks

Named = list[tuple[str, torch.Tensor]]  # each with a tensor of its shape and type


@dataclass(frozen=True)
class Ready:
    """All that a step needs."""

    plan: Plan
    stepper: Stepper
    batches: Sequence[Sequence[Batch]]  # of the first steps, on the device
    facts: dict[str, Any]


def make_ready(
    workload: Workload, errand: Errand, device: torch.device, *, planned_faults: faults.Plan, deterministic: bool = True
) -> Ready:
    """The run that the workload describes, up to its first step."""
    loaded = configuration(workload, errand.data, device=errand.device, deterministic=deterministic)
    planned = plan(loaded, device)
    prepared = prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
    counted, _, _ = epochs.count(planned.config, prepared.train, world=1)
    planned = replace(with_words(planned, prepared), config=counted)
    stepper, built = make_stepper(planned, Group(), NoMarks(), planned_faults=planned_faults)
    facts = {
        "attention": built.attention,
        "compiled": built.compiled,
        "precision": counted.training.precision,
        "parameters": planned.shape.parameters(),
        "data": prepared.key,
    }
    return Ready(planned, stepper, _batches(planned, prepared, workload.batches), facts)


def _batches(planned: Plan, prepared: Prepared, count: int) -> list[list[Batch]]:
    """Of the first steps, made as a run makes them, then kept on the device: no step waits for the host."""
    loader = make_loader(planned, prepared, start_step=0)
    try:
        return [[batch.to(planned.device) for batch in step] for step in itertools.islice(loader, count)]
    finally:
        loader.close()


class KeepingPrints(Prints):
    """Fingerprints, and a copy of one tensor as it was when its fingerprint was taken."""

    dump: Dump | None = None
    kept: torch.Tensor | None = None

    @staticmethod
    def of(stepper: Stepper, *, interval: int, dump: Dump | None = None) -> KeepingPrints:
        """Of all that a stepper trains."""
        live, named = stepper.optimizer.moments(), trained(stepper.model)
        moments = {f"{kind}.{name}": held for name, each in named.items() for kind, held in live[id(each)].items()}
        prints = KeepingPrints(named, moments, interval=interval)
        prints.dump = dump
        return prints

    def of_gradients(self, step: int) -> None:
        super().of_gradients(step)
        kind, name = self._wanted(step)
        if kind == GRADIENTS and name in self.parameters:
            self._keep(self.parameters[name].grad)

    def of_state(self, step: int) -> None:
        super().of_state(step)
        kind, name = self._wanted(step)
        if kind not in ("", GRADIENTS):
            self._keep((self.parameters if kind == WEIGHTS else self.moments).get(name))

    def _wanted(self, step: int) -> tuple[str, str]:
        if self.dump is None or self.dump.step != step:
            return "", ""
        kind, _, name = self.dump.tensor.partition(":")
        return kind, name

    def _keep(self, tensor: torch.Tensor | None) -> None:
        self.kept = None if tensor is None else tensor.detach().clone()


@dataclass(frozen=True)
class Launched:
    """A step in flight."""

    step: int
    pending: Pending
    previous: Pending | None  # None: the card was idle before
    host_seconds: float


class Training:
    """Steps of a real run. `facts` and `chain` are complete after the last stamp."""

    def __init__(
        self, workload: Workload, errand: Errand, device: torch.device, *, planned_faults: faults.Plan | None = None
    ) -> None:
        self.workload, self.errand, self.device = workload, errand, device
        planned_faults = planned_faults or plan_faults(workload, errand)
        ready = make_ready(workload, errand, device, planned_faults=planned_faults)
        self.stepper, self.batches, self.facts = ready.stepper, ready.batches, ready.facts
        dump = errand.dump if errand.dump and errand.dump.workload == workload.name else None
        self.prints = KeepingPrints.of(self.stepper, interval=workload.interval, dump=dump)
        self.stepper.prints = self.prints
        self._seconds, self._of = 0.0, -1  # of the last step that was read

    @property
    def tensors(self) -> Named:
        return self.prints.tensors

    @property
    def chain(self) -> str:
        """All sums, as the card has added them up: the record on the host can be held against it."""
        return self.prints.told_chain()

    def stamps(self) -> Iterator[Stamp]:
        """One a step; each is read while the next one runs. A step that is not finite is the last."""
        self.stepper.rehearse(self.batches[0])
        pulse, busy_since = self.workload.pulse_seconds, time.perf_counter()
        flying: Launched | None = None
        for step in range(steps_of(self.workload, self.errand)):
            launched = self._launch(step, flying.pending if flying else None)
            if flying:
                yield self._read(flying)
            flying = launched
            if pulse and time.perf_counter() - busy_since >= pulse:
                yield self._read(flying)
                flying = None
                time.sleep(pulse)
                busy_since = time.perf_counter()
        if flying:
            yield self._read(flying)
        if self.prints.kept is not None and self.prints.dump:
            write_dump(self.errand, self.prints.dump, self.prints.kept)

    def _launch(self, step: int, previous: Pending | None) -> Launched:
        began = own_seconds()
        if self.stepper.faults.armed:
            self.stepper.faults.at("loader", step, step_seconds=self._seconds, of=self._of)
        pending = self.stepper.launch(step, self.batches[step % len(self.batches)])
        return Launched(step, pending, previous, own_seconds() - began)

    def _read(self, launched: Launched) -> Stamp:
        reading, step = launched.pending.read(), launched.step
        on_card = launched.pending.seconds(launched.previous)
        self._seconds, self._of = launched.host_seconds if on_card is None else on_card, step
        taken = list(self.prints.taken(step))
        sums = as_hex(taken[-1].read()) if taken else ""
        stamp = Stamp(step, reading.loss.hex(), reading.grad_norm.hex(), sums, self._seconds)
        if reading.fatal:
            raise NotFinite(stamp, f"loss {reading.loss}, gradient norm {reading.grad_norm} at step {step}")
        return stamp


class NotFinite(NonFiniteError):
    """A step that ended a workload; its stamp is still to be told."""

    def __init__(self, stamp: Stamp, what: str) -> None:
        super().__init__(what)
        self.stamp = stamp


def steps_of(workload: Workload, errand: Errand) -> int:
    """How many are made this time."""
    return workload.steps if errand.until is None else min(workload.steps, errand.until + 1)


def plan_faults(workload: Workload, errand: Errand) -> faults.Plan:
    """Faults on purpose, of this card and workload."""
    return faults.plan(rank=errand.card.index, workload=workload.name)


def write_dump(errand: Errand, dump: Dump, tensor: torch.Tensor) -> None:
    """The tensor under its own name."""
    about = {"workload": dump.workload, "step": str(dump.step)}
    save_file({dump.tensor: tensor.detach().contiguous().cpu()}, errand.dump_file, metadata=about)
