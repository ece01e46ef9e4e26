"""What fingerprints cost: a step without and with the digest of every gradient, weight and moment, interleaved.

Usage: python benchmarks/prints.py [--device cuda] [--batch 4] [--steps 10] [--rounds 5] [--layers N] [--limit PERCENT]
[--anyway]
On CUDA the production shape in bf16 by the wall clock, on the CPU the tiny preset by CPU time. The cost of comparing
the weights of ranks (debug.agree_interval) is that of their digest alone, over 50 steps; what travels is 32 bytes.
The exit code is 1 when either costs more than its limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import busy
import torch

from lockstep.check.errand import Errand
from lockstep.check.records import Card, Workload
from lockstep.check.training import KeepingPrints, Ready, make_ready
from lockstep.check.workloads import prepare_all
from lockstep.engine.state import trained
from lockstep.health.prints import as_hex, digests
from lockstep.runtime import faults

LIMIT_PERCENT = {"cuda": 3.0, "cpu": 40.0}  # of a step; a tiny model on a CPU is all overhead
AGREE_PERCENT, AGREE_STEPS = 1.0, 50


def made(arguments: argparse.Namespace, folder: Path) -> Ready:
    """The stepper of a real run, with batches in memory."""
    on_cuda = arguments.device == "cuda"
    settings = {"training.batch_size": arguments.batch, "training.precision": "bf16" if on_cuda else "fp32"}
    settings |= {"training.grad_accum_nums": 1} | ({"model.num_layers": arguments.layers} if arguments.layers else {})
    workload = Workload("prints", preset="production" if on_cuda else "tiny", settings=settings, steps=1_000_000)
    prepare_all([workload], folder / "data")
    errand = Errand(Card(0, 0), arguments.device, (workload,), folder, data=folder / "data")
    device = torch.device(arguments.device)
    return make_ready(workload, errand, device, planned_faults=faults.Plan(), deterministic=False)


class Bench:
    """Steps of one stepper, with or without fingerprints."""

    def __init__(self, ready: Ready) -> None:
        self.stepper, self.batches, self.step = ready.stepper, ready.batches, 0
        self.prints = KeepingPrints.of(self.stepper, interval=1)
        self.on_cuda = self.stepper.device.type == "cuda"
        self.stepper.rehearse(self.batches[0])

    def seconds(self, steps: int, *, fingerprints: bool) -> float:
        """Of one step, on average; numbers are read one step behind, as in a run."""
        self.stepper.prints = self.prints if fingerprints else None
        return self.timed(lambda: self._run(steps)) / steps

    def _run(self, steps: int) -> None:
        pending = None
        for _ in range(steps):
            launched = self.stepper.launch(self.step, self.batches[self.step % len(self.batches)])
            if pending:
                pending.read()
                for taken in self.prints.taken(up_to=self.step - 1):
                    as_hex(taken.read())
            pending, self.step = launched, self.step + 1
        assert pending is not None
        pending.read()
        for taken in self.prints.taken():
            as_hex(taken.read())

    def agree_seconds(self) -> float:
        """Of one look at the weights, from an idle device to the digest on the host."""
        weights = list(trained(self.stepper.model).values())
        return self.timed(lambda: as_hex(digests(weights).tolist()))

    def timed(self, action: Callable[[], object]) -> float:
        clock = time.perf_counter if self.on_cuda else time.process_time
        if self.on_cuda:
            torch.cuda.synchronize()
        since = clock()
        action()
        if self.on_cuda:
            torch.cuda.synchronize()
        return clock() - since


def verdict(percent: float, limit: float, what: str) -> int:
    print(f"{'ok' if percent <= limit else 'TOO SLOW'}: {what} {percent:.2f} % of a step, limit {limit:g} %")
    return int(percent > limit)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the preset has")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=0.0, help="percent of a step")
    busy.add_anyway(parser)
    arguments = parser.parse_args()
    busy.ensure_quiet(parser, arguments, [0] if arguments.device == "cuda" else [])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(made(arguments, Path(folder)))
        bench.seconds(3, fingerprints=False)
        bench.seconds(3, fingerprints=True)  # compiles the kernel
        bench.agree_seconds()
        rounds = [
            (bench.seconds(arguments.steps, fingerprints=False), bench.seconds(arguments.steps, fingerprints=True))
            for _ in range(arguments.rounds)
        ]
        agree = statistics.median(bench.agree_seconds() for _ in range(arguments.rounds))
    without, among = (statistics.median(each) for each in zip(*rounds, strict=True))
    more = statistics.median(100 * (watched / plain - 1) for plain, watched in rounds)
    print(f"{arguments.device}: step {without * 1e3:.2f} ms, with fingerprints {among * 1e3:.2f} ms, ", end="")
    print(f"{len(bench.prints.tensors)} tensors; digest of the weights alone {agree * 1e3:.2f} ms")
    slow = verdict(more, arguments.limit or LIMIT_PERCENT[arguments.device], "fingerprints at every step cost")
    shared = 100 * agree / (AGREE_STEPS * without)
    return slow | verdict(shared, AGREE_PERCENT, f"comparing weights every {AGREE_STEPS} steps costs")


if __name__ == "__main__":
    sys.exit(main())
