"""How a run stands, read from the files of its folder; nobody calls into a worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import ExitCode
from lockstep.report.jsonl import valid
from lockstep.rundir import RunDir, open_plain, read_json
from lockstep.runtime import gpu_facts, owner

TAIL_BYTES = 1 << 17
HEAD_BYTES = 1 << 14
COUNTED = ("start", "epoch", "estimate")  # events that say how many steps there are
RATE_STEPS = 20  # tokens a second and the time left are means over so many steps
FRESH_SECONDS = 30.0  # a GPU's facts older than that are not shown
STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)

Life = Literal["running", "elsewhere", "done", "stopped", "failed", "dead", "not started"]


@dataclass(frozen=True)
class Worker:
    """One worker as its folder shows it."""

    name: str  # n0-GPU3
    section: str = ""
    step: int | None = None
    age_seconds: float | None = None  # since its last sign of life
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class State:
    """A run as its folder shows it."""

    root: Path
    life: Life
    owner: owner.Owner | None
    finished_steps: int | None
    max_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    exit_code: int | None
    cause: str
    workers: tuple[Worker, ...]
    determinism: str = ""  # what the run promises of its bits

    @property
    def is_running(self) -> bool:
        return self.life in ("running", "elsewhere")


def read(root: Path) -> State:
    """What the files of a run folder say."""
    run = RunDir(root)
    who = owner.read(root)
    events = tail_events(run.events)
    steps = [event for event in events if event["kind"] == "step"]
    life, code = _judge(run, events, who)
    done, total = _finished(events), _max_steps(run, events)
    rate, eta = _pace(steps[-RATE_STEPS:], (total or 0) - (done or 0))
    loss = steps[-1].get("loss") if steps else None
    running = life in ("running", "elsewhere")
    return State(
        root=root,
        life=life,
        owner=who,
        finished_steps=done,
        max_steps=total,
        loss=loss if isinstance(loss, float) else None,
        tokens_per_second=rate,
        eta_seconds=eta if running else None,
        exit_code=code,
        cause=_cause(run, events) if life == "failed" else "",
        workers=tuple(_worker(folder, running=running) for folder in _present(worker_folders(root))),
        determinism=_determinism([*_first_events(run.events), *events]),
    )


def worker_folders(root: Path) -> list[Path]:
    """The folders of a run's workers, node by node and GPU by GPU."""

    def place(folder: Path) -> tuple[str, int, str]:
        digits = "".join(letter for letter in folder.name.rpartition("-")[2] if letter.isdigit())
        return folder.name.partition("-")[0], int(digits or -1), folder.name

    return sorted((path for path in (root / "workers").glob("n*-*") if path.is_dir()), key=place)


def tail_events(path: Path) -> list[dict[str, Any]]:
    """The last events of a run: enough to say how it stands, at a cost that does not grow with the run."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return valid(file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 :])
    except OSError:
        return []


def _first_events(path: Path) -> list[dict[str, Any]]:
    """The events of the beginning."""
    try:
        with open_plain(path) as file:
            return valid(file.read(HEAD_BYTES).split(b"\n")[:-1])
    except OSError:
        return []


def _judge(run: RunDir, events: Sequence[dict[str, Any]], who: owner.Owner | None) -> tuple[Life, int | None]:
    """Whether the run lives; else how it ended, as its last words say."""
    if who and who.is_alive():
        return "running", None
    since = next((at for at in reversed(range(len(events))) if events[at]["kind"] in ("start", "resume")), 0)
    last = next((event for event in reversed(events[since:]) if event["kind"] in ("end", "fault")), None)
    failure = _read_json(run.failure)  # a new attempt takes the old one's away
    ended = bool(
        last and last["kind"] == "end"
    )  # else the first cause, which a worker that lost its peer does not know
    code = ((last if ended else failure or last) or {}).get("exit_code")
    code = code if isinstance(code, int) else None
    if ended:
        life: Life = "done" if code == 0 else "stopped" if code in STOPPED else "failed"
        return life, code
    if last or failure:
        return "failed", code
    if who and not who.is_here:
        return "elsewhere", None
    return ("dead" if who or events else "not started"), None


def _finished(events: Sequence[dict[str, Any]]) -> int | None:
    """Finished steps: a step counts from 0, in every other event `step` is how many are done."""
    for event in reversed(events):
        step = event.get("step")
        if isinstance(step, int):
            return step + 1 if event["kind"] == "step" else step
    return None


def _pace(steps: Sequence[dict[str, Any]], left: int) -> tuple[float | None, float | None]:
    timed = [event for event in steps if isinstance(event.get("seconds"), float) and event["seconds"] > 0]
    if not timed:
        return None, None
    seconds = sum(event["seconds"] for event in timed)
    return sum(int(event.get("tokens") or 0) for event in timed) / seconds, max(0, left) * seconds / len(timed)


def _present(folders: Sequence[Path]) -> Sequence[Path]:
    """The workers of the last attempt, where a launcher tells of them: a run may have had more before, or others."""
    return [folder for folder in folders if (folder / "heartbeat").is_file()] or folders


def _worker(folder: Path, *, running: bool) -> Worker:
    beat = _read_json(folder / "heartbeat")
    step, age = beat.get("step"), beat.get("age")
    if isinstance(age, int | float) and running:  # as old as it was when it was written, and what has passed since
        age += max(0.0, time.time() - float(beat.get("time") or time.time()))
    facts = gpu_facts.last_written(folder / "gpu.jsonl", within_seconds=FRESH_SECONDS) if running else None
    return Worker(
        name=folder.name,
        section=_printable(str(beat.get("section", "")))[:20],
        step=step if isinstance(step, int) and step >= 0 else None,
        age_seconds=float(age) if running and isinstance(age, int | float) else None,
        facts=facts or {},
    )


def _max_steps(run: RunDir, events: Sequence[dict[str, Any]]) -> int | None:
    """Steps of the run: what it said last, since in epochs they are counted once the rows are known."""
    counted = (event.get("max_steps") for event in [*_first_events(run.events), *events] if event["kind"] in COUNTED)
    if known := [total for total in counted if isinstance(total, int)]:
        return known[-1]
    try:
        return int(_read_json(run.config)["config"]["training"]["max_steps"])
    except (KeyError, TypeError, ValueError):
        return None


def _cause(run: RunDir, events: Sequence[dict[str, Any]]) -> str:
    told = [_read_json(run.failure), *(event for event in reversed(events) if event["kind"] == "fault")]
    record = next((record for record in told if str(record.get("cause") or "").strip()), None)
    if record is None:
        return ""
    who = f"{record['gpu']}: " if record.get("gpu") else ""
    return _printable(who + str(record["cause"]).strip().splitlines()[0])[:200]


def _determinism(events: Sequence[dict[str, Any]]) -> str:
    """As the run said when it last began."""
    told = [event["determinism"] for event in events if event["kind"] == "start" and event.get("determinism")]
    return _printable(str(told[-1]))[:100] if told else ""


def _printable(text: str) -> str:
    """Nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
