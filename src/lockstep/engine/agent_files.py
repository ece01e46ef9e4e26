"""The documented file of an agent, ckpt-<step>.pt: written beside the checkpoints, and a place to go on from."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.engine import legacy
from lockstep.engine.checkpoint import State
from lockstep.engine.legacy import EXTRA_KEY
from lockstep.engine.progress import Progress
from lockstep.errors import DataError
from lockstep.runtime import torch_file
from lockstep.runtime.marks import Marks

logger = logging.getLogger(__name__)

NAME = re.compile(r"ckpt-(\d{1,18})\.pt")
KEYS = ("step", "config", "model", "optimizer", "lr_sched")


def file_of(folder: Path, step: int) -> Path:
    return folder / f"ckpt-{step}.pt"


def newest(folder: Path) -> Path | None:
    """The file of the most steps, by their number: ckpt-10000 is newer than ckpt-9000."""
    found = _all(folder)
    return found[max(found)] if found else None


def _all(folder: Path) -> dict[int, Path]:
    named = [(NAME.fullmatch(path.name), path) for path in folder.glob("ckpt-*.pt")]
    return {int(match[1]): path for match, path in named if match and path.is_file()}


def write(path: Path, plain: legacy.Plain, state: State, *, config: Mapping[str, Any], link: Marks) -> None:
    """The file of this step, all of it or nothing; only then do the others go. By the rank that has the whole state."""
    content = {
        "step": int(state.run["progress"]["step"]),
        "config": dict(config),
        "model": legacy.on_cpu(state.model),
        "optimizer": plain.optimizer(state),
        "lr_sched": plain.scheduler(state),
        EXTRA_KEY: state.run,
    }
    legacy.publish(path, content, link=link)
    for other in (*_all(path.parent).values(), *path.parent.glob("ckpt-*.pt.tmp-*")):  # also what a kill has left
        if other != path:
            other.unlink(missing_ok=True)


def is_one(content: object) -> bool:
    """Whether the content of a .pt file is such a one."""
    return isinstance(content, dict) and all(key in content for key in KEYS)


def read(content: Mapping[str, Any], path: Path, *, names: list[str]) -> State:
    """The state in such a file, ours or that of another program. `names`: our parameters in optimizer order."""
    try:
        model = torch_file.unwrapped(content["model"], where=str(path))
        if other := sorted(set(names) ^ set(model)):
            raise DataError(
                f"the weights are of another model: {len(other)} tensors are in the model or in the file only: "
                f"{', '.join(other[:3])}",
                where=str(path),
                hint="train anew; histories of another program can be learnt from (traj_dir)",
            )
        if EXTRA_KEY not in content:
            return State(model, legacy.no_moments(model), _documented_run(content))
        return State(model, legacy.moments_of(content["optimizer"], names), dict(content[EXTRA_KEY]))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise DataError(f"not a checkpoint in the documented form: {error!r}", where=str(path)) from error


def _documented_run(content: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of a file of another program: enough to go on, not enough for the same bits."""
    logger.warning("%s", legacy.NOT_EXACT)
    step = int(content["step"])
    applied = legacy.applied_of(content.get("lr_sched"), step)
    progress = Progress(step=step, skipped=step - applied)
    return {"progress": progress.state_dict(), "applied_steps": applied, "loss_scale": None, "about": None}
