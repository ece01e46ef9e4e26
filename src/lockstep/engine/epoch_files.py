"""The documented files of an epoch: checkpoint_epoch_<N>.pt and stats_epoch_<N>.json, written and read again.

Weights have the names of LLaDA's own files, so that `model.module.load_state_dict(checkpoint["model_state_dict"])`
works on a model of that kind wrapped by DDP, after a plain `torch.load`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep import rundir
from lockstep.engine import legacy
from lockstep.engine.checkpoint import State
from lockstep.engine.legacy import EXTRA_KEY
from lockstep.engine.parts import Parts
from lockstep.engine.progress import Progress
from lockstep.engine.state import capture
from lockstep.errors import DataError
from lockstep.models import hf_names, lora
from lockstep.models.shapes import AnyShape
from lockstep.runtime import torch_file

logger = logging.getLogger(__name__)

EVERY = 5  # epochs: a file of each such one, beside those of the best and of the last
Losses = list[float | None]


def write(parts: Parts) -> Path | None:
    """Both files of the epoch that has just ended, if it is to have them. All ranks call it, rank 0 writes."""
    told = figures(parts)
    folder, group = Path(str(parts.config.report.results_dir)), parts.council.group
    path = folder / f"checkpoint_epoch_{told['epoch']}.pt"
    due = group.together(lambda: (path.is_file() or wanted(parts, told["val_losses"])) and not is_there(path, told))
    if not due:  # what a file that is there tells may be of half this epoch, where early stopping ended
        return None
    state = capture(parts.stepper, parts.progress, parts.about)
    model: Any = parts.stepper.model
    plain = lora.merged(model)  # as a plain model has them
    weights, optimizer = legacy.gathered(parts.stepper, state, plain, keep=group.rank == 0)
    content = {
        **told,
        "model_state_dict": {_their_name(model.shape, name): tensor for name, tensor in weights.items()},
        "optimizer_state_dict": optimizer,
        "scheduler_state_dict": {
            "last_epoch": state.run["applied_steps"],
            "_last_lr": [parts.stepper.optimizer.lr.item()],
        },
        EXTRA_KEY: state.run,
    }
    group.together(lambda: _write(path, content, told, parts))
    return path


def figures(parts: Parts) -> dict[str, Any]:
    """What both files tell; a run that does not count in epochs has made one."""
    progress = parts.progress
    train, val = [*progress.train_losses], [*progress.val_losses]
    if not train:
        train, val = [progress.mean_loss], [parts.known_val_loss]
    model: Any = parts.stepper.model
    mask: int | None = getattr(parts.stepper.objective, "mask", None)
    return {
        "epoch": len(train),
        "train_losses": train,
        "val_losses": val,
        "vocab_size": model.shape.vocab_size,
        "mask_token": mask,
    }


def wanted(parts: Parts, val_losses: Losses) -> bool:
    """Of the best epoch so far, of every fifth, and of the last."""
    *before, last = val_losses
    best = last is not None and all(loss is None or last < loss for loss in before)
    return best or parts.has_ended or len(val_losses) % EVERY == 0


def is_there(path: Path, told: Mapping[str, Any]) -> bool:
    """Whether this very epoch was written before: by a run that goes on from its end, or after a kill."""
    try:
        return path.is_file() and json.loads(stats_of(path).read_text(encoding="utf-8")) == told
    except (OSError, ValueError):
        return False


def stats_of(path: Path) -> Path:
    return path.with_name(f"stats_{path.stem.removeprefix('checkpoint_')}.json")


def _their_name(shape: AnyShape, name: str) -> str:
    (one,) = hf_names.their_names(shape, name)
    return one


def _write(path: Path, content: Mapping[str, Any], told: Mapping[str, Any], parts: Parts) -> None:
    doing = "writing the results"
    legacy.publish(path, content, link=parts.council.group.told(parts.link), doing=doing)
    try:
        rundir.write_json(stats_of(path), dict(told))
    except OSError as error:
        raise rundir.io_error(error, path, doing=doing) from error


# ------------------------------------------------------------------------------------------------------------- reading


def is_one(content: object) -> bool:
    """Whether the content of a .pt file is that of an epoch."""
    return isinstance(content, dict) and "model_state_dict" in content and "train_losses" in content


def read(content: Mapping[str, Any], path: Path, *, shape: AnyShape, names: list[str]) -> State:
    """The state in such a file, ours or that of another program. `names`: our parameters in optimizer order."""
    if any(name.endswith(lora.ADDITIONS) for name in names):
        raise DataError(
            "holds whole weights, and this run trains additions to others", where=str(path), hint="--resume auto"
        )
    try:
        stored = torch_file.unwrapped(content["model_state_dict"], where=str(path))
        theirs = {name: _their_name(shape, name) for name in names}
        if missing := sorted(set(theirs.values()) ^ set(stored)):
            what = f"{len(missing)} tensors are in the model or in the file only: {', '.join(missing[:3])}"
            raise DataError(f"the weights are of another model: {what}", where=str(path))
        model = {name: stored[their] for name, their in theirs.items()}
        if EXTRA_KEY not in content:
            return State(model, legacy.no_moments(model), _documented_run(content))
        moments = legacy.moments_of(content["optimizer_state_dict"], names)
        return State(model, moments, dict(content[EXTRA_KEY]))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise DataError(f"not a checkpoint in the documented form: {error!r}", where=str(path)) from error


def _documented_run(content: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of a file of another program: enough to go on, not enough for the same bits."""
    logger.warning("%s", legacy.NOT_EXACT)
    steps = int(content["scheduler_state_dict"]["last_epoch"])
    losses = {name: [legacy.finite(loss) for loss in content[name]] for name in ("train_losses", "val_losses")}
    progress = Progress(step=steps, train_losses=[*losses["train_losses"]], val_losses=[*losses["val_losses"]])
    return {"progress": progress.state_dict(), "applied_steps": steps, "loss_scale": None, "about": None}
