"""The documented .pt files: written beside the checkpoints, and readable as a place to go on from."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from lockstep import rundir
from lockstep.engine.checkpoint import State
from lockstep.engine.moments import MOMENTS
from lockstep.engine.progress import Progress
from lockstep.engine.step import Stepper
from lockstep.errors import DataError
from lockstep.runtime import torch_file
from lockstep.runtime.group import Group
from lockstep.runtime.marks import Marks
from lockstep.runtime.parallel import is_sharded, whole

logger = logging.getLogger(__name__)

EXTRA_KEY = "lockstep"  # beside the documented keys: what makes a resume from this file exact
STEP_NAME = re.compile(r"step_\d{1,18}\.pt")
NOT_EXACT = "Another program wrote this file: its weights and step are used, AdamW's moments begin at zero"


@dataclass(frozen=True)
class Plain:
    """What a documented file holds beside the tensors of a state, as it was when that was captured."""

    slots: Sequence[tuple[str, Sequence[str]]]  # in optimizer order: the parameter, and what is kept for it
    groups: Sequence[Mapping[str, Any]]
    applied: torch.Tensor
    lr: float

    def scheduler(self, state: State) -> dict[str, Any]:
        return {"last_epoch": state.run["applied_steps"], "_last_lr": [self.lr]}

    def optimizer(self, state: State) -> dict[str, Any]:
        """The state_dict of torch.optim.AdamW, with the moments of that state."""
        slots = {
            place: {"step": self.applied, **{kind: state.optimizer[f"{kind}.{name}"].cpu() for kind in kinds}}
            for place, (name, kinds) in enumerate(self.slots)
        }
        return {"state": slots, "param_groups": [dict(group) for group in self.groups]}


def plain_of(stepper: Stepper) -> Plain:
    """That of a run, now."""
    live = stepper.optimizer.state_dict()
    kinds = [[kind for kind in live["state"][place] if kind != "step"] for place in sorted(live["state"])]
    slots = list(zip(names_in_order(stepper), kinds, strict=True))
    applied = stepper.optimizer.applied.cpu().clone()
    return Plain(slots, live["param_groups"], applied, stepper.optimizer.lr.item())


def write(
    path: Path, stepper: Stepper, state: State, *, epoch: int, config: dict[str, Any], group: Group | None = None
) -> Path:
    """One documented file, now: all of it or nothing under its final name. All ranks call it, rank 0 writes."""
    group = group or Group()
    if any(is_sharded(tensor) for tensor in state.model.values()):
        state = _whole(stepper, state, keep=group.rank == 0)
    plain, link = plain_of(stepper), group.told(stepper.link)
    group.together(lambda: put(path, plain, state, epoch=epoch, config=config, link=link))
    return path


def _whole(stepper: Stepper, state: State, *, keep: bool) -> State:
    """The state put together from the shards of all ranks, on the rank that keeps it; tensor by tensor."""

    def gathered(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            stepper.link.enter("save")
            all_of_it = whole(tensor)
            if keep:
                kept[name] = all_of_it.cpu()
        return kept

    return State(gathered(state.model), gathered(state.optimizer), state.run)


def names_in_order(stepper: Stepper) -> list[str]:
    """The model's parameters in optimizer order, which is how a documented file numbers them."""
    names = {id(parameter): name for name, parameter in stepper.model.named_parameters()}
    return [names[id(parameter)] for parameter in stepper.optimizer.parameters]


class Marked:
    """A file of which each piece that is written is a sign of life."""

    failure: OSError | None = None  # what torch, which closes its archive after it, speaks of as a wrong position

    def __init__(self, file: IO[bytes], link: Marks) -> None:
        self._file, self._link = file, link

    def write(self, data: bytes) -> int:
        self._link.enter("save")
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self._file.flush()


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a file holds loads anywhere."""
    return {name: tensors[name].cpu() for name in tensors}


def put(path: Path, plain: Plain, state: State, *, epoch: int, config: Mapping[str, Any], link: Marks) -> None:
    """The file of a state that is whole, by the rank that has it."""
    progress = state.run["progress"]
    content: dict[str, Any] = {
        "global_step": progress["step"],
        "epoch": epoch,
        "model_state_dict": on_cpu(state.model),
        "optimizer_state_dict": plain.optimizer(state),
        "scheduler_state_dict": plain.scheduler(state),
        "best_loss": progress["best_loss"],
        "config": dict(config),
        EXTRA_KEY: state.run,
    }
    if state.run["loss_scale"]:
        content["scaler_state_dict"] = state.run["loss_scale"]
    publish(path, content, link=link)


def publish(path: Path, content: Mapping[str, Any], *, link: Marks, doing: str = "saving a checkpoint") -> None:
    """Such a content as a file: all of it or nothing under its final name."""
    try:
        with rundir.replacing(path) as temporary, temporary.open("xb") as file:
            marked = Marked(file, link)
            try:
                torch.save(dict(content), cast("IO[bytes]", marked))
            except RuntimeError as error:
                raise marked.failure or OSError(str(error)) from error
    except OSError as error:
        raise rundir.io_error(error, path, doing=doing, need_bytes=bytes_of(content)) from error


def forget_oldest(record: Path, newest: Path, *, keep: int) -> None:
    """Note in a run's record that it has written this file, and let the oldest of the others there go."""
    try:
        noted = {**written(record, newest.parent), newest.name: newest.stat().st_mtime_ns}
        for name in [*noted][:-keep]:
            (newest.parent / name).unlink(missing_ok=True)
            del noted[name]
        rundir.write_json(record, noted)
    except OSError as error:
        raise rundir.io_error(error, record, doing="forgetting the oldest .pt file") from error


