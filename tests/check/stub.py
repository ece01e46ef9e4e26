"""A replica without torch: writes a record as told, and ends as told. `stub.py RECORD STEPS HOW`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from lockstep.health.records import line


def main(record: Path, steps: int, how: str) -> None:
    print("the stub speaks", flush=True)
    with record.open("a") as out:
        out.write(line("workload", workload="llama", tensors=["weights:w"]) + "\n")
        for step in range(steps):
            out.write(line("step", step=step, loss="0x1p+0", norm="0x1p+0", sums="0" * 32, seconds=0.01) + "\n")
            out.flush()
            time.sleep(0.01)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        while how == "rubbish":
            out.write("rubbish\n")
            out.flush()
            time.sleep(0.05)
        if how == "fork" and os.fork() == 0:  # a child that outlives it
            os.setsid()
            time.sleep(600)
        if how == "raise":
            raise RuntimeError("the stub gives up")
        out.write(line("done", error="") + "\n")


main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
