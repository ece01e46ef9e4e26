"""Assembling a run: the only file that knows every part."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep import registry
from lockstep.config.load import Loaded, identity, identity_hash, to_dict
from lockstep.config.schema import RunConfig
from lockstep.contracts import Objective, Sink
from lockstep.data.loader import Loader, validation_batches
from lockstep.engine import checkpoint, legacy, resume, state
from lockstep.engine.checkpoint import Checkpointer
from lockstep.engine.parts import Parts
from lockstep.engine.prepare import Prepared, prepare
from lockstep.engine.progress import Progress
from lockstep.engine.step import Stepper
from lockstep.models import shapes
from lockstep.models.build import Built
from lockstep.models.build import build as build_model
from lockstep.models.shapes import LlamaShape
from lockstep.rundir import RunDir
from lockstep.runtime import env, faults, precision
from lockstep.runtime.hardware import device_name, peak_flops
from lockstep.runtime.signals import StopRequest


@dataclass(frozen=True)
class Plan:
    """What is known before anything large is loaded."""

    config: RunConfig  # with `auto` precision resolved: it decides the numbers
    device: torch.device
    shape: LlamaShape
    objective: Objective
    identity_hash: str


def plan(loaded: Loaded, device: torch.device) -> Plan:
    """Resolve what the configuration leaves open."""
    config = loaded.config
    named = precision.resolve(config.training.precision, device)
    training = config.training.model_copy(update={"precision": named})
    config = config.model_copy(update={"training": training})
    shape = shapes.resolve(config.model, context_length=config.training.context_length, token=hub_token(config))
    objective: Objective = registry.load("objectives", config.objective.name, "build")(config.objective)
    return Plan(config, device, shape, objective, identity_hash(config))


def hub_token(config: RunConfig) -> str | None:
    """The token that was given by flag or file; the one in the environment the hub's own client finds."""
    return config.data.hf_token.get_secret_value() if config.data.hf_token else None


def describe(plan: Plan, data_key: str) -> dict[str, Any]:
    """What a checkpoint belongs to: compared on resume, and enough to load the model elsewhere."""
    return {
        "family": plan.config.family,
        "config": to_dict(plan.config),
        "identity": identity(plan.config),
        "identity_hash": plan.identity_hash,
        "shape": plan.shape.to_hf(),
        "data_key": data_key,
        "device_name": device_name(plan.device),
        "threads": torch.get_num_threads() if plan.device.type == "cpu" else 0,
        "world": 1,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """The software that computed a state."""
    return {
        "lockstep": lockstep.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "cudnn": str(torch.backends.cudnn.version() or "") if torch.cuda.is_available() else "",
    }


@dataclass(frozen=True)
class Assembled:
    """The parts, and what the banner tells about them."""

    parts: Parts
    prepared: Prepared
    built: Built
    loader: Loader


def assemble(
    plan: Plan, run: RunDir, *, point: resume.ResumePoint | None, sinks: list[Sink], stop: StopRequest
) -> Assembled:
    """Data, model, optimizer and state, ready for the loop."""
    config, options = plan.config, plan.config.training
    prepared = prepare(config, plan.objective, vocab_limit=plan.shape.vocab_size)
    about = describe(plan, prepared.key)
    planned_faults = faults.plan(rank=env.detect().rank)
    built = make_model(plan, hooks=planned_faults.needs_hooks)
    planned_faults.attach(built.model)
    stepper = Stepper(
        built.model,
        plan.objective,
        options,
        precision=precision.Precision(options.precision, plan.device),
        seed=config.system.seed,
        faults=planned_faults,
    )
    stepper.debug = config.debug.enabled
    progress = _resume(stepper, about, point, allow=config.checkpoint.allow_mismatch) if point else Progress()
    loader = make_loader(plan, prepared, start_step=progress.step)
    keep_last = config.checkpoint.keep_last
    parts = Parts(
        config=config,
        device=plan.device,
        stepper=stepper,
        progress=progress,
        batches=iter(loader),
        validation=validation_batches(
            prepared.validation,
            plan.objective,
            micro_rows=options.batch_size,
            rows=options.eval_batches * options.batch_size * options.grad_accum_nums,
            seed=config.system.seed,
        ),
        checkpointer=Checkpointer(run.checkpoints, keep_last=keep_last, extra_files=tokenizer_files(prepared)),
        sinks=sinks,
        stop=stop,
        faults=planned_faults,
        about=about,
        rows=prepared.train.rows,
        flops_per_token=plan.shape.flops_per_token(options.context_length),
        peak_flops=peak_flops(plan.device, options.precision),
        trace_file=run.profile if config.report.profile else None,
    )
    return Assembled(parts, prepared, built, loader)


def make_model(plan: Plan, *, hooks: bool) -> Built:
    """The model on its device. Compiled blocks skip hooks, so hooks mean no compiling."""
    config = plan.config
    return build_model(
        config.model.model_copy(update={"compile": "off"}) if hooks else config.model,
        plan.shape,
        device=plan.device,
        dtype_name=config.training.precision,
        seed=config.system.seed,
        checkpointing=config.system.gradient_checkpointing,
        deterministic=config.system.deterministic,
        debug=config.debug.enabled,
        token=hub_token(config),
    )


def tokenizer_files(prepared: Prepared) -> dict[str, bytes]:
    """What a checkpoint needs to speak: read now, since the cache may be cleared while the run goes on."""
    paths = (prepared.folder / name for name in checkpoint.TOKENIZER_FILES)
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def make_loader(plan: Plan, prepared: Prepared, *, start_step: int) -> Loader:
    """The training batches from a step on."""
    data, options, on_gpu = plan.config.data, plan.config.training, plan.device.type == "cuda"
    workers = data.num_workers if data.num_workers != "auto" else 1
    return Loader(
        prepared.train,
        plan.objective,
        seed=plan.config.system.seed,
        micro_rows=options.batch_size,
        micro_batches=options.grad_accum_nums,
        start_step=start_step,
        workers=workers,
        prefetch=data.prefetch_factor,
        pin=data.pin_memory and on_gpu,
    )


def _resume(stepper: Stepper, about: dict[str, Any], point: resume.ResumePoint, *, allow: bool) -> Progress:
    saved = _read_state(stepper, point.checkpoint)
    if saved.run.get("about") is not None:  # a file of another program does not say
        resume.check_belongs(saved.run["about"], about, checkpoint=point.checkpoint, allow=allow)
    return state.restore(stepper, saved)


def _read_state(stepper: Stepper, path: Path) -> checkpoint.State:
    if path.suffix != ".pt":
        return checkpoint.load(path)
    names = {id(parameter): name for name, parameter in stepper.model.named_parameters()}
    order = [names[id(parameter)] for parameter in stepper.optimizer.parameters]
    return legacy.read(path, order)
