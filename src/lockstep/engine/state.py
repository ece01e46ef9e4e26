"""Between the live objects of a run and the plain state that is saved: what is in it, and how it is put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.engine.checkpoint import State
from lockstep.engine.optimizer import MOMENTS
from lockstep.engine.progress import Progress
from lockstep.engine.step import Stepper
from lockstep.errors import DataError


def capture(stepper: Stepper, progress: Progress, about: Mapping[str, Any]) -> State:
    """Everything a resume needs, and `about`: what the state belongs to (configuration, data, versions).

    No generator is saved: every draw is keyed by (seed, step, micro-batch), and the order of rows by position.
    """
    live = stepper.optimizer.moments()
    moments = {
        f"{kind}.{name}": live[id(parameter)][kind]
        for name, parameter in stepper.model.named_parameters()
        for kind in MOMENTS
    }
    run = {
        "format": 1,
        "progress": progress.state_dict(),
        "applied_steps": int(stepper.optimizer.applied.item()),
        "loss_scale": stepper.precision.scaler.state_dict() if stepper.precision.scaler else None,
        "about": dict(about),
    }
    return State({name: parameter.detach() for name, parameter in stepper.model.named_parameters()}, moments, run)


@torch.no_grad()
def restore(stepper: Stepper, state: State) -> Progress:
    """Put a saved state back, bit for bit."""
    parameters = dict(stepper.model.named_parameters())
    _check_names(parameters, state)
    live = stepper.optimizer.moments()
    for name, parameter in parameters.items():
        parameter.copy_(state.model[name])
        for kind in MOMENTS:
            live[id(parameter)][kind].copy_(state.optimizer[f"{kind}.{name}"])
    stepper.optimizer.applied.fill_(state.run["applied_steps"])
    if stepper.precision.scaler:
        stepper.precision.scaler.load_state_dict(state.run["loss_scale"])
    return Progress.from_state_dict(state.run["progress"])


def _check_names(parameters: Mapping[str, torch.Tensor], state: State) -> None:
    wrong = [
        f"{name}: checkpoint {tuple(state.model[name].shape) if name in state.model else 'without it'}, "
        f"model {tuple(parameters[name].shape) if name in parameters else 'without it'}"
        for name in sorted(parameters.keys() | state.model.keys())
        if name not in parameters or name not in state.model or parameters[name].shape != state.model[name].shape
    ]
    if wrong:
        raise DataError(f"the checkpoint is of another model: {'; '.join(wrong[:3])} ({len(wrong)} tensors differ)")
