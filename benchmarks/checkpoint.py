"""How long a save holds up training: ours beside torch.save, DCP's save and its async_save, on the same state.

Usage: python benchmarks/checkpoint.py [--device cuda] [--megabytes 256] [--layers N] [--rounds N] [--out DIR]
[--only "torch.save;dcp.save"] [--anyway]
On the CPU a state of so many megabytes, and the yardstick is a plain copy of it in memory: ours may take 1.2 of that.
All copy into memory that is new to the process: a run has given back that of its last save, and a copy into pages that
malloc kept takes a fifth of the time, whoever makes it.
On CUDA the production shape with its moments, while real steps are made; the limit is 1.5 s, and the stall is what a
block of steps with a save in it takes longer than one without; of ours also with all steps until it is written, which
hashing and writing may slow. torch.save and DCP are called as their manuals say, on state dicts of the same tensors; a
save of theirs that is asynchronous counts until it gives control back, with a pinned stager (its second save, as ours
has its memory by then too) until the copy is made, for which the next update waits. One checkpoint lies on the disk at
a time, and one is on its way. The exit code is 1 when ours is over its limit.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import busy
import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot, needed_bytes
from lockstep.runtime.marks import NoMarks

CPU_LIMIT, CUDA_LIMIT_SECONDS = 1.2, 1.5
WARM_STEPS, STEPS = 3, 4  # of a block
THEIRS = "torch.save;dcp.save;dcp.async_save;dcp.async_save, pinned"


class Ways:
    """Each way to save, as a call that returns when training may go on, and one that waits for the rest."""

    def __init__(self, state: State, folder: Path, device: torch.device) -> None:
        self.state, self.folder = state, folder
        self.saver = Saver(Checkpointer(folder / "ours", keep_last=1), Snapshot(device))
        self.step = 0
        self.pending: Any = None
        self.stager: DefaultStager | None = None
        self.copy: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        return {**self.state.model, **self.state.optimizer}

    def plain_copy(self) -> None:
        """What no save that lets training go on can do without."""
        self.copy = {name: tensor.clone() for name, tensor in self.tensors().items()}

    def ours(self) -> None:
        self.step += 1
        self.saver.begin(self.step, self.state)

    def ours_waited(self) -> None:
        self.ours()
        self.saver.land(NoMarks())

    def torch_save(self) -> None:
        torch.save(self.tensors(), self.folder / "state.pt")

    def dcp_save(self) -> None:
        dcp.save(self.tensors(), checkpoint_id=self.folder / "dcp", no_dist=True)

    def dcp_async(self) -> None:
        self.pending = dcp.async_save(self.tensors(), checkpoint_id=self.folder / "dcp", no_dist=True)

    def dcp_pinned(self) -> None:
        self.stager = self.stager or DefaultStager(StagingOptions(use_shared_memory=False))
        where = self.folder / "dcp"
        self.pending = dcp.async_save(self.tensors(), checkpoint_id=where, no_dist=True, async_stager=self.stager)

    def before_change(self) -> None:
        """Weights may not change while they are copied."""
        self.saver.snapshot.before_change()
        if isinstance(self.pending, dcp.AsyncSaveResponse):
            self.pending.staging_completion.result()

    def finish(self) -> None:
        """Wait for what is on its way, and make room for the next one."""
        self.saver.land(NoMarks())
        if isinstance(self.pending, dcp.AsyncSaveResponse):
            self.pending.upload_completion.result()
        elif self.pending is not None:
            self.pending.result()
        self.pending, self.copy = None, {}
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what a save has used goes back to the system: so for the others
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def all(self) -> Mapping[str, Callable[[], None]]:
        return {
            "plain copy": self.plain_copy,
            "ours": self.ours,
            "ours, waited for": self.ours_waited,
            "torch.save": self.torch_save,
            "dcp.save": self.dcp_save,
            "dcp.async_save": self.dcp_async,
        }


def small_state(megabytes: int) -> State:
    """Weights and two moments, in tensors of about a layer's sizes."""
    count, rows = max(1, megabytes // 12), 1024
    model = {f"layer.{index}": torch.randn(rows, 1024) for index in range(count)}
    moments = {f"{kind}.{name}": torch.randn(rows, 1024) for kind in ("first", "second") for name in model}
    return State(model, moments, {"step": 0})


def on_cpu(arguments: argparse.Namespace, folder: Path) -> int:
    ways = Ways(small_state(arguments.megabytes), folder, torch.device("cpu"))
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways.all()}
    for _ in range(arguments.rounds + 1):  # the first one warms up
        for name, save in ways.all().items():
            since, worked = time.perf_counter(), time.thread_time()
            save()
            took[name].append((time.perf_counter() - since, time.thread_time() - worked))
            ways.finish()
    print(f"state of {needed_bytes(ways.state) / 2**20:.0f} MiB on the CPU; the best of {arguments.rounds} rounds")
    best = {name: min(wall for wall, _ in each[1:]) for name, each in took.items()}
    for name, wall in best.items():
        worked = min(cpu for _, cpu in took[name][1:])
        print(f"  {name:18} {wall * 1e3:8.1f} ms ({worked * 1e3:.1f} of them work of the thread that trains)", end="")
        print(f"  {wall / best['plain copy']:6.2f} plain copies")
    return verdict(best["ours"] / best["plain copy"], arguments.limit or CPU_LIMIT, "plain copies")


