"""The runs of this folder: finding one by name, and what `lockstep` alone shows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.errors import NotFoundError
from lockstep.registry import suggest
from lockstep.rundir import MANIFEST, RunDir, read_json, refuse_export

RUNS = Path("runs")
SHOWN_RUNS = 5


def find_run(text: str) -> Path:
    """A run folder or checkpoint by path, by name in runs/, or `latest`."""
    for path in (Path(text), RUNS / text):
        try:
            refuse_export(path)
            if (path / "config.json").is_file() or (path / MANIFEST).is_file():
                return path.parent / path.readlink() if path.is_symlink() else path  # `latest` may soon be another
        except (OSError, ValueError):  # a name no file can have
            break
    names = [run.name for run in last_runs(RUNS)]
    raise NotFoundError(
        f"no run {text[:200]!r} here or in {RUNS}/",
        where="RUN",
        hint=suggest(text, names, most=SHOWN_RUNS) if names else "lockstep train llama demo makes one",
    )


def root_of(path: Path) -> Path:
    """The run folder of a run or of one of its checkpoints."""
    return path.resolve().parents[1] if (path / MANIFEST).is_file() else path


def family_of(path: Path) -> str:
    """What a run or one of its checkpoints is of, as its files say; empty where they do not."""
    for file in (root_of(path) / "config.json", path / "run.json"):
        try:
            told = read_json(file)
            return str(told.get("family") or told["about"]["family"])
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            continue
    return ""


def saved_identity(path: Path) -> dict[str, Any]:
    """The settings that decide the numbers, as the checkpoint says that will be gone on from; empty where none does.

    They are not those of the run's beginning where somebody has insisted on others (checkpoint.allow_mismatch).
    """
    for file in sorted(RunDir(path).checkpoints.glob("step_*/run.json"), reverse=True) or [path / "run.json"]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one will be passed over
            about = read_json(file)["about"]
            told = dict(about["identity"])
            if hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest() == about["identity_hash"]:
                return told
    return {}


def last_runs(out: Path) -> list[Path]:
    """Run folders, newest first."""
    found = [path.parent for path in out.glob("*/config.json") if path.is_file() and not path.parent.is_symlink()]
    return sorted(found, key=lambda path: (path / "config.json").stat().st_mtime, reverse=True)


def home() -> str:
    """The devices found, the last runs, some commands to try."""
    from lockstep.runtime.devices import visible_gpus

    gpus = visible_gpus()
    lines = [f"lockstep {__version__}", "", "devices"]
    lines += [f"  GPU{gpu.index}  {gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus]
    lines += [] if gpus else ["  no GPU: training runs on the CPU"]
    runs = last_runs(RUNS)[:SHOWN_RUNS]
    lines += ["", f"last runs in {RUNS}/"]
    lines += [f"  {run.name}  {_state(RunDir(run))}" for run in runs] or ["  none yet"]
    lines += ["", "try", f"  lockstep train llama {'production' if gpus else 'demo'}"]
    saved = next((run for run in runs if any(RunDir(run).checkpoints.glob(f"step_*/{MANIFEST}"))), None)
    lines += [f"  lockstep sample {saved.name}{prompt_of(saved)}"] if saved else ["  lockstep config list"]
    lines += ["  lockstep check --quick"] if gpus else []
    lines += ["  lockstep --help"]
    return "\n".join(lines)


def prompt_of(run: Path) -> str:
    """What its model can do something with: encoders fill blanks, agents walk unasked."""
    return {"mlm": ' "the [MASK] sat"', "ad": ""}.get(family_of(run), ' "The"')


def _state(run: RunDir) -> str:
    """How a run stands, from the last lines of its events."""
    from lockstep.report.standing import tail_events

    age = _age(time.time() - run.config.stat().st_mtime)
    if not run.events.is_file():
        return f"{age}, not started"
    for event in reversed(tail_events(run.events)):
        kind = event["kind"]
        if kind == "end":
            code = event.get("exit_code")
            loss = event.get("val_loss")
            done = "done" if code == 0 else f"stopped (exit {code})"
            return f"{age}, {done}" + (f", validation loss {loss:.4f}" if isinstance(loss, float) else "")
        if kind == "fault":
            return f"{age}, failed: {str(event.get('cause', '')).splitlines()[0][:80] if event.get('cause') else ''}"
        if kind == "step":
            return f"{age}, at step {event.get('step')}"
    return f"{age}, started"


def _age(seconds: float) -> str:
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {word} ago"
    return "just now"
