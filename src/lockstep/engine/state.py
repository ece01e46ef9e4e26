"""Between the live objects of a run and the plain state that is saved: what is in it, and how it is put back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.engine.checkpoint import State
from lockstep.engine.progress import Progress
from lockstep.engine.shards import Stored
from lockstep.engine.step import Stepper
from lockstep.errors import DataError
from lockstep.health.fingerprint import combine, digest_tensor
from lockstep.runtime.parallel import flat_offset, like, local, offset, sum_over_shards

logger = logging.getLogger(__name__)

FORMAT = 1  # of what is saved


def capture(stepper: Stepper, progress: Progress, about: Mapping[str, Any]) -> State:
    """Everything a resume needs, and `about`: what the state belongs to (configuration, data, versions).

    No generator is saved: every draw is keyed by (seed, step, micro-batch), and the order of rows by position.
    """
    applied = int(stepper.optimizer.applied.item())
    assert applied == progress.step - progress.skipped, "only a whole step is saved"
    live = stepper.optimizer.moments()
    parameters = trained(stepper.model)
    moments = {
        f"{kind}.{name}": like(parameter, kept)
        for name, parameter in parameters.items()
        for kind, kept in live[id(parameter)].items()
    }
    run = {
        "format": FORMAT,
        "progress": progress.state_dict(),
        "applied_steps": applied,
        "loss_scale": stepper.precision.scaler.state_dict() if stepper.precision.scaler else None,
        "optimizer_states": stepper.optimizer.kind,
        "about": dict(about),
    }
    return State({name: parameter.detach() for name, parameter in parameters.items()}, moments, run)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn: frozen ones are no part of a state, they are read again from where they came."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def restore(stepper: Stepper, state: State) -> Progress:
    """Put a saved state back, bit for bit. A state that is not one of this model is refused before anything changes.

    Of a model in shards each rank reads its rows only, however many ranks have saved them.
    """
    parameters = trained(stepper.model)
    live = stepper.optimizer.moments()
    progress = _check_counts(state)
    _check_kind(state, stepper.optimizer.kind)
    moments = {
        f"{kind}.{name}": (parameter.shape[0], *kept.shape[1:])
        for name, parameter in parameters.items()
        for kind, kept in live[id(parameter)].items()
    }
    _check_tensors({name: tuple(parameter.shape) for name, parameter in parameters.items()}, moments, state)
    for name, parameter in parameters.items():
        local(parameter).copy_(_part(state.model, name, parameter))
        for kind, kept in live[id(parameter)].items():
            kept.copy_(_part(state.optimizer, f"{kind}.{name}", parameter))
    stepper.optimizer.applied.fill_(state.run["applied_steps"])
    if stepper.precision.scaler and state.run["loss_scale"]:
        stepper.precision.scaler.load_state_dict(state.run["loss_scale"])
    elif stepper.precision.scaler:
        logger.warning("The checkpoint has no loss scale: starting from %g", stepper.precision.scaler.scale.item())
    return progress


def _part(tensors: Mapping[str, torch.Tensor], name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The rows of a saved tensor that this rank holds."""
    start, count = offset(parameter)[0], local(parameter).shape[0]
    if isinstance(tensors, Stored):
        return tensors.rows(name, start, count)
    return tensors[name][start : start + count]


@torch.no_grad()
def digest(model: nn.Module) -> str:
    """The fingerprint of what is trained: the same on every rank, in every mode and at every world size."""
    return digest_of(list(trained(model).items()))


@torch.no_grad()
def digest_of(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The fingerprint of some parameters, whole or in shards. All ranks must ask."""
    sums = torch.stack([digest_tensor(local(parameter), flat_offset(parameter)) for _, parameter in named])
    sums = sum_over_shards(named[0][1], sums).tolist()
    return combine(
        (name, str(parameter.dtype), tuple(parameter.shape), *both)
        for (name, parameter), both in zip(named, sums, strict=True)
    )


def _check_counts(state: State) -> Progress:
    try:
        progress = Progress.from_state_dict(state.run["progress"])
        counts = (progress.step, progress.tokens, progress.skipped, progress.overflow_run, progress.stale_steps)
        counts += (progress.epoch_targets,)
        whole = all(isinstance(count, int) and count >= 0 for count in (*counts, state.run["applied_steps"]))
        losses = (progress.smoothed_loss, progress.best_loss, progress.best_val_loss)
        losses += (*progress.train_losses, *progress.val_losses)
        real = all(loss is None or isinstance(loss, float) for loss in losses)
        scale = state.run["loss_scale"]
        real &= scale is None or all(isinstance(scale[key], int | float) for key in ("scale", "growth_tracker"))
    except (KeyError, TypeError) as error:
        raise DataError(f"the checkpoint's counts cannot be read: {error}") from None
    real &= len(progress.train_losses) == len(progress.val_losses)
    if not whole or not real or state.run["applied_steps"] != progress.step - progress.skipped:
        raise DataError(f"the checkpoint's counts do not agree: {progress}, {state.run['applied_steps']} applied")
    return progress


def _check_kind(state: State, kind: str) -> None:
    """What a later version writes, or moments kept in other numbers, would be read and mean something else."""
    if (written := state.run.get("format", FORMAT)) != FORMAT:  # documented .pt files do not say
        raise DataError(f"the checkpoint has format {str(written)[:20]}, this version reads {FORMAT}")
    saved = state.run.get("optimizer_states", "fp32")  # that of checkpoints from before there was a choice
    if saved != kind:
        raise DataError(
            f"the checkpoint keeps AdamW's moments in {str(saved)[:20]}, this run in {kind}",
            where="training.optimizer_states",
            hint=f"--training.optimizer-states {str(saved)[:20]}",
        )


def _check_tensors(weights: Mapping[str, Any], moments: Mapping[str, Any], state: State) -> None:
    for kind, tensors, wanted in (("weights", state.model, weights), ("moments", state.optimizer, moments)):
        found = {name: tensors.shape(name) for name in tensors} if isinstance(tensors, Stored) else tensors
        wrong = [
            f"{name}: {_shape_of(found.get(name))} in the checkpoint, {_shape_of(wanted.get(name))} in the model"
            for name in sorted(wanted.keys() | found.keys(), key=str)
            if _shape_of(found.get(name)) != _shape_of(wanted.get(name))
        ]
        if wrong:
            raise DataError(f"the {kind} are of another model: {'; '.join(wrong[:3])} ({len(wrong)} differ)")


def _shape_of(thing: Any) -> str:
    shape = thing.shape if isinstance(thing, torch.Tensor) else thing
    return "nothing" if shape is None else str(tuple(shape)) if isinstance(shape, tuple) else type(thing).__name__
