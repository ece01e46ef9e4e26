"""What a start costs: `lockstep --help`, and a launch of two workers, beside torchrun, accelerate and bare processes.

Usage: python benchmarks/start.py [--rounds 5] [--only help|launch] [--anyway]
Three limits, and exit code 1 when one is not kept: CPU seconds of `lockstep --help`; CPU seconds of the launcher alone
(its workers not counted); and seconds from the start of `lockstep train --gpus 2` to its first step line, over two bare
workers that import torch, build AdamW and join gloo.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import busy

HELP_LIMIT_SECONDS = 0.15  # of CPU time
LAUNCHER_LIMIT_SECONDS = 0.4  # of CPU time
FIRST_STEP_LIMIT_SECONDS = 0.5  # over the bare workers
BIN = Path(sys.executable).parent
TICKS = os.sysconf("SC_CLK_TCK")
HELP = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "lockstep --help": [str(BIN / "lockstep"), "--help"],
    "lockstep config list": [str(BIN / "lockstep"), "config", "list"],
    "torchrun --help": [sys.executable, "-m", "torch.distributed.run", "--help"],
    "accelerate --help": [str(BIN / "accelerate"), "--help"],
}
BARE_WORKER = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
dist.init_process_group("gloo")
dist.barrier()
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
print("Step [0/", flush=True)
os._exit(0)
"""
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles all of lockstep, as nobody else's does
TRAIN = ["train", "llama", "tiny", "--device", "cpu", "--gpus", "2", "--max-steps", "1", "report.sample_prompt="]


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def own_cpu_seconds(pid: int) -> float:
    """Of the process alone, without its children; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def launch(command: list[str], folder: str) -> tuple[float, float]:
    """(seconds to the first step line, the launcher's own CPU seconds)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DATASET_CACHE_DIR": f"{folder}/cache"}
    started, first, spent = time.perf_counter(), 0.0, 0.0
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            spent = max(spent, own_cpu_seconds(process.pid))
            if not first and b"Step [0/" in os.pread(output.fileno(), 1 << 20, 0):
                first = time.perf_counter() - started
            time.sleep(0.005)
        text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} failed ({process.returncode}):\n{text}")
    return first, spent


def bare(folder: str) -> float:
    """Seconds until two workers started by hand have done a step."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", BARE_WORKER], cwd=folder, stdout=subprocess.PIPE,
            env={**os.environ, **place, "RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert workers[0].stdout is not None
    workers[0].stdout.readline()
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.communicate()
    return seconds


def show_help_costs(rounds: int) -> bool:
    times: dict[str, list[float]] = {name: [] for name in HELP}
    for _ in range(rounds):
        for name, command in HELP.items():
            times[name].append(cpu_seconds(command))
    for name, values in times.items():
        print(f"{name:34}{statistics.median(values):8.3f} CPU s")
    return within("lockstep --help", statistics.median(times["lockstep --help"]), HELP_LIMIT_SECONDS)


def show_launch_costs(rounds: int) -> bool:
    script = "import time; time.sleep(0.1)"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    with tempfile.TemporaryDirectory() as folder:
        launch([str(BIN / "lockstep"), *TRAIN], folder)  # prepares the dataset, warms the page cache
        ours, theirs, firsts, bares = [], [], [], []
        for _ in range(rounds):
            first, spent = launch([str(BIN / "lockstep"), *TRAIN], folder)
            firsts.append(first)
            ours.append(spent)
            bares.append(bare(folder))
            theirs.append(cpu_seconds([*torchrun, sys.executable, "-c", script]))
    first, plain = statistics.median(firsts), statistics.median(bares)
    print(f"{'torchrun, 2 empty workers':34}{statistics.median(theirs):8.3f} CPU s")
    print(f"{'lockstep train --gpus 2, launcher':34}{statistics.median(ours):8.3f} CPU s")
    print(f"{'two bare workers, first step':34}{plain:8.3f} s")
    print(f"{'lockstep train --gpus 2, first step':34}{first:8.3f} s")
    cheap = within("the launcher", statistics.median(ours), LAUNCHER_LIMIT_SECONDS)
    return within("the first step, over bare workers,", first - plain, FIRST_STEP_LIMIT_SECONDS) and cheap


def within(what: str, seconds: float, limit: float) -> bool:
    """Say whether a limit is kept."""
    good = seconds <= limit
    print(f"{'ok' if good else 'TOO SLOW'}: {what} takes {seconds:.3f} s, limit {limit}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["help", "launch"])
    busy.add_anyway(parser)
    options = parser.parse_args()
    busy.ensure_quiet(parser, options)
    print(f"python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    parts = {"help": show_help_costs, "launch": show_launch_costs}
    good = [show(options.rounds) for name, show in parts.items() if options.only in (None, name)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
