"""A worker without torch for foreign launchers: it attaches, makes steps, and fails as told.

FAULT is `kind@rank=1,step=3`; exchanges are files in RUN that every rank waits for, as it would for its peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.launch import link
from lockstep.runtime import env

STEP_SECONDS = 0.02
GUARDIAN_SECONDS = 60.0


def main(run: Path, steps: int, fault: str) -> int:
    place = env.detect()
    worker = link.attach(place)
    worker.tell_run(run)
    (run / f"pid.{place.rank}").write_text(f"{os.getpid()} {os.getppid()} {place.launcher} {place.world} {place.tag}")
    kind, _, where = fault.partition("@")
    chosen = dict(pair.split("=") for pair in where.split(",") if pair)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    for step in range(steps):
        worker.enter("forward", step)
        if chosen.get("rank") == str(place.rank) and chosen.get("step") == str(step):
            await_guardian()
            fail(kind, worker)
        time.sleep(STEP_SECONDS)
        worker.enter("communication")
        exchange(run, place, step, worker)
        if stopped:
            worker.leave(143)
            return 143
    worker.close()
    return 0


def exchange(run: Path, place: env.Env, step: int, worker: link.Link) -> None:
    """Wait for every rank; a rank whose process is gone is a connection closed."""
    (run / f"at.{place.rank}.{step}").touch()
    others = [rank for rank in range(place.world) if rank != place.rank]
    while not all((run / f"at.{rank}.{step}").exists() for rank in others):
        for rank in others:
            path = run / f"pid.{rank}"
            pid = path.read_text().split()[0] if path.exists() and path.stat().st_size else ""
            if pid and state(pid) in ("", "Z") and not (run / f"at.{rank}.{step}").exists():
                worker.fail(
                    {"kind": "lost_peer", "cause": "connection closed by peer", "secondary": True, "exit_code": 1}
                )
                os._exit(1)
        time.sleep(0.01)


def state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def await_guardian() -> None:
    """Until somebody holds a handle on this process: a trainer takes long to begin, the guardian has met it by then."""
    own = f"Pid:\t{os.getpid()}\n"
    until = time.monotonic() + GUARDIAN_SECONDS
    while time.monotonic() < until and not any(own in text for text in handles()):
        time.sleep(0.05)


def handles() -> Iterator[str]:
    """What the kernel says of the files that guardians have open."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended between two looks
            if b"launch.guardian" in (path / "cmdline").read_bytes():
                yield from (each.read_text() for each in (path / "fdinfo").iterdir())


def fail(kind: str, worker: link.Link) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(3600)
    elif kind == "exit":
        os._exit(7)
    elif kind == "raise":
        worker.fail({"kind": "exception", "cause": "ValueError: on purpose", "exit_code": 1, "trace": ["on purpose"]})
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