def written(record: Path, folder: Path) -> dict[str, int]:
    """The files of a run's record that lie in a folder as it has left them, the oldest first.

    What another run has put in their place is that run's; and of what the record may name no other file is ever meant.
    """
    noted: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for name, changed in rundir.read_json(record).items():
            with contextlib.suppress(OSError):
                if STEP_NAME.fullmatch(name) and (folder / name).stat().st_mtime_ns == changed:
                    noted[name] = changed
    return noted


def bytes_of(content: object) -> int:
    """Of a file with this content, about."""
    if isinstance(content, Mapping):
        known = cast("Mapping[object, object]", content)
        return sum(len(str(key)) + bytes_of(value) for key, value in known.items())
    return content.nbytes if isinstance(content, torch.Tensor) else len(repr(content))


def gathered(
    stepper: Stepper, state: State, weights: Iterable[tuple[str, torch.Tensor]], *, keep: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and the optimizer's state on the CPU, tensor by tensor: all ranks take part, one keeps them."""

    def kept(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            stepper.link.enter("save")
            if keep:
                found[name] = tensor.cpu().contiguous()
        return found

    with torch.no_grad():
        model = kept(weights)
        moments = kept((name, whole(moment)) for name, moment in state.optimizer.items())
    if not keep:
        return {}, {}
    optimizer = stepper.optimizer.state_dict()
    for place, name in enumerate(names_in_order(stepper)):
        slot = optimizer["state"][place]
        slot |= {kind: moments[f"{kind}.{name}"] for kind in slot if f"{kind}.{name}" in moments}
        slot["step"] = slot["step"].cpu()
    return model, optimizer


def read(content: Any, path: Path, names: list[str]) -> State:
    """The state in a documented file. `names`: the model's parameters in optimizer order."""
    try:
        model = torch_file.unwrapped(content["model_state_dict"], where=str(path))
        if EXTRA_KEY not in content:
            return State(model, no_moments(model), _documented_run(content))
        return State(model, moments_of(content["optimizer_state_dict"], names), dict(content[EXTRA_KEY]))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise DataError(f"not a checkpoint in the documented form: {error!r}", where=str(path)) from error


def moments_of(optimizer: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """The moments that lockstep wrote into a documented file, by the names of the parameters."""
    slots: Mapping[int, Mapping[str, torch.Tensor]] = optimizer["state"]
    pairs = [(name, slots[place]) for place, name in enumerate(names) if place in slots]  # a difference is found later
    return {f"{kind}.{name}": slot[kind] for name, slot in pairs for kind in MOMENTS}


def no_moments(model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moments of zero: how another program numbers its parameters cannot be known."""
    nothing = torch.zeros(())  # expanded to any size, without memory: the sizes in the file are not checked yet
    return {f"{kind}.{name}": nothing.expand(weight.shape) for name, weight in model.items() for kind in MOMENTS}


def applied_of(scheduler: Mapping[str, Any] | None, step: int) -> int:
    """Steps that the rate has moved on by. Where several processes moved it, or nobody says: all of them."""
    return min(step, int((scheduler or {}).get("last_epoch", step)))


def finite(value: Any) -> float | None:
    """A loss; None where there was none yet, for which others write infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def _documented_run(content: dict[str, Any]) -> dict[str, Any]:
    """The counts that a file of another program holds: enough to go on, not enough for the same bits."""
    logger.warning("%s", NOT_EXACT)
    step = int(content["global_step"])
    applied = applied_of(content.get("scheduler_state_dict"), step)
    scaler = content.get("scaler_state_dict")
    scale = (
        {"scale": float(scaler["scale"]), "growth_tracker": int(scaler.get("_growth_tracker", 0))} if scaler else None
    )
    progress = Progress(step=step, skipped=step - applied, best_loss=finite(content.get("best_loss")))
    return {"progress": progress.state_dict(), "applied_steps": applied, "loss_scale": scale, "about": None}
