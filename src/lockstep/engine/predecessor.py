"""Which earlier run `checkpoint.resume` means, and what that run resolved. Torch-free: the launcher asks it first.

`auto` compares what was asked with what was asked: it means the newest run with a checkpoint that was given the same
settings, before any `auto` value was resolved. The run that is found keeps its dataset, commit and tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import rundir
from lockstep.config import saved
from lockstep.config.load import from_dict, identity, identity_diff
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

NAMES = ("dataset_name", "data_path", "tokenizer_name")  # settings of `data` that may be open
AUTO_DATASETS = ("wikitext", "builtin")
PINNED = re.compile(r"(.+)@[0-9a-f]{40}(,[0-9a-f]{40})*")


@dataclass(frozen=True)
class EarlierRun:
    """A run that saved a checkpoint."""

    folder: Path
    created: float
    asked: Mapping[str, Any]  # its identity settings as they were given, before anything was resolved
    data: Mapping[str, Any]  # its sections `data` and `training` as they were resolved
    training: Mapping[str, Any]

    def differences(self, asked: Mapping[str, Any]) -> list[str]:
        """One line per setting that was asked for otherwise."""
        return identity_diff(_normal(self.asked), _normal(asked), place=f"in {self.folder.name}")


def is_open(name: str, value: str | None) -> bool:
    """Whether such a value leaves something to be decided."""
    if name == "dataset_name":
        return value == "auto" or "|" in (value or "")
    return name == "tokenizer_name" and value in (None, "auto")


def resolved_before(config: RunConfig, asked: Mapping[str, Any]) -> dict[str, str | None]:
    """The names in `data` as the run to be resumed resolved them, where they differ; {} if no run is meant."""
    run = _meant(config, asked)
    return {name: run.data[name] for name in NAMES if run.data[name] != getattr(config.data, name)} if run else {}


def rows_before(config: RunConfig, asked: Mapping[str, Any]) -> int:
    """The micro-batch of the run to be resumed, if a step had as many rows; 0 if no such run is meant."""
    run = _meant(config, asked)
    rows = run.training["batch_size"] if run else 0
    count = run.training["grad_accum_nums"] if run else 0
    return rows if rows * count == config.training.batch_size * config.training.grad_accum_nums else 0


def _meant(config: RunConfig, asked: Mapping[str, Any]) -> EarlierRun | None:
    """The run that will be resumed; None if there is none, or if it was asked for other data."""
    resume, out = config.checkpoint.resume, Path(config.run.out)
    if resume is None:
        return None
    if resume == "auto" and config.run.name is None:
        return next((run for run in earlier_runs(out, config.family) if not run.differences(asked)), None)
    run = read(out / str(config.run.name) if resume == "auto" else _run_of(Path(resume), out))
    names = {f"data.{name}" for name in NAMES}
    return run if run and not names & {line.partition(":")[0] for line in run.differences(asked)} else None


def earlier_runs(out: Path, family: str) -> list[EarlierRun]:
    """The runs of a family that saved a checkpoint, newest first."""
    folders = [path.parent for path in out.glob("*/config.json") if not path.parent.is_symlink()]
    runs = [run for folder in folders if (run := read(folder)) and run.asked["family"] == family]
    return sorted(runs, key=lambda run: run.created, reverse=True)


def read(folder: Path) -> EarlierRun | None:
    """The record of a run; None if it cannot be read, or if nothing was saved."""
    try:
        record: dict[str, Any] = rundir.read_json(folder / rundir.CONFIG)
        data = record["config"]["data"]
        if not all(name in data for name in NAMES) or not rundir.saved_checkpoints(folder / "checkpoints"):
            return None
        training = record["config"]["training"]
        return EarlierRun(folder, float(record["created"]), _asked_of(record), data, training)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LockstepError):
        return None


def _asked_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as given: recorded by the run; in older runs, those whose origin is the user or a preset."""
    family, tree, origins = str(record["family"]), record["config"], record["origins"]
    if isinstance(record.get("asked"), dict):
        return saved.read_identity(record["asked"], family)
    given: dict[str, Any] = {"family": family}
    for key, origin in origins.items():
        section, _, name = key.partition(".")
        if name and not str(origin).startswith("auto"):
            given.setdefault(section, {})[name] = tree[section][name]
    asked = identity(from_dict(saved.read_tree(given, family)))
    if str(origins.get("training.batch_size", "")).startswith("auto"):
        rows = tree["training"]["batch_size"] * tree["training"]["grad_accum_nums"]
        asked |= {"training.batch_size": "auto", "training.grad_accum_nums": rows}
    if pinned := PINNED.fullmatch(asked["data.dataset_name"]):  # the commit was added when the name was resolved
        asked["data.dataset_name"] = pinned[1]
    return asked


def _normal(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The same with one word for a tokenizer that is left open."""
    return {**asked, "data.tokenizer_name": asked.get("data.tokenizer_name") or "auto"}


def _run_of(path: Path, out: Path) -> Path:
    """The run folder that a path, a name or one checkpoint means."""
    if not path.exists() and (out / path).is_dir():
        path = out / path
    return path if (path / rundir.CONFIG).is_file() else path.resolve().parent.parent
