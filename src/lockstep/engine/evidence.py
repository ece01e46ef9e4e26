"""What is kept of a bad step: the state before it, the documented files, and a bundle that can be replayed."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep import rundir
from lockstep.engine import bundle, legacy, milestones
from lockstep.engine.autopsy import BadStep, run_again, scale_of
from lockstep.engine.parts import Parts
from lockstep.engine.state import capture
from lockstep.health.finding import Finding
from lockstep.runtime import env
from lockstep.runtime.group import Group
from lockstep.runtime.parallel import is_sharded, local, whole

logger = logging.getLogger(__name__)

FIRST = "first_failure"  # in the run folder, made by the replica that fails first


def keep(parts: Parts, bad: BadStep, finding: Finding) -> tuple[Finding, bool]:
    """Write what is worth keeping: the finding with the names of its files, and whether the state was saved.

    All ranks call it. A file that cannot be written is a line in the log: the bad step is the news.
    """
    files: dict[str, str] = {}
    of_loss = "nan_loss" if not _is_finite(finding.loss) else "nan_grad"
    name, dump = f"{of_loss}_step_{finding.step}", f"nan_{'loss_' * (of_loss == 'nan_loss')}debug_step_{finding.step}"
    replica = parts.config.system.mode == "replicas" and env.detect().world > 1
    first = not replica or _claim(parts)
    saved = _attempt("saving the state", lambda: milestones.save(parts, "" if replica else name, plain=True))
    folder = parts.config.training.checkpoint_dir
    if folder and not replica and saved:
        files["checkpoint"] = str(Path(folder) / f"{name}.pt")
    own = parts.evidence_dir
    if folder and replica and own and _attempt("saving the state", lambda: _own_state(parts, own / f"{name}.pt")):
        files["checkpoint"] = _publish(own / f"{name}.pt", Path(folder) / f"{name}.pt", first=first)
    if folder and parts.config.debug.enabled:
        target, mine = (
            Path(folder) / "debug" / f"{dump}.pkl",
            own / "debug" / f"{dump}.pkl" if replica and own else None,
        )
        if _attempt("the tensor dump", lambda: _dump(parts, bad, finding, mine or target)):
            files["debug"] = _publish(mine, target, first=first) if mine else str(target)
    if own and finding.guilty and parts.config.debug.bundle != "off":
        place = own / "faults" / f"step_{finding.step:06d}"
        if _attempt("the bundle", lambda: bundle.write(place, parts, bad, finding)):
            files["bundle"] = str(place)
    return finding.replace(files=files), saved and (parts.saves or replica)


def _is_finite(value: float) -> bool:
    return value - value == 0


def _attempt(what: str, action: Any) -> bool:
    try:
        action()
    except Exception as failure:
        logger.error("%s failed too: %s", what, failure)
        return False
    return True


def _claim(parts: Parts) -> bool:
    """Whether this replica is the first of the run that fails: one speaks at the documented place."""
    if parts.evidence_dir is None:
        return True
    try:
        (parts.evidence_dir.parents[1] / FIRST).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as failure:
        logger.debug("Cannot say who fails first: %s", failure)
    return True


def _own_state(parts: Parts, path: Path) -> None:
    state = capture(parts.stepper, parts.progress, parts.about)
    epoch = parts.progress.step * parts.batch_rows // parts.rows
    legacy.write(path, parts.stepper, state, epoch=epoch, config=parts.about["config"], group=Group())


def _publish(own: Path, documented: Path, *, first: bool) -> str:
    """A replica's file at the documented place as well, if it is the first to fail: the same file, not a second one."""
    if not first:
        return str(own)
    documented.parent.mkdir(parents=True, exist_ok=True)
    with rundir.replacing(documented) as temporary:
        try:
            os.link(own, temporary)
        except OSError:  # another disk
            shutil.copyfile(own, temporary)
    return str(documented)


def _dump(parts: Parts, bad: BadStep, finding: Finding, path: Path) -> None:
    """The documented pickle: plain numpy, for who has nothing else. Gradients are those of the step run again."""
    stepper, group = parts.stepper, parts.council.group
    with scale_of(stepper, bad.reading.loss_scale):
        run_again(stepper, bad)
    model = stepper.model
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    writer = 0 if sharded or group.world == 1 or not finding.ranks else finding.ranks[0]
    scale = bad.reading.loss_scale if stepper.precision.scaler else 1.0
    gradients = [(name, item.grad) for name, item in model.named_parameters() if item.grad is not None]
    content = {
        "step": finding.step,
        "parameters": _arrays(model.named_parameters(), keep=group.rank == writer),
        "gradients": _arrays(gradients, keep=group.rank == writer, divisor=scale),
        "buffers": _arrays(model.named_buffers(), keep=group.rank == writer),
    }
    if group.rank == writer:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rundir.replacing(path) as temporary, temporary.open("xb") as file:
            pickle.dump(content, file, protocol=4)


@torch.no_grad()
def _arrays(tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool, divisor: float = 1.0) -> Mapping[str, Any]:
    """Numpy has no bf16: such a tensor is stored as float32."""
    arrays: dict[str, Any] = {}
    for name, tensor in tensors:
        full = local(whole(tensor)).detach()
        if keep:
            wide = full.float() if full.dtype == torch.bfloat16 else full
            arrays[name] = (wide / divisor if divisor != 1.0 else wide).cpu().numpy().copy()
    return arrays


def forget(run: Path) -> None:
    """Before a run goes on: nobody has failed in it yet."""
    with contextlib.suppress(OSError):
        (run / FIRST).unlink(missing_ok=True)
