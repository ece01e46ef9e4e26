"""Soak: random faults against a run that restarts by itself; in the end it must have the bits of one left alone.

Usage: python benchmarks/soak.py [--minutes 5] [--workers 2] [--family llama] [--seed 0] [--interval 20-60] [--out DIR]
Rows 1 to 14 of the fault matrix, each in the ways of FAULTS: real signals from outside, and inside a worker what
tests/faults/hurt does when it is ordered to. All of them come once, in an order that the seed decides, before any comes
again. Crashes and hangs are answered by `--restarts`; where the whole command ends (it was killed, asked to stop, or
out of memory, which a restart does not cure) this script runs `lockstep resume`.
Left out, since one machine without a GPU and without root has none of them: the kernel's kill for want of memory in a
cgroup (its SIGKILL is row 1), a real CUDA allocation (row 8 raises torch's error), a scheduler that requeues, a closed
terminal (SIGHUP is sent), and a loader process that dies (ours are threads: an exception is raised where rows are
fetched).
Goodput: steps of the run x seconds of an undisturbed step / seconds of the disturbed run. That run is slowed by a pause
in each step, so that it lasts as long as asked; the undisturbed one is not, and its step counts with the pause.
The exit code is 1 when the weights, the moments or any step differ, somebody or a temporary file is left, a restart
came without a fault, or anything ended in another way than it must.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the tests that hurt processes

from safetensors.torch import load_file

from lockstep.engine.checkpoint import MODEL, OPTIMIZER
from lockstep.health.fingerprint import digest_model
from lockstep.report.jsonl import read_events
from tests.launch import harness

HURT = Path(__file__).resolve().parents[1] / "tests" / "faults" / "hurt"
STEPS_PER_SECOND, TRAINED_SHARE = 3.0, 0.75  # of the disturbed run, and what is left of its time for steps
SAVE_INTERVAL = 10
HANG_SECONDS = 10.0
PATIENCE_SECONDS = 150.0  # for a start, an end or a restart on a busy machine
SETTINGS = (
    f"training.save_interval={SAVE_INTERVAL}", "training.eval_interval=100", "training.eval_batches=1",
    f"system.hang_seconds={HANG_SECONDS}", "report.tensorboard=false", "report.progress=off",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What is done to the run. `ends`: the exit code of the whole command; None: it goes on by itself."""

    row: int
    name: str
    how: str
    ends: int | None = None


FAULTS = (
    Fault(1, "SIGKILL of a worker", "worker SIGKILL"),
    Fault(1, "SIGKILL of a worker during a save", "saving SIGKILL"),
    Fault(2, "SIGKILL of the launcher", "launcher SIGKILL", 137),
    Fault(3, "SIGTERM", "launcher SIGTERM", 143),
    Fault(3, "SIGTERM during a save", "stop-saving SIGTERM", 143),
    Fault(4, "SIGUSR1", "launcher SIGUSR1", 75),
    Fault(4, "SIGUSR2 to one worker", "worker SIGUSR2", 75),
    Fault(5, "SIGINT twice", "launcher SIGINT SIGINT", 130),
    Fault(6, "SIGHUP", "launcher SIGHUP", 143),
    Fault(7, "out of memory (RLIMIT_AS)", "order limit:forward", 1),
    Fault(8, "out of memory (device)", "order device:forward", 1),
    Fault(9, "exception in forward", "order raise:forward"),
    Fault(9, "exception in backward", "order raise:backward"),
    Fault(9, "exception in fetching rows", "order raise:data"),
    Fault(10, "exit 0 too early", "order exit0:forward"),
    Fault(11, "exit 7", "order exit7:forward"),
    Fault(12, "segmentation fault", "order segv:backward"),
    Fault(12, "abort", "order abort:communication"),
    Fault(13, "hang in Python", "order hang:forward"),
    Fault(14, "SIGSTOP of a worker", "worker SIGSTOP"),
    Fault(14, "interpreter's lock held", "order gil:backward"),
)


@dataclass(frozen=True)
class Planned:
    """A fault, which worker it strikes, and how long after the one before."""

    fault: Fault
    rank: int
    seconds: float


