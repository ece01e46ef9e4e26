"""A worker without torch, for faults by the hundred: attaches, makes steps, prints, saves when asked to stop.

`python -m tests.launch.stub` with the environment of a worker. Options come in STUB_OPTIONS, separated by commas:
steps=N, rate=50 (steps a second), noise=N (lines per step), meet (waits for the others after each step), nodes=PORT
(waits for another node, whose door that is), save_seconds=S, ignore_term, deaf (goes on when asked to stop),
unprotected (no PDEATHSIG, no lifeline), child (leaves a child process), daemon (one that ran away), helper (one it
cannot work without), allocate (memory up to RLIMIT_AS), eat (up to the kernel's limit), secondary (rank 0 fails first,
as a consequence of rank 1), lag=N (makes N more steps when asked to stop), evaluate_seconds=S (before it saves), stuck
(rank 1 hears nothing when asked to stop), lost (rank 1 goes on until rank 0 has left, then fails for that), save_each
(saves after every step), idle (leaves without a run), told=CODE (rank 1 tells a failure and leaves with this code),
linger (rank 1 stays when all is done), mute (rank 0 does not show its stacks), starting (as Python before its first
line, for ever). The run folder is in STUB_RUN.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lockstep.launch import link as links
from lockstep.runtime import env, faults
from lockstep.runtime.host_time import own_seconds

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143, signal.SIGUSR1: 75, signal.SIGUSR2: 75}
ASLEEP = "import time; time.sleep(600)"
asked: list[int] = []


def options() -> dict[str, str]:
    pairs = [item.partition("=") for item in os.environ.get("STUB_OPTIONS", "").split(",") if item]
    return {name: value or "1" for name, _, value in pairs}


def daemonise() -> None:
    """Run away: a session of its own, and nobody's child."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", ASLEEP])
        os._exit(0)
    os.wait()


def listen(chosen: dict[str, str]) -> None:
    for number in CODES:
        if chosen.get("ignore_term") and number == signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        else:
            signal.signal(number, lambda number, _frame: asked.append(number))


def save(run: Path, rank: int, step: int) -> None:
    """All of it or nothing."""
    temporary = run / f"saved.{rank}.tmp"
    temporary.write_text(f"{step}\n")
    temporary.replace(run / f"saved.{rank}")


def allocate(limited: bool) -> None:
    if limited:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
    held = []
    while True:
        held.append(b"x" * (8 << 20))


def train(link: links.Link, place: env.Env, chosen: dict[str, str]) -> int:
    run = Path(os.environ["STUB_RUN"])
    link.tell_run(run)
    plan = faults.plan(rank=place.rank)
    seconds = 1 / float(chosen.get("rate", 50))
    helper = subprocess.Popen([sys.executable, "-c", ASLEEP]) if chosen.get("helper") else None
    lines, lag = int(chosen.get("noise", 0)), int(chosen.get("lag", 0))
    for step in range(int(chosen.get("steps", 30))):
        begin = own_seconds()
        link.enter("data", step)
        plan.at("loader", step)
        link.enter("forward", step)
        plan.at("forward", step, step_seconds=seconds)
        if step == 3 and place.rank == 1 and (chosen.get("allocate") or chosen.get("eat")):
            allocate(limited="allocate" in chosen)
        if helper is not None and helper.poll() is not None:
            raise RuntimeError(f"loader worker {helper.pid} was killed")
        time.sleep(seconds)
        if chosen.get("secondary") and (place.rank, step) == (1, 5) and link.work is not None:
            while not links.failure_path(link.work, 0).exists():  # the consequence comes first
                time.sleep(0.01)
            time.sleep(0.1)
        link.enter("backward")
        plan.at("backward", step)
        plan.at("optimizer", step)
        link.busy(step, own_seconds() - begin)
        with contextlib.suppress(BrokenPipeError):  # who is not ended with the launcher must not end by this
            print(f"Step [{step}] rank {place.rank}", flush=True)
        for number in range(lines):
            print(f"line {number} of step {step} " + "x" * 60)
        if chosen.get("save_each"):
            save(run, place.rank, step)
        if place.rank == 1 and step > 3:
            misbehave(link, run, chosen)
        lag -= bool(asked)
        if asked and lag < 0 and not chosen.get("deaf") and not (place.rank == 1 and chosen.get("lost")):
            link.enter("evaluate")
            time.sleep(float(chosen.get("evaluate_seconds", 0)))
            link.enter("save")
            time.sleep(float(chosen.get("save_seconds", 0)))
            save(run, place.rank, step)
            return CODES[signal.Signals(asked[0])]
        link.enter("communication")
        if chosen.get("meet"):
            meet(run, place, step)
        if step == 3 and (port := chosen.get("nodes")):
            here, there = {"node": 0, "host": "here", "port": 1}, {"node": 1, "host": "there", "port": int(port)}
            link.tell_nodes([node | {"address": "127.0.0.1"} for node in (here, there)])
            time.sleep(600)
    return 0


def misbehave(link: links.Link, run: Path, chosen: dict[str, str]) -> None:
    """What only rank 1 does."""
    if code := chosen.get("told"):
        link.fail({"kind": "exception", "cause": "SystemExit: told"})
        os._exit(int(code))
    if chosen.get("stuck") and asked:
        link.enter("communication")
        time.sleep(600)
    if chosen.get("lost") and (run / "saved.0").exists():
        time.sleep(0.3)
        raise RuntimeError("connection closed by peer")


def meet(run: Path, place: env.Env, step: int) -> None:
    """Wait until every worker has come this far."""
    (run / f"met.{place.rank}.{step}").touch()
    while not all((run / f"met.{rank}.{step}").exists() for rank in range(place.world)) and not asked:
        time.sleep(0.005)


def main() -> int:
    chosen, place = options(), env.detect()
    if chosen.get("unprotected"):
        links.die_with_parent = links._follow = lambda *_: None
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # what the launcher had set before exec
    if chosen.get("starting"):
        print("starting", flush=True)
        try:
            time.sleep(600)
        except KeyboardInterrupt:  # "Could not import runpy module"
            os._exit(1)
    listen(chosen)
    link = links.attach(place)
    if chosen.get("child"):
        subprocess.Popen([sys.executable, "-c", ASLEEP])
    if chosen.get("daemon") and place.rank == 0:
        daemonise()
    if chosen.get("mute") and place.rank == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {links.STACKS_SIGNAL})
    if chosen.get("idle"):
        os._exit(0)
    try:
        code = train(link, place, chosen)
    except Exception as error:
        import traceback

        trace = traceback.format_exc().splitlines()[-20:]
        print("\n".join(trace), flush=True)
        record = {"kind": "exception", "cause": f"{type(error).__name__}: {error}", "trace": trace}
        lost = "lost" in chosen or ("secondary" in chosen and place.rank != 1)
        link.fail(record | {"secondary": lost})
        return 1
    link.close()
    if chosen.get("linger") and place.rank == 1:
        time.sleep(600)
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
