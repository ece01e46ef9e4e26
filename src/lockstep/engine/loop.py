"""The training loop. One step is always in flight: its numbers are read after the next one was launched."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.contracts import Batch, StepRecord
from lockstep.engine import drift
from lockstep.engine.judge import judge, warn
from lockstep.engine.milestones import (
    due,
    end_epoch,
    land,
    prepare_saves,
    reopen,
    save,
    validate,
    walk,
    walks_after,
    write_results,
)
from lockstep.engine.parts import Parts
from lockstep.engine.state import digest
from lockstep.engine.step import Pending
from lockstep.engine.timing import Clock, profiling
from lockstep.runtime.hardware import peak_memory_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """A step on its way."""

    step: int
    tokens: int  # of all ranks
    weights: Mapping[str, int]  # of all ranks: what its loss is a mean over
    pending: Pending
    host_seconds: float  # without waiting for other ranks
    data_seconds: float  # until its rows were there, and those of the next one
    batches: Sequence[Batch]  # of this rank, kept until the step is judged


def run(parts: Parts) -> None:
    """Train from parts.progress.step to the end, or until told to stop."""
    flying: Launched | None = None
    begin = parts.progress.step
    if parts.has_ended:
        return
    reopen(parts)
    clock = Clock()
    left, window = parts.steps_left(begin), parts.config.report.traced
    tracing = profiling(parts.trace_file, window, begin=begin, steps_left=left, tell=parts.tell)
    prepare_saves(parts)
    with tracing as profiler:
        for step in range(begin, parts.config.training.max_steps):
            try:
                launched = launch(parts, step)
            except (Exception, SystemExit):
                if flying and not parts.stepper.updating:
                    settle(parts, flying, clock, marked=False)  # its update has taken effect: it counts
                raise
            landed, flying = flying, launched
            if landed:
                settle(parts, landed, clock)
            if must_look(parts, step):
                settle(parts, flying, clock)
                flying = None
                if attend(parts, step):
                    return
                clock.restart()
            profiler.step()


def launch(parts: Parts, step: int) -> Launched:
    """Fetch the step's rows and queue it on the device; then look one step ahead."""
    began, council, link = time.perf_counter(), parts.council, parts.link
    link.enter("data", step)
    if parts.faults.armed:
        if parts.device.type == "cuda" and parts.last:  # by the GPU's clock, of the last step that has ended
            parts.faults.at("loader", step, step_seconds=parts.last.seconds, of=parts.last.step)
        else:
            parts.faults.at("loader", step, step_seconds=parts.pace.own)
    if due(step, parts.config.system.empty_cache_interval) and parts.device.type == "cuda":
        torch.cuda.empty_cache()
    batches = council.fetch(parts.batches, parts.stop)
    waited = time.perf_counter() - began
    pending = parts.stepper.launch(step, batches)
    agreed = council.agreed
    if agreed.stop:
        parts.stop.signal, parts.stopping = agreed.stop, True
    if not parts.is_over(step + 1) and not parts.stopping:
        link.enter("data")
        since = time.perf_counter()
        council.look_ahead(parts.batches, parts.stop, saves=parts.saver.ended)
        waited += time.perf_counter() - since
    parts.pace.own = time.perf_counter() - began - parts.stepper.waited_seconds
    return Launched(step, agreed.tokens, agreed.weights, pending, parts.pace.own, waited, batches)


def must_look(parts: Parts, step: int) -> bool:
    """Whether this step's numbers are needed before the next step may start."""
    config, done = parts.config, step + 1
    return (
        config.debug.enabled
        or parts.must_stop()
        or parts.has_saved()
        or parts.is_over(done)
        or parts.ends_epoch(done)
        or due(done, config.training.save_interval)
        or due(done, config.training.eval_interval)
        or walks_after(parts, done)
        or due(done, config.debug.digest_interval)
        or drift.is_due(parts, done)
        or 0 < config.training.patience <= parts.progress.stale_steps + 2
    )


def attend(parts: Parts, step: int) -> bool:
    """What is due after a settled step: validation, saving, stopping. True when training is over."""
    options, done = parts.config.training, step + 1
    over = parts.is_over(done) or parts.is_stale
    milestone = over or parts.ends_epoch(done)
    if parts.has_saved():
        land(parts)
    if drift.is_due(parts, done):
        drift.check(parts)
    if milestone or (due(done, options.eval_interval) and not parts.stopping):
        validate(parts)
    if over or (walks_after(parts, done) and not parts.stopping):
        walk(parts)
    if milestone:
        end_epoch(parts)
    if milestone or parts.must_stop() or due(done, options.save_interval):
        name = "interrupted" if parts.stopping and not over else f"step_{done}"
        save(parts, name, aside=not over and not parts.stopping)
    if milestone:
        write_results(parts)
    if parts.is_stale:
        logger.info(
            "Early stopping triggered: smoothed loss %.4f has not improved by %g for %d steps",
            parts.progress.smoothed_loss, options.min_delta, parts.progress.stale_steps,
        )  # fmt: skip
    if parts.stopping and not over:
        raise parts.stop.error()
    return over


def settle(parts: Parts, launched: Launched, clock: Clock, *, marked: bool = True) -> None:
    """Wait for a step, judge it, and report it. Not marked: the section stays the one in which something failed."""
    if marked and not parts.council.alone:
        parts.link.enter("communication")  # whoever is behind, the wait for its gradients is in here
    reading = launched.pending.read()
    parts.link.busy(launched.step, launched.pending.own_seconds() or launched.host_seconds)
    seconds = clock.lap(launched.pending)
    progress, config = parts.progress, parts.config
    if parts.stamps:
        parts.stamps.note(launched.step, reading, seconds)
    if not reading.fatal:
        delta, targets = config.training.min_delta, sum(launched.weights.values())
        progress.note(reading.loss, launched.tokens, overflow=reading.overflow, min_delta=delta, targets=targets)
    parts.pace.note(reading.loss, launched.tokens, seconds, data=launched.data_seconds)
    digest_due = due(progress.step, config.debug.digest_interval)
    flops = launched.tokens * parts.flops_per_token / seconds
    parts.last = StepRecord(
        step=launched.step,
        loss=reading.loss,
        grad_norm=reading.grad_norm,
        lr=reading.lr,
        seconds=seconds,
        tokens=launched.tokens,
        memory_bytes=peak_memory_bytes(parts.device),
        skipped=reading.overflow,
        loss_scale=reading.loss_scale,
        digest=digest(parts.stepper.model) if digest_due else "",
        eta_seconds=parts.steps_left(progress.step) * parts.pace.recent,
        mfu=flops / parts.peak_flops if parts.peak_flops else None,
        measures=reading.measures,
    )
    for sink in parts.sinks:
        sink.write(parts.last)
    warn(parts, parts.last)
    judge(parts, parts.last, reading, launched.batches, launched.weights)
