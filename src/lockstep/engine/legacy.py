"""The documented .pt files: written beside the checkpoints, and readable as a place to go on from."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch

from lockstep import rundir
from lockstep.engine.checkpoint import State
from lockstep.engine.optimizer import MOMENTS
from lockstep.engine.step import Stepper
from lockstep.errors import DataError, NotFoundError

logger = logging.getLogger(__name__)

EXTRA_KEY = "lockstep"  # beside the documented keys: what makes a resume from this file exact


def write(path: Path, stepper: Stepper, state: State, *, epoch: int, config: dict[str, Any]) -> Path:
    """One documented file: all of it or nothing under its final name."""
    progress = state.run["progress"]
    content: dict[str, Any] = {
        "global_step": progress["step"],
        "epoch": epoch,
        "model_state_dict": dict(state.model),
        "optimizer_state_dict": stepper.optimizer.state_dict(),
        "scheduler_state_dict": {"last_epoch": state.run["applied_steps"], "_last_lr": [stepper.optimizer.lr.item()]},
        "best_loss": progress["best_loss"],
        "config": config,
        EXTRA_KEY: state.run,
    }
    if state.run["loss_scale"]:
        content["scaler_state_dict"] = state.run["loss_scale"]
    try:
        with rundir.replacing(path) as temporary:
            torch.save(content, temporary)
    except (OSError, RuntimeError) as error:
        os_error = error if isinstance(error, OSError) else OSError(str(error))
        raise rundir.io_error(os_error, path, doing="saving a checkpoint") from error
    return path


def read(path: Path, names: list[str]) -> State:
    """The state in a documented file. `names`: the model's parameters in optimizer order."""
    if not path.is_file():
        raise NotFoundError("no such checkpoint", where=str(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        run = dict(content[EXTRA_KEY])
        slots = content["optimizer_state_dict"]["state"]
        moments = {f"{kind}.{name}": slots[index][kind] for index, name in enumerate(names) for kind in MOMENTS}
        return State(content["model_state_dict"], moments, run)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"foreign or damaged file, refused: {reason[:200]}", where=str(path)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"not a checkpoint of lockstep: no {error}", where=str(path)) from error
