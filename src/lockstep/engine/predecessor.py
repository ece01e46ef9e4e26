"""What an earlier run has decided: with `checkpoint.resume` its dataset, commit and tokenizer stand. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import identity
from lockstep.engine.options import AutoRows
from lockstep.rundir import read_json
from lockstep.runtime import hub

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.data.options import DataOptions

NAMES = ("dataset_name", "data_path", "tokenizer_name")  # settings of `data` that may be open
AUTO_DATASETS = ("wikitext", "builtin")
SPLIT = ("batch_size", "grad_accum_nums")


def is_open(name: str, value: str | None) -> bool:
    """Whether such a value leaves something to be decided."""
    if name == "dataset_name":
        return value == "auto" or "|" in (value or "")
    return value == "-" if name == "data_path" else value in (None, "auto")


def find(config: RunConfig, options: DataOptions) -> dict[str, str | None]:
    """What the run that is to be resumed has taken; {}: no run, or none that this configuration could mean.

    Whether it is really resumed is decided later, when its checkpoints are looked at.
    """
    asked = config.checkpoint.resume
    if asked is None:
        return {}
    if asked != "auto":
        saved = _read(_run_of(Path(asked), Path(config.run.out)))
        return taken(options, saved) or {} if saved else {}
    runs = [path.parent for path in Path(config.run.out).glob("*/config.json") if not path.parent.is_symlink()]
    found = [saved for run in runs if any(run.glob("checkpoints/step_*")) and (saved := _read(run))]
    for saved in sorted(found, key=lambda saved: saved["created"], reverse=True):
        if _is_alike(config, saved) and (values := taken(options, saved)) is not None:
            return values
    return {}


def taken(options: DataOptions, saved: Mapping[str, Any]) -> dict[str, str | None] | None:
    """The values of a saved run, where these options leave them open; None: they ask for other ones."""
    data, values = saved["config"]["data"], dict[str, str | None]()
    for name in NAMES:
        ours, theirs = getattr(options, name), data[name]
        was_open = str(saved["origins"].get(f"data.{name}", "")).startswith("auto")
        if name == "dataset_name":
            fits = _could_be(options, theirs, was_open=was_open)
        elif name == "tokenizer_name" and is_open(name, ours):
            fits = was_open or theirs == ours
        else:  # a path may have been dropped with a list in which the text came later
            fits = theirs == ours or (name == "data_path" and theirs is None and was_open)
        if not fits:
            return None
        if ours != theirs:
            values[name] = theirs
    return values


def _could_be(options: DataOptions, theirs: str, *, was_open: bool) -> bool:
    """Whether a dataset that a run has taken is one that these options mean, at whatever commit."""
    ours, head = options.dataset_name, theirs.partition("@")[0]
    if is_open("dataset_name", ours):
        meant = [part.strip().partition("@")[0] for part in ours.split("|")]
        if ours == "auto":
            meant = ["text"] if options.data_path is not None else list(AUTO_DATASETS)
        return was_open and head in meant
    name, _, revision = ours.partition("@")
    pinned = all(hub.COMMIT.fullmatch(commit) for commit in theirs.partition("@")[2].split(","))
    return ours == theirs or (name == head and pinned and revision in ("", "main"))


def _is_alike(config: RunConfig, saved: Mapping[str, Any]) -> bool:
    """Whether all else that decides the numbers is the same; `auto` of ours was something by then."""
    open_rows = isinstance(config.training.batch_size, AutoRows)
    if open_rows and _rows(saved["config"]["training"]) != _rows(vars(config.training)):
        return False
    for key, value in identity(config).items():
        section, _, name = key.partition(".")
        if (section == "data" and name in NAMES) or (open_rows and name in SPLIT):
            continue
        theirs = saved["config"].get(section)
        theirs = theirs.get(name) if name and isinstance(theirs, dict) else theirs
        if value not in ("auto", theirs):
            return False
    return True


def _rows(training: Mapping[str, Any]) -> int:
    """Of a step on one worker."""
    return math.prod(int(training[name]) for name in SPLIT)


def _run_of(path: Path, out: Path) -> Path:
    """The run folder that a path, a name or one checkpoint means."""
    if not path.exists() and (out / path).is_dir():
        path = out / path
    return path if (path / "config.json").is_file() else path.resolve().parent.parent


def _read(run: Path) -> dict[str, Any] | None:
    """The record of a run; None: there is none to be read."""
    try:
        saved: dict[str, Any] = read_json(run / "config.json")
        known = all(name in saved["config"]["data"] for name in NAMES) and isinstance(saved["origins"], dict)
        return {**saved, "created": float(saved["created"])} if known else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