class Training:
    """Real steps at the production shape, and what a save among them costs."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from lockstep.check.errand import Errand
        from lockstep.check.records import Card, Workload
        from lockstep.check.training import make_ready
        from lockstep.check.workloads import prepare_all
        from lockstep.runtime import faults

        settings = {"training.batch_size": arguments.batch, "training.precision": "bf16", "training.grad_accum_nums": 1}
        settings |= {"model.num_layers": arguments.layers} if arguments.layers else {}
        workload = Workload("saves", preset=arguments.preset, settings=settings, steps=1_000_000)
        prepare_all([workload], folder / "data")
        errand = Errand(Card(0, 0), arguments.device, (workload,), folder, data=folder / "data")
        self.device = torch.device(arguments.device)
        ready = make_ready(workload, errand, self.device, planned_faults=faults.Plan(), deterministic=False)
        self.stepper, self.batches, self.step = ready.stepper, ready.batches, 0
        self.stepper.rehearse(self.batches[0])

    def state(self) -> State:
        from lockstep.engine.progress import Progress
        from lockstep.engine.state import capture

        return capture(self.stepper, Progress(step=self.step), {})

    def block(
        self, save: Callable[[], None] | None, steps: int = STEPS, written: Callable[[], bool] = lambda: True
    ) -> tuple[float, int]:
        """Seconds of a few steps, with a save after the first of them and more until it is written; how many."""
        self._wait()
        since, number, before = time.perf_counter(), -1, None
        while (number := number + 1) < steps or not written():
            launched = self.stepper.launch(self.step, self.batches[self.step % len(self.batches)])
            if before:
                before.read()  # one step behind, as in a run
            before = launched
            self.step += 1
            if save and number == 0:
                self._wait()  # the loop settles a step before it saves
                save()
        self._wait()
        return time.perf_counter() - since, number

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def stall_of(training: Training, ways: Ways, name: str, save: Callable[[], None]) -> float:
    """Seconds that steps with a save among them take longer, said in a line."""
    if name.endswith("pinned"):
        training.block(save)  # takes its memory
        ways.finish()
    plain, steps = training.block(None)
    seconds, _ = training.block(save)
    print(f"  {name:22} {seconds - plain:8.2f} s ({steps} steps take {plain:.2f} s)", flush=True)
    ways.finish()
    return seconds - plain


def in_training(arguments: argparse.Namespace, folder: Path) -> int:
    training = Training(arguments, folder)
    training.block(None, WARM_STEPS)
    ways = Ways(training.state(), folder / "saves", training.device)
    (folder / "saves").mkdir()
    training.stepper.before_change = ways.before_change
    size = needed_bytes(ways.state)
    ways.saver.make_room(ways.state, ranks=1)
    since = time.perf_counter()
    while ways.saver.snapshot.is_pinning:
        training.block(None, 1)
    took = time.perf_counter() - since
    print(f"memory for a copy is pinned after {took:.1f} s of training; a save before that waits for it")
    print(f"state of {size / 1e9:.1f} GB on {training.device}; stall of a save, each beside the same steps without")
    ways_of = {**ways.all(), "dcp.async_save, pinned": ways.dcp_pinned}
    theirs = [name for name in arguments.only.split(";") if training.device.type == "cuda" or "pinned" not in name]
    ours: list[float] = []
    for name in ["ours"] * arguments.rounds + theirs:  # theirs take minutes
        try:
            stall = stall_of(training, ways, name, ways_of[name])
        except (Exception, CheckpointException) as error:  # what is DCP's own is no Exception
            if name == "ours":
                raise
            print(f"  {name:22} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            ways.pending = None
            ways.finish()
        else:
            ours += [stall] if name == "ours" else []
    seconds, steps = training.block(ways.ours, written=lambda: ways.saver.ended == ways.saver.begun)
    slower = seconds - steps * training.block(None)[0] / STEPS
    print(f"  {'ours, until written':22} {slower:8.2f} s ({steps} steps take {seconds:.2f} s with it)")
    ways.finish()
    return verdict(statistics.median(ours), arguments.limit or CUDA_LIMIT_SECONDS, "s")


def verdict(stall: float, limit: float, unit: str) -> int:
    print(f"{'ok' if stall <= limit else 'TOO SLOW'}: a save stalls {stall:.2f} {unit}, limit {limit:g} {unit}")
    return int(stall > limit)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--training", action="store_true", help="on the CPU too: real steps, as on CUDA")
    parser.add_argument("--preset", default="production")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the preset has")
    parser.add_argument("--rounds", type=int, default=0, help="of our saves: 8, beside real steps 3")
    parser.add_argument("--limit", type=float, default=0.0)
    parser.add_argument("--only", default=THEIRS, help="rows of theirs beside real steps, with semicolons")
    parser.add_argument("--out", type=Path, default=None, help="a folder on the disk to save to")
    busy.add_anyway(parser)
    arguments = parser.parse_args()
    busy.ensure_quiet(parser, arguments, [0] if arguments.device == "cuda" else [])
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        beside_steps = arguments.device == "cuda" or arguments.training
        arguments.rounds = arguments.rounds or (3 if beside_steps else 8)
        if beside_steps:
            return in_training(arguments, Path(folder))
        return on_cpu(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
