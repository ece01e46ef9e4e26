"""What canonical sums cost: steps with the plain exchange and with `--canonical`, interleaved, on 1, 2, 4 ranks.

Usage: python benchmarks/canonical.py [--worlds 1,2,4] [--device cuda] [--preset tiny] [--micro-batches 16] [--batch 1]
       [--steps 5] [--rounds 5] [--limit RATIO] [--anyway]
The same global batch on every number of ranks; ranks are processes of this machine, with one thread each on the CPU. On
CUDA one rank alone shows the local part: the blocks that are put aside, their buffers and the norm in float64. The exit
code is 1 when a ratio is above the limit: on the CPU that of CPU time, which a busy machine does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import busy

BLOCKS = 8


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the preset has")
    parser.add_argument("--micro-batches", type=int, default=16, help="of the global batch, a multiple of 8")
    parser.add_argument("--batch", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=0.0, help="the largest ratio that is allowed; 0: any")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    busy.add_anyway(parser)
    asked = parser.parse_args()
    if not asked.rank:
        busy.ensure_quiet(parser, asked, [0] if asked.device == "cuda" else [])
    return asked


class Bench:
    """One rank with two models, one for each exchange, and the batches of some steps in memory."""

    def __init__(self, arguments: argparse.Namespace, group: Any) -> None:
        import torch

        self.arguments, self.group, self.device = arguments, group, torch.device(arguments.device)
        self.steppers, self.step = {}, 0
        for kind in ("true", "canonical"):
            self.steppers[kind], self.batches = self._made(kind)

    def _made(self, deterministic: str) -> tuple[Any, list[Any]]:
        from lockstep.config.load import load
        from lockstep.engine.build import make_loader, make_stepper, plan, with_words
        from lockstep.engine.prepare import prepare
        from lockstep.runtime.marks import NoMarks

        asked, world = self.arguments, self.group.world
        flags: list[tuple[str, str | None]] = [
            ("system.device", asked.device),
            ("system.deterministic", deterministic),
            ("training.batch_size", str(asked.batch)),
            ("training.grad_accum_nums", str(asked.micro_batches // world)),
            ("training.max_steps", "1000000"),
            ("data.num_workers", "0"),
        ]
        flags += [("model.num_layers", str(asked.layers))] if asked.layers else []
        planned = plan(load("llama", preset=asked.preset, flags=flags), self.device)
        self.group.together(lambda: prepare_once(planned))
        prepared = prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
        planned = with_words(planned, prepared)
        stepper, _ = make_stepper(planned, self.group, NoMarks())
        with make_loader(planned, prepared, start_step=0, group=self.group) as loader:
            batches = [next(loader) for _ in range(2)]
        stepper.rehearse(batches[0])
        return stepper, batches

    def seconds(self, kind: str) -> tuple[float, float]:
        """Of one step, on average, from when all ranks are here: by the wall clock, and of this rank's CPU."""
        self.group.barrier()
        since, cpu_since = time.perf_counter(), time.process_time()
        for _ in range(self.arguments.steps):
            pending = self.steppers[kind].launch(self.step, self.batches[self.step % len(self.batches)])
            pending.read()
            self.step += 1
        wall, cpu = time.perf_counter() - since, time.process_time() - cpu_since
        return wall / self.arguments.steps, cpu / self.arguments.steps


def prepare_once(planned: Any) -> bool:
    """By the first rank, for all of them."""
    from lockstep.engine.prepare import prepare

    prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
    return True


def as_rank(arguments: argparse.Namespace) -> None:
    """Time both kinds in turn; the first rank tells."""
    import torch

    from lockstep.runtime import determinism, env
    from lockstep.runtime.group import join

    device = torch.device(arguments.device)
    group = join(env.detect(), device, timeout_seconds=600.0)
    with determinism.mode(device, deterministic="canonical", threads=1):
        bench = Bench(arguments, group)
        for kind in bench.steppers:
            bench.seconds(kind)
        rounds = [{kind: bench.seconds(kind) for kind in bench.steppers} for _ in range(arguments.rounds)]
    if group.rank == 0:
        gradients = sum(bucket.flat.nbytes for bucket in bench.steppers["canonical"].exchange.buckets)
        print(json.dumps({"rounds": rounds, "gradients": gradients}))
    group.barrier()
    group.close()


def measured(world: int, folder: Path) -> dict[str, Any]:
    """What so many ranks say."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    meeting |= {"LOCAL_WORLD_SIZE": str(world), "DATASET_CACHE_DIR": str(folder)}
    command = [sys.executable, *sys.argv, "--rank"]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank of {world} failed")
    return json.loads(said[0].splitlines()[-1])


def main() -> int:
    arguments = parse()
    if arguments.rank:
        as_rank(arguments)
        return 0
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for world in map(int, arguments.worlds.split(",")):
            found = measured(world, Path(folder))
            pairs = [tuple(zip(each["true"], each["canonical"], strict=True)) for each in found["rounds"]]
            (plain, canonical), cpu = (
                [statistics.median(times) for times in zip(*(pair[clock] for pair in pairs), strict=True)]
                for clock in range(2)
            )
            wall_ratio, cpu_ratio = (
                statistics.median(pair[clock][1] / pair[clock][0] for pair in pairs) for clock in range(2)
            )
            ratio = wall_ratio if arguments.device == "cuda" else cpu_ratio
            levels = (BLOCKS // world).bit_length() - 1
            more = (levels + (world > 1)) * found["gradients"] / 2**20
            print(f"{arguments.device}, {world} rank(s): step {plain * 1e3:.2f} ms plain, ", end="")
            print(
                f"{canonical * 1e3:.2f} ms canonical, ratio {wall_ratio:.3f} (of CPU time {cpu[0] * 1e3:.2f} and ",
                end="",
            )
            print(f"{cpu[1] * 1e3:.2f} ms, ratio {cpu_ratio:.3f}); {more:.1f} MiB more for gradients")
            worst = max(worst, ratio)
    if arguments.limit:
        print(f"{'ok' if worst <= arguments.limit else 'TOO SLOW'}: at most {worst:.3f}, limit {arguments.limit:g}")
    return int(bool(arguments.limit) and worst > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
