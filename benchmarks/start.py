"""What a start costs: CPU seconds of `lockstep --help` beside torchrun, accelerate and a bare interpreter.

Usage: python benchmarks/start.py [--rounds 5] [--limit SECONDS]
The exit code is 1 when `lockstep --help` uses more than the limit.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

LIMIT_SECONDS = 0.15  # of CPU time
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "lockstep --help": [str(Path(sys.executable).parent / "lockstep"), "--help"],
    "lockstep config list": [str(Path(sys.executable).parent / "lockstep"), "config", "list"],
    "torchrun --help": [sys.executable, "-m", "torch.distributed.run", "--help"],
    "accelerate --help": [str(Path(sys.executable).parent / "accelerate"), "--help"],
}


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def verdict(seconds: float, limit_seconds: float) -> int:
    """Say whether the limit is kept; the exit code."""
    good = seconds <= limit_seconds
    print(f"{'ok' if good else 'TOO SLOW'}: lockstep --help uses {seconds:.3f} CPU s, limit {limit_seconds}")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, command in COMMANDS.items():
            times[name].append(cpu_seconds(command))
    print(f"python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, values in times.items():
        print(f"{name:22}{statistics.median(values):8.3f} CPU s")
    return verdict(statistics.median(times["lockstep --help"]), options.limit)


if __name__ == "__main__":
    sys.exit(main())
