"""`lockstep replay`: a bad step once more from its bundle, as it was and with one thing changed at a time.

What makes it go away is the answer: more digits (overflow), other kernels (kernel), one row that is left out when asked
(data). What does not come back at all was not in the numbers (hardware-suspect).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import rundir
from lockstep.config.load import from_saved
from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch, Objective, StepRecord
from lockstep.data.tokenize import load_tokenizer
from lockstep.engine import adapters, bundle, graphs, histories, verdict
from lockstep.engine.autopsy import BadStep, find_place, run_again
from lockstep.engine.build import Plan, make_model, make_objective
from lockstep.engine.bundle import Bundle
from lockstep.engine.checkpoint import MODEL, TOKENIZER_FILES
from lockstep.engine.choices import speaking
from lockstep.engine.shards import Stored
from lockstep.engine.state import trained
from lockstep.engine.step import Reading, Stepper
from lockstep.engine.verdict import AS_IT_WAS, FP32, NO_COMPILE, PLAIN_ATTENTION, Change, Outcome, Replayed
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.health.finding import Finding, Place
from lockstep.health.fingerprint import digest_model
from lockstep.models import attention, shapes
from lockstep.models.agent_shapes import AgentShape
from lockstep.runtime import faults, precision
from lockstep.runtime.determinism import mode
from lockstep.runtime.hardware import device_name, pick_device
from lockstep.worlds.observed import Histories


def replay(folder: Path, *, drop: int | None = None, device: str = "auto") -> tuple[Replayed, Finding]:
    """Run the step of a bundle again, then with each change that could tell something, and without the row `drop`."""
    read = bundle.read(folder)
    if drop is not None:
        without_row(read.batches, drop)  # refused now, not after the first pass, or never
    if read.weights != folder:
        if not read.weights.is_dir():
            what = "the bundle has no weights, and the checkpoint it names is gone"
            raise NotFoundError(what, where=str(read.weights), hint="debug.bundle=full keeps them in the bundle")
        rundir.verify(read.weights)
    place = pick_device(device, 0)
    config, unchanged = _as_it_can_be(from_saved(read.about["config"]), place)
    with mode(place, deterministic=config.system.deterministic, threads=read.about["threads"] or 0):
        first = attempt(read, config, place, unchanged)
        same = not first.fine and _same(read.finding.place, first.place)
        outcomes = [first]
        if not first.fine:
            for change in _worth_trying(config, first, drop):
                outcomes.append(attempt(read, config, place, change))
    return Replayed(same, tuple(outcomes), verdict.judge(read, outcomes, place, same=same)), read.finding


def _as_it_can_be(config: RunConfig, device: torch.device) -> tuple[RunConfig, Change]:
    """The settings of the step, and what to call them: without float8 where a device does not multiply it."""
    named = config.training.precision
    if named != "fp8" or not precision.float8_obstacle(device):
        return config, AS_IT_WAS
    instead = precision.without_float8(named)
    training = config.training.model_copy(update={"precision": instead})
    return config.model_copy(update={"training": training}), Change(f"{AS_IT_WAS.name}, in {instead} for {named}")


def attempt(read: Bundle, config: RunConfig, device: torch.device, change: Change) -> Outcome:
    """One run of the step."""
    config = config.model_copy(
        update={
            "training": config.training.model_copy(update=dict(change.training)),
            "model": config.model.model_copy(update=_model_changes(read, config, device, change)),
        }
    )
    precision.resolve(config.training.precision, device)  # honoured or refused
    batches, objective = _given(read, config)
    objective = graphs.steadied(objective, shapes.from_hf(read.about["shape"]), device)
    if missing := objective.terms.keys() - read.about["denominators"].keys():
        raise DataError(f"it does not say what {', '.join(sorted(missing))} is a mean over", where=str(read.folder))
    if change.drop >= 0:
        batches = without_row(batches, change.drop)
    stepper, attention, compiled = _stepper(read, config, device, objective, changed=change.changes)
    bad = BadStep(_record(read), _reading(read), batches, read.about["denominators"], read.about["first_place"])
    if stepper.precision.scaler:
        stepper.precision.scaler.scale.fill_(read.about["loss_scale"])
    again = run_again(stepper, bad)
    place = None if again.fine or change.drop >= 0 else find_place(stepper, bad, again)
    return Outcome(change, again.fine, place, compiled, attention)


def _model_changes(read: Bundle, config: RunConfig, device: torch.device, change: Change) -> dict[str, Any]:
    """Weights come from the bundle; kernels of another kind of device are chosen anew, and a laptop has no compiler."""
    changes: dict[str, Any] = {} if adapters.has_additions(config) else {"init": "random"}
    if read.about["device"] != device.type:
        return {**changes, "attention_backend": "auto", "compile": "auto", **change.model}
    same_card = read.about["device_name"] == device_name(device)  # where auto may have been decided by timing
    if named := change.training.get("precision"):
        head = shapes.from_hf(read.about["shape"]).head_dim
        if attention.obstacle(config.model.attention_backend, device.type, named, head):  # many are for halves only
            changes["attention_backend"] = "auto"
    elif same_card:
        changes["attention_backend"] = read.about.get("attention") or config.model.attention_backend
    if same_card and config.model.compile == "auto" and isinstance(compiled := read.about.get("compiled"), bool):
        changes["compile"] = "on" if compiled else "off"
    return {**changes, **change.model}


def _given(read: Bundle, config: RunConfig) -> tuple[tuple[Batch, ...], Objective]:
    """The micro-batches, and an objective that knows the words or the histories."""
    objective: Any = make_objective(config)
    if all((read.folder / name).is_file() for name in TOKENIZER_FILES[:1]):
        return read.batches, speaking(objective, load_tokenizer(read.folder))
    about = read.about["histories"]
    if about is None:
        return read.batches, objective
    shape = shapes.from_hf(read.about["shape"])
    assert isinstance(shape, AgentShape), "only agents learn from histories"
    known = Histories(steps=read.batches[0].tensors["steps"].numpy(), **about)
    length, terms = config.training.context_length, histories.terms(config, shape)
    plain = [{key: value for key, value in each.tensors.items() if key != "steps"} for each in read.batches]
    batches = tuple(batch._replace(tensors=tensors) for batch, tensors in zip(read.batches, plain, strict=True))
    return batches, objective.with_histories(known, length=length, terms=terms)


def _stepper(
    read: Bundle, config: RunConfig, device: torch.device, objective: Objective, *, changed: bool
) -> tuple[Stepper, str, bool]:
    """The model with the weights before the step, and the faults that struck it, but for those that strike once."""
    found = faults.plan(read.about["fault"], rank=read.about["worker"]).faults
    planned = faults.Plan(tuple(fault for fault in found if not fault.once and "weight" not in fault.kind))
    shape = shapes.from_hf(read.about["shape"])
    built = make_model(Plan(config, device, shape, objective, ""), hooks=planned.needs_hooks)
    planned.attach(built.model)
    _fill(read, built.model)
    if not changed:
        _check_weights(read, config, built.model)
    named = precision.Precision(config.training.precision, device)
    stepper = Stepper(built.model, objective, config.training, precision=named, seed=read.about["seed"], faults=planned)
    return stepper, built.attention, built.compiled


def _fill(read: Bundle, model: nn.Module) -> None:
    """The weights before the step."""
    where = str(read.weights)
    weights, parameters = Stored(read.weights, MODEL), trained(model)
    for name, parameter in parameters.items():
        if name not in weights or weights.shape(name) != tuple(parameter.shape):
            found = weights.shape(name) if name in weights else "nothing"
            raise DataError(f"{name} is {tuple(parameter.shape)} in the model, {found} here", where=where)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def _check_weights(read: Bundle, config: RunConfig, model: nn.Module) -> None:
    """They are those of the step, and no others: the frozen ones and the trained ones."""
    frozen, path = adapters.about_base(model), config.model.model_path
    adapters.check_base(read.about, frozen, checkpoint=read.folder, model_path=path)
    known = read.about["weights_digest"]  # "": of a model in shards each rank has seen its part only
    if known and known != digest_model(trained(model).items()):
        raise DataError("not the weights before the step: something else was saved there", where=str(read.weights))


def _record(read: Bundle) -> StepRecord:
    finding = read.finding
    return StepRecord(finding.step, finding.loss, finding.grad_norm, lr=0.0, seconds=0.0, tokens=0)


def _reading(read: Bundle) -> Reading:
    finding, scale = read.finding, float(read.about["loss_scale"])
    return Reading(finding.loss, finding.loss, finding.grad_norm, finding.grad_norm, 0.0, True, False, scale, 0.0)


def without_row(batches: Sequence[Batch], row: int) -> tuple[Batch, ...]:
    """The micro-batches with one row, counted over all of them, replaced by its neighbour; its targets go."""
    rows = [batch.rows for batch in batches]
    if not 0 <= row < sum(rows):
        raise ConfigError(f"row {row}, the step has {sum(rows)}", where="--drop-sample", hint=f"0 to {sum(rows) - 1}")
    if sum(rows) == 1:
        raise ConfigError("there is no other row", where="--drop-sample")
    kept: list[Batch] = []
    for batch in batches:
        if not 0 <= row < batch.rows:
            kept.append(batch)
        elif batch.rows > 1:
            kept.append(_replaced(batch, row))
        row -= batch.rows
    return tuple(kept)


def _replaced(batch: Batch, row: int) -> Batch:
    neighbour, rows = (row + 1) % batch.rows, batch.rows
    places, inputs = batch.tensors.get("places"), batch.tensors.get("inputs")
    chosen = None
    if places is not None and inputs is not None:
        chosen = (places // inputs.shape[1]) % rows != row
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in batch.tensors.items():
        if chosen is not None and name != "inputs" and tensor.ndim and len(tensor) == len(chosen):
            tensors[name] = tensor[chosen]
        elif tensor.ndim and len(tensor) and len(tensor) % rows == 0:
            index = torch.arange(len(tensor))
            index[index % rows == row] += neighbour - row
            tensors[name] = tensor[index]
        else:
            tensors[name] = tensor
    return batch._replace(tensors=tensors)


def _same(was: Place | None, now: Place | None) -> bool:
    """The same first bad tensor. On another kind of device its operation may have another name."""
    return was is not None and now is not None and (was.phase, was.module) == (now.phase, now.module)


def _worth_trying(config: RunConfig, first: Outcome, drop: int | None) -> Iterator[Change]:
    given = first.place is not None and first.place.phase in ("weights", "input")  # bad before anything was computed
    if not given and config.training.precision in precision.DTYPES:
        yield FP32
    if not given and first.compiled:
        yield NO_COMPILE
    if not given and first.attention != "native_math":
        yield PLAIN_ATTENTION
    if drop is not None:
        yield Change(f"without sample {drop}", drop=drop)
