"""What it costs to know whether a step is finite, and how long it takes to find where it was not.

One run, step for step: the loop as it is beside the same loop without finite flags, the look at the weights, the gate
of the optimizer (on a GPU a kernel reads it with other numbers, and so does the control's) and the early warnings.
Blocks of both alternate; the figure is the median of the ratios of neighbours.
CPU: the shape of loop.py (2 layers, width 64, 4 x 64 tokens), CPU time. Then two weights of the last layer are made so
large that their products overflow, and the search for the place is timed.
Usage: python benchmarks/forensics.py [--device cpu|cuda] [--preset tiny|production] [--layers N] [--rounds N]
[--steps N] [--limit PERCENT] [--anyway]
The exit code is 1 when detection costs more than the limit, or the place is not found.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import busy
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch, StepRecord
from lockstep.engine import autopsy, loop
from lockstep.engine.autopsy import BadStep
from lockstep.engine.build import assemble, plan
from lockstep.engine.optimizer import AdamW
from lockstep.engine.parts import Parts
from lockstep.engine.step import NORM_EPSILON, Pending, Reading, Stepper, mark
from lockstep.engine.timing import Clock
from lockstep.engine.train import rehearse
from lockstep.rundir import RunDir
from lockstep.runtime import determinism
from lockstep.runtime.hardware import device_name
from lockstep.runtime.signals import StopRequest

LIMITS = {"cpu": 2.0, "cuda": 0.5}  # percent of a step
SETTINGS: dict[str, dict[str, object]] = {
    "tiny": {"training.batch_size": 4, "training.context_length": 64, "training.grad_accum_nums": 1,
             "training.learning_rate": 1e-3},
    "production": {"training.batch_size": 4, "training.grad_accum_nums": 1},  # what is timed elsewhere too
}  # fmt: skip
QUIET: dict[str, object] = {
    "data.dataset_name": "synthetic", "data.num_workers": 0, "training.eval_interval": 0, "training.eval_batches": 1,
    "training.save_interval": 0, "report.sample_prompt": "", "system.threads": 1,
}  # fmt: skip
WARM_UP_STEPS = 8
LARGE = 1e30  # a weight; two of them multiplied are beyond bf16 and fp32


class Careless(Stepper):
    """The control: the same step by somebody who does not want to know. Clips as before, updates in any case."""

    def launch(self, step: int, batches: Sequence[Batch]) -> Pending:
        weights = self.agree(batches)
        began = mark(self.device)
        loss = self.accumulate(step, batches, weights)
        computed = mark(self.device)
        return Unjudged(self.update(step, self.sum_up(loss)), began, computed)

    def update(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        del step  # only faults would ask
        norm = self.exchange.norm(self.parameters)
        optimizer = self.optimizer
        optimizer.lr.copy_(self.rates.take(torch.minimum(optimizer.applied, self.last_rate).long()))
        divisor = self.one
        if self.max_norm > 0:
            divisor = torch.clamp((norm + NORM_EPSILON) / self.max_norm, min=1.0)
        if optimizer.has_kernel:  # whose gate is a number that it reads with others: there is none without
            optimizer.step(divisor, self.zero)
        else:
            update_in_any_case(optimizer, divisor)
        return torch.stack([loss, norm, optimizer.lr])


class Unjudged(Pending):
    """Three numbers for the log, and no flags."""

    def read(self) -> Reading:
        if self.ended:
            self.ended.synchronize()
        loss, norm, lr = self.values.tolist()
        return Reading(loss, loss, norm, norm, lr, fatal=False, overflow=False, loss_scale=1.0)


@torch.no_grad()
def update_in_any_case(optimizer: AdamW, divisor: torch.Tensor) -> None:
    """AdamW.step without its gate, on the same state."""
    options = optimizer.options
    optimizer.applied += 1
    for group in optimizer.groups:
        parameters: list[Any] = group.parameters
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            parameters,
            [parameter.grad for parameter in parameters],
            group.exp_avgs,
            group.exp_avg_sqs,
            [],
            [optimizer.applied] * len(parameters),
            lr=optimizer.lr,
            beta1=options.adam_beta1,
            beta2=options.adam_beta2,
            weight_decay=group.weight_decay,
            eps=options.adam_epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=None,
        )


class Figures(NamedTuple):
    """Milliseconds of a step, and the ratios of neighbouring blocks: their median, and where half of them lie."""

    on_ms: float
    off_ms: float
    ratio: float
    low: float
    high: float

    @property
    def percent(self) -> float:
        return 100 * (self.ratio - 1)


@contextlib.contextmanager
def assembled(options: argparse.Namespace, folder: Path) -> Iterator[Parts]:
    """A run, rehearsed and ready for its first step."""
    device = torch.device(options.device)
    steps = WARM_UP_STEPS + 2 * options.rounds * options.steps + 8
    settings = {
        **QUIET, **SETTINGS[options.preset], "training.max_steps": steps, "system.device": options.device,
        "data.cache_dir": str(folder / "cache"), **({"model.num_layers": options.layers} if options.layers else {}),
    }  # fmt: skip
    loaded = load("llama", preset=options.preset, flags=[(key, str(value)) for key, value in settings.items()])
    with determinism.mode(device, deterministic=False, threads=1):
        planned = plan(loaded, device)
        made = assemble(planned, RunDir(folder / "run"), point=None, sinks=[], stop=StopRequest())
        try:
            rehearse(made.parts, planned)
            yield made.parts
        finally:
            made.loader.close()


@contextlib.contextmanager
def careless(parts: Parts) -> Iterator[None]:
    """While this lasts, nobody looks at what the loop computes."""
    real, judge, warn = parts.stepper, loop.judge, loop.warn
    twin = copy.copy(real)  # the same model, optimizer and state
    twin.__class__ = Careless
    parts.stepper, loop.judge, loop.warn = twin, _nobody, _nobody
    try:
        yield
    finally:
        parts.stepper, loop.judge, loop.warn = real, judge, warn


def _nobody(*_: object) -> None:
    """Neither judges nor warns."""


def train(parts: Parts, steps: int) -> None:
    """So many steps as the loop makes them, one in flight; ends when the last is done."""
    flying, clock = None, Clock()
    for step in range(parts.progress.step, parts.progress.step + steps):
        launched = loop.launch(parts, step)
        if flying:
            loop.settle(parts, flying, clock)
        flying = launched
    if flying:
        loop.settle(parts, flying, clock)


def compare(parts: Parts, *, rounds: int, steps: int, seconds: Callable[[], float]) -> Figures:
    """Blocks with and without detection; who is first changes from round to round."""

    def block(around: contextlib.AbstractContextManager[None]) -> float:
        with around:
            since = seconds()
            train(parts, steps)
            return 1e3 * (seconds() - since) / steps

    for around in (contextlib.nullcontext(), careless(parts)):  # first calls are nobody's step
        with around:
            train(parts, WARM_UP_STEPS // 2)
    on: list[float] = []
    off: list[float] = []
    for number in range(rounds):
        if number % 2:
            off.append(block(careless(parts)))
        on.append(block(contextlib.nullcontext()))
        if not number % 2:
            off.append(block(careless(parts)))
    ratios = [one / other for one, other in zip(on, off, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    return Figures(statistics.median(on), statistics.median(off), middle, low, high)


def search(parts: Parts) -> tuple[float, str, str]:
    """Seconds until the place of an overflow is known, what it is called, and what it must be called."""
    model: Any = parts.stepper.model
    last, expected = model.layers[-1].mlp, f"layers.{len(model.layers) - 1}.mlp (forward, mul"
    with torch.no_grad():
        for linear in (last.w1, last.w3):
            linear.weight[0] = LARGE  # a whole row: whatever the sign of what it meets, some products overflow
    launched = loop.launch(parts, parts.progress.step)
    reading = launched.pending.read()
    if not reading.fatal:
        return 0.0, "nowhere: the step was finite", expected
    record = StepRecord(launched.step, reading.loss, reading.grad_norm, reading.lr, seconds=0.0, tokens=launched.tokens)
    since = time.perf_counter()
    found = autopsy.examine(parts, BadStep(record, reading, launched.batches, launched.weights))
    return time.perf_counter() - since, found.place.text() if found.place else "nowhere", expected


def verdict(percent: float, limit: float, place: str, expected: str) -> int:
    """Say whether the limit is kept and the place found; the exit code."""
    cheap, found = percent <= limit, place.startswith(expected)
    print(f"{'ok' if cheap else 'TOO SLOW'}: detection costs {percent:+.2f} % of a step, limit {limit:g} %")
    if not found:
        print(f"NOT FOUND: expected {expected}")
    return 0 if cheap and found else 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(LIMITS), default="cpu")
    parser.add_argument("--preset", choices=sorted(SETTINGS), default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--rounds", type=int, help="pairs of blocks")
    parser.add_argument("--steps", type=int, help="of a block")
    parser.add_argument("--limit", type=float, metavar="PERCENT")
    busy.add_anyway(parser)
    options = parser.parse_args(arguments)
    busy.ensure_quiet(parser, options, [0] if options.device == "cuda" else [])
    small = options.preset == "tiny"
    options.rounds, options.steps = options.rounds or (1500 if small else 20), options.steps or (1 if small else 2)
    limit = LIMITS[options.device] if options.limit is None else options.limit
    on_cpu = options.device == "cpu"
    with tempfile.TemporaryDirectory() as folder, assembled(options, Path(folder)) as parts:
        clock = time.process_time if on_cpu else time.perf_counter
        figures = compare(parts, rounds=options.rounds, steps=options.steps, seconds=clock)
        searched, place, expected = search(parts)
    load_average, kind = os.getloadavg()[0], "ms CPU" if on_cpu else "ms"
    print(f"{device_name(torch.device(options.device))}, torch {torch.__version__}, load {load_average:.1f}")
    print(f"{options.preset}: {options.rounds} rounds of 2 x {options.steps} steps")
    print(f"detection on  {figures.on_ms:10.3f} {kind} a step")
    print(f"detection off {figures.off_ms:10.3f} {kind} a step")
    print(f"ratio         {figures.ratio:10.4f}, half of them {figures.low:.4f} to {figures.high:.4f}")
    print(f"search        {searched:10.3f} s: {place}")
    return verdict(figures.percent, limit, place, expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
