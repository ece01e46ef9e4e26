"""The documented result files of each family. Each appears whole or not at all.

The usual ones are four: weights, vocabulary, loss history and its picture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep import rundir
from lockstep.engine import epoch_files
from lockstep.engine.parts import Parts
from lockstep.models.encoder import Encoder
from lockstep.models.microbert import seed_names
from lockstep.report import history
from lockstep.runtime.parallel import whole

logger = logging.getLogger(__name__)

VOCABULARY, PICTURE = "tokenizer.json", "training_history.png"


def write(parts: Parts) -> Path | None:
    """The files of the family, as the run stands; where they lie, None if none was due. All ranks call it."""
    return WRITERS.get(parts.config.family, _write_usual)(parts)


def _write_usual(parts: Parts) -> Path:
    assert parts.config.report.results_dir
    folder, group = Path(parts.config.report.results_dir), parts.council.group
    weights = _weights(parts, keep=group.rank == 0)
    group.together(lambda: _write(folder, weights, parts))
    return folder


def files(family: str) -> tuple[str, ...]:
    """What the result folder of a family holds, as patterns."""
    if family in WRITERS:
        return "checkpoint_epoch_*.pt", "stats_epoch_*.json"
    return f"{family}_model.pth", VOCABULARY, f"{family}_training_history.json", PICTURE


def probe(folder: Path, family: str) -> None:
    """Make sure, before training, that they can be written; what an attempt that was killed has left goes."""
    rundir.probe(folder, key="report.results_dir")
    for name in files(family):
        for left in folder.glob(f"{name}.tmp-*"):
            left.unlink(missing_ok=True)


def losses(parts: Parts) -> dict[str, list[float | None]]:
    """One training and one validation loss for each epoch; who does not count in epochs has made one."""
    progress = parts.progress
    if parts.epochs or progress.train_losses:
        return {"train_losses": [*progress.train_losses], "val_losses": [*progress.val_losses]}
    return {"train_losses": [progress.mean_loss], "val_losses": [parts.known_val_loss]}


def _weights(parts: Parts, *, keep: bool) -> dict[str, torch.Tensor]:
    """The weights under their documented names, put together from the shards of all ranks tensor by tensor."""
    kept: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in parts.stepper.model.named_parameters():
            parts.link.enter("save")
            all_of_it = whole(parameter.detach())
            if keep:
                kept[name] = all_of_it.cpu().contiguous()
    return _documented(parts, kept) if keep else kept


def _documented(parts: Parts, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as other programs know them: encoders under seed C's names, the rest under their own."""
    model: Any = parts.stepper.model
    return seed_names(model, weights) if isinstance(model, Encoder) else weights


def _write(folder: Path, weights: dict[str, torch.Tensor], parts: Parts) -> None:
    family, told = parts.config.family, losses(parts)
    model, vocabulary, figures, picture = (folder / name for name in files(family))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rundir.replacing(model) as temporary, temporary.open("xb") as file:
            torch.save(weights, file)
        if parts.vocabulary:  # agents have none
            rundir.write_json(vocabulary, dict(parts.vocabulary))
        rundir.write_json(figures, told)
        if drawn := _drawn(told, family):
            rundir.write_bytes(picture, drawn)
    except (OSError, RuntimeError) as error:
        os_error = error if isinstance(error, OSError) else OSError(str(error))
        raise rundir.io_error(os_error, folder, doing="writing the results") from error


def _drawn(told: dict[str, list[float | None]], family: str) -> bytes | None:
    """The picture. Whatever keeps another program's package from drawing ends no training."""
    try:
        return history.picture(told["train_losses"], told["val_losses"], title=f"{family.upper()} training")
    except Exception as error:
        logger.warning("No %s: %s: %s", PICTURE, type(error).__name__, error)
        return None


WRITERS: dict[str, Callable[[Parts], Path | None]] = {"llada": epoch_files.write}  # of files that are not the usual
