"""How long a run will take, measured before it begins by steps that change nothing."""

from __future__ import annotations

import itertools
import statistics
import time

from lockstep.engine.parts import Parts

PROBES = 3
EVALUATION = 0.4  # of what a micro-batch of training costs: the forward pass


def estimate(parts: Parts) -> None:
    """Tell it, after a rehearsal has warmed everything up. Only of runs in epochs; all ranks call it."""
    epochs, done = parts.epochs, parts.progress.step
    if epochs is None or not (left := parts.steps_left(done)):
        return
    taken = [_probe(parts) for _ in range(PROBES)]
    step_seconds = statistics.median(taken)
    interval = parts.config.training.eval_interval
    validations = epochs.count - epochs.finished_after(done) + (left // interval if interval else 0)
    micro_seconds = step_seconds / parts.config.training.grad_accum_nums
    seconds = left * step_seconds + validations * len(parts.validation) * EVALUATION * micro_seconds
    parts.tell(
        "estimate",
        step=done,
        seconds=seconds,
        step_seconds=step_seconds,
        steps=left,
        max_steps=done + left,
        epochs=epochs.count,
        epoch_steps=epochs.epoch_steps,
    )


def _probe(parts: Parts) -> float:
    """Seconds of the first step, which is then still to be made."""
    first = parts.council.fetch(parts.batches, parts.stop)
    parts.batches = itertools.chain([first], parts.batches)
    began = time.perf_counter()
    parts.stepper.rehearse(first)
    return time.perf_counter() - began