def plan(seed: int, workers: int, interval: tuple[float, float] = (20.0, 60.0)) -> Iterator[Planned]:
    """For ever; all faults come before any comes again."""
    chance = random.Random(seed)
    while True:
        for fault in chance.sample(FAULTS, len(FAULTS)):
            yield Planned(fault, chance.randrange(workers), chance.uniform(*interval))


@dataclass(frozen=True)
class Met:
    """A fault that was met, what the run said of it, and the seconds until it trained again."""

    planned: Planned
    said: str
    seconds: float


@dataclass
class Soak:
    """An undisturbed run, the same run disturbed, and what of the second is not as it must be."""

    folder: Path
    workers: int = 2
    family: str = "llama"
    minutes: float = 5.0
    tell: Callable[[str], None] = print
    wrong: list[str] = field(default_factory=list[str])
    met: list[Met] = field(default_factory=list[Met])
    jobs: list[harness.Job] = field(default_factory=list[harness.Job])

    def __post_init__(self) -> None:
        self.steps = max(2 * SAVE_INTERVAL, round(60 * self.minutes * STEPS_PER_SECOND))
        self.pause_seconds = 0.0
        self.orders = self.folder / "orders"
        self.orders.mkdir(parents=True)
        self.run = self.folder / "runs" / "disturbed"

    def undisturbed(self) -> float:
        """Train alone; the seconds of a step, without a pause."""
        job = self._start("train", self.family, "tiny", *self._words("undisturbed"))
        ended = job.finish(60 + 60 * 3 * self.minutes)
        assert ended.code == 0, ended.out[-3000:]
        took = [event["seconds"] for event in self._steps("undisturbed")]
        return statistics.fmean(took[len(took) // 10 :])

    def disturbed(self, faults: Iterator[Planned], step_seconds: float) -> float:
        """Train under faults to the end; the seconds that took."""
        self.pause_seconds = max(0.0, TRAINED_SHARE / STEPS_PER_SECOND - step_seconds)
        began = time.monotonic()
        job = self._start("train", self.family, "tiny", *self._words("disturbed"), "--restarts", "1000")
        self._wait(lambda: self._trains_since(0.0), job)
        struck = time.monotonic()
        for planned in faults:
            if self._wait(lambda until=struck + planned.seconds: time.monotonic() > until, job, seconds=3600):
                break
            struck = time.monotonic()
            job = self._meet(planned, job)
            if job.process.poll() is not None:
                break
        ended = job.finish(60 * 20)
        if ended.code != 0:
            self.wrong.append(f"it ended with exit code {ended.code}: {last_words(ended.out)}")
        return time.monotonic() - began

    def before_resume(self) -> None:
        """For a test that spoils what was saved."""

    def _meet(self, planned: Planned, job: harness.Job) -> harness.Job:
        """Strike, and wait until it trains again; who trains then."""
        fault, began, before = planned.fault, time.monotonic(), job.out
        restarts = before.count("[RESTART]")
        self._strike(planned, job)
        if fault.ends is not None:
            code, out = job.process.wait(PATIENCE_SECONDS), job.out
            code = 128 - code if code < 0 else code
            if code == 0:
                return job  # it was done before it was met
            if code != fault.ends:
                self.wrong.append(f"{fault.name}: exit code {code} and not {fault.ends}")
            self._check_nobody(f"after {fault.name}")
            self.before_resume()
            since = time.time()
            said, job = (
                last_words(out[len(before) :]) or "(nothing)",
                self._start("resume", str(self.run), "--restarts", "1000"),
            )
        else:
            if self._wait(lambda: job.out.count("[RESTART]") > restarts, job):
                if job.process.poll():
                    self.wrong.append(f"{fault.name}: not restarted")
                return job  # else it was done before it was met
            since = time.time()
            said = [line for line in job.out.splitlines() if line.startswith("[RESTART]")][-1]
        self._wait(lambda: self._trains_since(since), job)
        if job.process.poll() is None and fault.ends is None and job.out.count("[RESTART]") > restarts + 1:
            self.wrong.append(f"{fault.name}: restarted more than once")
        self.met.append(Met(planned, said, time.monotonic() - began))
        self.tell(f"  row {fault.row:2} {fault.name} (rank {planned.rank}), {self.met[-1].seconds:.1f} s: {said}")
        return job

    def _strike(self, planned: Planned, job: harness.Job) -> None:
        kind, *what = planned.fault.how.split()
        if kind == "order":
            order = self.orders / str(planned.rank)
            order.with_suffix(".tmp").write_text(what[0], encoding="ascii")
            order.with_suffix(".tmp").rename(order)
            self._wait(lambda: not order.exists(), job)
            return
        if "saving" in kind:
            self._wait(lambda: any(self.run.glob("checkpoints/step_*.tmp-*")), job, nap=0.0005)
        whole = kind in ("launcher", "stop-saving")
        pids = [job.pid] if whole else job.members(f"RANK={planned.rank}")
        for number, name in enumerate(what):
            time.sleep(0.3 * (number > 0))
            if job.process.poll() is None and pids:
                job.send(signal.Signals[name], pids[0])

    def verdict(self) -> None:
        """What of the disturbed run is not as in the undisturbed one."""
        alone, hurt = (self._steps(name) for name in ("undisturbed", "disturbed"))
        if [event["step"] for event in hurt] != list(range(self.steps)):
            self.wrong.append(f"not every step is told once: {len(hurt)} of {self.steps}")
        keys = ("step", "loss_hex", "grad_norm_hex", "lr")
        if differing := [a["step"] for a, b in zip(alone, hurt, strict=False) if any(a[key] != b[key] for key in keys)]:
            self.wrong.append(f"{len(differing)} steps differ, the first is {differing[0]}")
        for file in (MODEL, OPTIMIZER):
            digests = [self._digest(name, file) for name in ("undisturbed", "disturbed")]
            self.tell(f"{file}: {digests[0]} undisturbed, {digests[1]} disturbed")
            if digests[0] != digests[1]:
                self.wrong.append(f"{file} differs")
        if left := [str(path) for path in self.run.rglob("*.tmp*")]:
            self.wrong.append(f"temporary files are left: {left[:3]}")
        restarts = [event for event in read_all(self.run / "events.jsonl") if event["kind"] == "restart"]
        expected = sum(met.planned.fault.ends is None for met in self.met)
        if len(restarts) != expected:
            self.wrong.append(f"{len(restarts)} restarts for {expected} crashes and hangs: {restarts}")
        self._check_nobody("in the end")

    def _check_nobody(self, when: str) -> None:
        deadline = time.monotonic() + harness.ORPHAN_SECONDS
        while left := [pid for job in self.jobs for pid in job.members()]:
            if time.monotonic() > deadline:
                names = [harness.command_line(pid) for pid in left]
                self.wrong.append(f"{len(left)} processes are left {when}: {names[:3]}")
                return
            time.sleep(0.05)

    def _digest(self, name: str, file: str) -> str:
        path = self.folder / "runs" / name / "checkpoints" / f"step_{self.steps:08d}" / file
        return digest_model(load_file(path).items()) if path.is_file() else "missing"

    def _steps(self, name: str) -> list[dict[str, Any]]:
        events = read_events(self.folder / "runs" / name / "events.jsonl")
        return [event for event in events if event["kind"] == "step"]

    def _trains_since(self, moment: float) -> bool:
        """Whether the last thing that was told is a step after this moment."""
        path = self.run / "events.jsonl"
        lines = path.read_bytes().splitlines()[-1:] if path.is_file() else []
        try:
            last = json.loads(lines[0])
        except (IndexError, ValueError):  # nothing yet, or a line that is being written
            return False
        return last["kind"] == "step" and last["time"] > moment

    def _words(self, name: str) -> list[str]:
        place = ("--device", "cpu", "--gpus", str(self.workers), "--name", name, "--max-steps", str(self.steps))
        silent = () if self.family == "ad" else ("report.sample_prompt=",)  # agents are not asked to speak
        return [*place, *SETTINGS, *silent]

    def _start(self, *words: str) -> harness.Job:
        """The command itself, which can be hurt; with a pause in each step."""
        path = os.pathsep.join(filter(None, [str(HURT), os.environ.get("PYTHONPATH", "")]))
        more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        more |= {"LOCKSTEP_FAULT": f"hang@seconds={self.pause_seconds:.4f}"} if self.pause_seconds else {}
        cache = os.environ.get("DATASET_CACHE_DIR", str(self.folder / "cache"))
        command = (sys.executable, "-m", "lockstep", *words)
        places = {"PYTHONPATH": path, "HURT_ORDERS": str(self.orders), "DATASET_CACHE_DIR": cache}
        self.jobs.append(harness.start(command, cwd=self.folder, **places, **more))
        return self.jobs[-1]

    def _wait(
        self, happened: Callable[[], bool], job: harness.Job, *, seconds: float = PATIENCE_SECONDS, nap: float = 0.05
    ) -> bool:
        """Until something has happened (False), or the command has ended (True)."""
        deadline = time.monotonic() + seconds
        while not happened():
            if job.process.poll() is not None:
                return True
            if time.monotonic() > deadline:
                raise AssertionError(f"did not happen in {seconds:g} s:\n{job.out[-3000:]}")
            time.sleep(nap)
        return False

    def close(self) -> None:
        """End whoever is left."""
        for job in self.jobs:
            job.end()


def read_all(path: Path) -> list[dict[str, Any]]:
    """Every event, also what a resume has voided."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def last_words(out: str) -> str:
    """What a command said of its end, in one line."""
    lines = [line.strip() for line in out.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if line.startswith("[FAILURE]")), len(lines) - 2)
    return " | ".join(lines[max(0, first) : first + 2])


def soak(subject: Soak, faults: Iterator[Planned]) -> int:
    """Both runs, the figures, the verdict: 0 or 1."""
    try:
        step_seconds = subject.undisturbed()
        words = f"{subject.family}, {subject.workers} workers, {subject.steps} steps of {step_seconds * 1e3:.0f} ms"
        subject.tell(f"{words} and a pause; the faults, and the time until it trained again:")
        took = subject.disturbed(faults, step_seconds)
        subject.verdict()
    except (AssertionError, subprocess.TimeoutExpired) as error:
        subject.wrong.append(str(error))
        took, step_seconds = float("inf"), 0.0
    finally:
        subject.close()
    useful = subject.steps * (step_seconds + subject.pause_seconds)
    slowest = max((met.seconds for met in subject.met), default=0.0)
    subject.tell(
        f"{len(subject.met)} faults of rows {sorted({met.planned.fault.row for met in subject.met})} in {took:.0f} s; "
        f"goodput {useful / took:.0%}; slowest to recover {slowest:.1f} s"
    )
    for text in subject.wrong:
        subject.tell(f"NOT AS IT MUST BE: {text}")
    if not subject.wrong:
        subject.tell("ok: the bits of the undisturbed run, nobody left")
    return int(bool(subject.wrong))


def seconds_of(text: str) -> tuple[float, float]:
    first, _, last = text.partition("-")
    return float(first), float(last or first)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0, help="of the disturbed run, about")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--family", choices=("llama", "mlm", "llada", "ad"), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=seconds_of, default=(20.0, 60.0), metavar="A-B", help="seconds")
    parser.add_argument("--faults", type=int, default=0, help="so many at most; 0: until the run ends")
    parser.add_argument("--out", type=Path, default=None, help="a folder to keep; else a temporary one")
    arguments = parser.parse_args()
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)  # to be read while it goes on
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves nobody behind
    faults = itertools.islice(plan(arguments.seed, arguments.workers, arguments.interval), arguments.faults or None)
    with tempfile.TemporaryDirectory() as folder:
        place = (arguments.out or Path(folder)).resolve() / "soak"
        print(f"seed {arguments.seed}, in {shlex.quote(str(place))}", flush=True)
        subject = Soak(place, arguments.workers, arguments.family, arguments.minutes)
        return soak(subject, faults)


if __name__ == "__main__":
    sys.exit(main())
