"""What a step costs to report: each way out beside the least that one would write by hand.

Usage: python benchmarks/report.py [--rounds 7] [--calls 2000] [--anyway]
CPU time of one call, the median of interleaved rounds. Limits are ratios, and the exit code is 1 when one is not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import busy

from lockstep.contracts import StepRecord
from lockstep.launch.output import Lines, prefixed
from lockstep.report.console import ConsoleSink
from lockstep.report.jsonl import EventSink
from lockstep.report.logs import setup_logging
from lockstep.report.tensorboard import TensorboardSink
from lockstep.runtime.scrub import bytes_scrubber

LIMITS = {"log line": 2.0, "step line": 2.5, "event": 2.0, "TensorBoard": 0.25, "1,000 lines of a worker": 2.0}
LINE = "Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30"
Call = Callable[[], object]


def cpu_us(call: Call, calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - began) / calls * 1e6


def pairs(folder: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Call, Call]]:
    """What -> (ours, by hand)."""
    for number in range(4):  # as on a machine of today
        os.environ[f"SERVICE{number}_TOKEN"] = f"secret-value-{number}"
    screen = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - by the stack
    setup_logging(tag="GPU0", prefix="colon", stream=screen)
    ours, plain = logging.getLogger("lockstep.benchmark"), logging.getLogger("plain")
    plain.addHandler(logging.StreamHandler(screen))
    plain.propagate = False
    plain.setLevel("INFO")
    step = StepRecord(
        0, loss=12.234, grad_norm=2.75648, lr=1e-5, seconds=0.05, tokens=8192, eta_seconds=330, mfu=0.4,
        memory_bytes=1 << 30,
    )  # fmt: skip
    console, events, board = ConsoleSink(10**9, clip=True), EventSink(folder / "e.jsonl"), TensorboardSink(folder / "t")
    descriptor = os.open(folder / "plain.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    found: dict[str, tuple[Call, Call]] = {
        "log line": (lambda: ours.info("%s", LINE), lambda: plain.info("%s", LINE)),
        "step line": (lambda: console.write(step), lambda: plain.info("%s", LINE)),
        "event": (
            lambda: events.write(step),
            lambda: os.write(descriptor, (json.dumps({**vars(step), "measures": dict(step.measures)}) + "\n").encode()),
        ),
        "1,000 lines of a worker": relays(),
    }
    if bare := summary_writer(folder / "s", stack):
        found["TensorBoard"] = (lambda: board.write(step), bare)
    return found


def relays() -> tuple[Call, Call]:
    """What the launcher does with what a worker says: whole lines, no secrets, a label before each."""
    chunk, clean, lines = f"{LINE}\n".encode() * 1000, bytes_scrubber(), Lines()

    def by_hand() -> bytes:
        return b"".join(b"[GPU0] " + line for line in chunk.splitlines(keepends=True))

    return lambda: prefixed(b"[GPU0] ", clean(lines.feed(chunk))), by_hand


def summary_writer(folder: Path, stack: contextlib.ExitStack) -> Call | None:
    """PyTorch's own, with the same six scalars; None without the package."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no TensorBoard here: left out")
        return None
    writer = stack.enter_context(SummaryWriter(str(folder)))

    def write() -> None:
        for number in range(6):
            writer.add_scalar(f"train/{number}", 12.234, 0)

    return write


def within(what: str, ratio: float, limit: float) -> bool:
    """Say whether a limit is kept."""
    good = ratio <= limit
    print(f"{'ok' if good else 'TOO SLOW'}: {what}: {ratio:.2f} times by hand, limit {limit}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2000)
    busy.add_anyway(parser)
    options = parser.parse_args()
    busy.ensure_quiet(parser, options)
    print(f"python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    good: list[bool] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for what, (ours, by_hand) in pairs(Path(folder), stack).items():
            times = [(cpu_us(ours, options.calls), cpu_us(by_hand, options.calls)) for _ in range(options.rounds)]
            us, bare = (statistics.median(each) for each in zip(*times, strict=True))
            print(f"{what:26}{us:9.1f} us {bare:9.1f} us by hand")
            good.append(within(what, us / bare, LIMITS[what]))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
