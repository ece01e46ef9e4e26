"""Assembling a run: the only file that knows every part."""

from __future__ import annotations

import inspect
import logging
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep import registry
from lockstep.config.load import Loaded, identity, identity_hash, to_dict
from lockstep.config.schema import RunConfig
from lockstep.contracts import Batch, Objective, Sink
from lockstep.data.loader import Loader, own_choice, validation_batches
from lockstep.engine import (
    adapters,
    agent_files,
    checkpoint,
    epoch_files,
    epochs,
    graphs,
    histories,
    legacy,
    replicas,
    resume,
    state,
)
from lockstep.engine.checkpoint import Checkpointer
from lockstep.engine.choices import speaking, with_mask
from lockstep.engine.council import Council
from lockstep.engine.parts import Parts
from lockstep.engine.prepare import Prepared, check_same, prepare
from lockstep.engine.progress import Progress
from lockstep.engine.saving import Saver
from lockstep.engine.snapshot import Snapshot
from lockstep.engine.step import Stepper
from lockstep.errors import ConfigError, DataError
from lockstep.health.finite import GradientWatch
from lockstep.models import shapes
from lockstep.models.build import Built, Kernels
from lockstep.models.build import build as build_model
from lockstep.models.shapes import AnyShape
from lockstep.rundir import RunDir
from lockstep.runtime import determinism, devices, env, faults, hub, precision, torch_file
from lockstep.runtime.canonical import Canonical
from lockstep.runtime.grid import check_canonical
from lockstep.runtime.group import Group
from lockstep.runtime.hardware import device_name, peak_flops
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.parallel import Sharded
from lockstep.runtime.reduce import Alone, Exchange, Reducer
from lockstep.runtime.signals import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is known before anything large is loaded."""

    config: RunConfig  # with `auto` precision resolved: it decides the numbers
    device: torch.device
    shape: AnyShape
    objective: Objective
    identity_hash: str


def plan(loaded: Loaded, device: torch.device, *, trains: bool = True) -> Plan:
    """Resolve what the configuration leaves open. Whoever only prepares data need not have what trains on it."""
    config = loaded.config
    named = precision.resolve(config.training.precision, device) if trains else config.training.precision
    training = config.training.model_copy(update={"precision": named})
    config = config.model_copy(update={"training": training})
    shape = shapes.resolve(config.model, context_length=config.training.context_length, token=hub_token(config))
    config = with_mask(config, shape)
    return Plan(config, device, shape, make_objective(config), identity_hash(config))


def make_objective(config: RunConfig) -> Objective:
    """The objective a configuration names. One that was not made to keep documents apart is not asked to."""
    build: Any = registry.load("objectives", config.objective.name, "build")
    if "documents" in inspect.signature(build).parameters:
        return build(config.objective, documents=config.data.documents)
    if config.data.documents in ("masked", "padded"):
        raise ConfigError(
            f"objective {config.objective.name!r} cannot keep documents apart",
            where="data.documents",
            hint="data.documents=separated, or a build(options, *, documents) of its own",
        )
    return build(config.objective)


def hub_token(config: RunConfig) -> str | None:
    """The token that was given by flag or file; the one in the environment the hub's own client finds."""
    return hub.token_of(config.data.hf_token)


def describe(plan: Plan, data_key: str, *, world: int = 1) -> dict[str, Any]:
    """What a checkpoint belongs to: compared on resume, and enough to load the model elsewhere."""
    options = plan.config.training
    return {
        "family": plan.config.family,
        "config": to_dict(plan.config),
        "identity": identity(plan.config),
        "identity_hash": plan.identity_hash,
        "shape": plan.shape.to_hf(),
        "data_key": data_key,
        "device_name": device_name(plan.device),
        "threads": torch.get_num_threads() if plan.device.type == "cpu" else 0,
        "world": world,
        "batch_rows": world * options.batch_size * options.grad_accum_nums,
        "versions": versions(),
    }


def kernels(plan: Plan, built: Built) -> dict[str, Any]:
    """What decides whether the bits of a state can be had again: its label says it in words."""
    deterministic = plan.config.system.deterministic
    return {
        "determinism": determinism.label(plan.device, deterministic=deterministic),
        "attention": built.attention,
        "compiled": built.compiled,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    """The software that computed a state."""
    return {
        "lockstep": lockstep.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "cudnn": str(torch.backends.cudnn.version() or "") if torch.cuda.is_available() else "",
        "driver": devices.driver_version() if torch.cuda.is_available() else "",
    }


@dataclass(frozen=True)
class Assembled:
    """The parts, and what the banner tells about them."""

    parts: Parts
    prepared: Prepared
    built: Built
    loader: Loader


def assemble(  # noqa: PLR0913 - a run and all that surrounds it, by name
    plan: Plan,
    run: RunDir,
    *,
    point: resume.ResumePoint | None,
    sinks: list[Sink],
    stop: StopRequest,
    group: Group | None = None,
    link: Marks | None = None,
) -> Assembled:
    """Data, model, optimizer and state, ready for the loop."""
    config, everyone, link, place = plan.config, group or Group(), link or NoMarks(), env.detect()
    group = Group() if config.system.mode == "replicas" else everyone  # replicas train alone and are compared later
    prepared = prepare(config, plan.objective, vocab_limit=plan.shape.vocab_size)
    check_same(prepared.key, everyone)
    link.enter("start")
    plan = with_words(plan, prepared)
    about = describe(plan, prepared.key, world=group.world)
    config = resume.with_saved_batch(config, point, about, world=group.world)
    counted, passes, notices = epochs.count(config, prepared.train, world=group.world)
    for notice in notices if everyone.rank == 0 else ():
        logger.warning("%s", notice)
    plan = replace(plan, config=counted)
    stepper, built = make_stepper(plan, group, link, before=resume.kernels_before(point, about))
    about |= adapters.about_base(stepper.model) | kernels(plan, built)
    progress = _resume(stepper, about, point, config=config) if point else Progress()
    if point and group is not everyone:
        everyone.barrier()  # from here on the first replica may save, and forget what another was still reading
    told, folder = everyone.told(link), run.worker(place.tag, place.node)
    loader = make_loader(plan, prepared, start_step=progress.step, group=group)
    parts = Parts(
        config=plan.config,
        device=plan.device,
        stepper=stepper,
        progress=progress,
        batches=iter(loader),
        validation=make_validation(plan, prepared, group, batch_rows=about["batch_rows"]),
        saver=make_saver(plan, run, prepared, stepper, begin=progress.step),
        sinks=sinks,
        stop=stop,
        faults=stepper.faults,
        about=about,
        table=prepared.train,
        flops_per_token=plan.shape.flops_per_token(config.training.context_length),
        peak_flops=(peak_flops(plan.device, config.training.precision) or 0) * group.world or None,
        council=stepper.council,
        link=link if group is everyone else told,  # replicas wait for the slowest at the end
        saves=(group is everyone or everyone.rank == 0) and env.saves(run.root),
        epochs=passes,
        vocabulary=vocabulary_map(prepared) if config.report.results_dir else {},
        words=prepared.words,
        evidence_dir=folder,
        stamps=replicas.start(config, stepper, folder, begin=progress.step),
        trace_file=run.profile if config.report.profile and everyone.rank == 0 else None,
    )
    return Assembled(parts, prepared, built, loader)


def with_words(plan: Plan, prepared: Prepared) -> Plan:
    """The plan with an objective that knows the tokenizer; ids that the model has no row for are refused here."""
    if prepared.histories is not None:
        return replace(plan, objective=histories.with_histories(plan.objective, prepared, plan.config, plan.shape))
    objective = speaking(plan.objective, prepared.tokenizer)
    if check_rows := getattr(objective, "check_rows", None):
        check_rows(plan.shape.vocab_size)
    return replace(plan, objective=graphs.steadied(objective, plan.shape, plan.device))


def make_saver(plan: Plan, run: RunDir, prepared: Prepared, stepper: Stepper, *, begin: int) -> Saver:
    """Who saves this run from step `begin` on, alone or in shards, while training goes on."""
    checkpointer = Checkpointer(
        run.checkpoints,
        keep_last=plan.config.checkpoint.keep_last,
        extra_files=tokenizer_files(prepared),
        group=stepper.council.group.beside(),
        sharded=isinstance(stepper.exchange, Sharded),
        writes=getattr(stepper.exchange, "writes", True),
    )
    checkpointer.go_on(begin)
    saver = Saver(checkpointer, Snapshot(plan.device))
    stepper.before_change = saver.snapshot.before_change
    return saver


def make_stepper(
    plan: Plan, group: Group, link: Marks, *, planned_faults: faults.Plan | None = None, before: Kernels | None = None
) -> tuple[Stepper, Built]:
    """The model and all that a step needs, with whoever exchanges gradients in this mode."""
    config, place = plan.config, env.detect()
    planned_faults = planned_faults or faults.plan(rank=place.rank)
    sharded = None
    if group.world > 1 and config.system.mode in ("fsdp", "hsdp"):
        sharded = Sharded(config.system.mode, group, plan.device, nodes=place.nodes, link=link)
    built = make_model(plan, hooks=planned_faults.needs_hooks, sharded=sharded, before=before)
    planned_faults.attach(built.model)
    stepper = Stepper(
        built.model,
        plan.objective,
        config.training,
        precision=precision.Precision(config.training.precision, plan.device),
        seed=config.system.seed,
        faults=planned_faults,
    )
    stepper.watch = GradientWatch(config.report.log_interval) if config.debug.enabled else None
    exchange: Exchange = sharded or Alone(stepper.parameters)
    if not sharded and (group.world > 1 or config.system.canonical):
        trained = [parameter for parameter in built.model.parameters() if parameter.requires_grad]
        count, overlap = config.training.grad_accum_nums, not planned_faults.spoil_gradients
        if config.system.canonical:
            check_canonical(world=group.world, micro_batches=count)
            exchange = Canonical(trained, group, micro_batches=count, overlap=overlap)
        else:
            exchange = Reducer(trained, group, overlap=overlap)
    stepper.connect(exchange, Council(plan.objective.terms, group), link)
    return stepper, built


def make_model(plan: Plan, *, hooks: bool, sharded: Sharded | None = None, before: Kernels | None = None) -> Built:
    """The model on its device. Compiled blocks skip hooks, so hooks mean no compiling."""
    config = plan.config
    return build_model(
        config.model.model_copy(update={"compile": "off"}) if hooks else config.model,
        plan.shape,
        device=plan.device,
        dtype_name=config.training.precision,
        seed=config.system.seed,
        checkpointing=config.system.gradient_checkpointing,
        deterministic=bool(config.system.deterministic),
        debug=config.debug.enabled,
        documents_apart=config.data.documents in ("masked", "padded"),
        token=hub_token(config),
        shard=sharded.shard if sharded else None,
        before=before,
    )


def vocabulary_map(prepared: Prepared) -> dict[str, int]:
    """Token -> id, for the result files."""
    tell = getattr(prepared.words, "vocabulary_map", None)
    return tell() if tell else {}


def tokenizer_files(prepared: Prepared) -> dict[str, bytes]:
    """What a checkpoint needs to speak: read now, since the cache may be cleared while the run goes on."""
    paths = (prepared.folder / name for name in checkpoint.TOKENIZER_FILES)
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def make_validation(plan: Plan, prepared: Prepared, group: Group, *, batch_rows: int) -> list[Batch]:
    """This rank's share of the validation batches."""
    options = plan.config.training
    return validation_batches(
        prepared.validation,
        plan.objective,
        micro_rows=getattr(options, "eval_batch_size", None) or options.batch_size,
        rows=options.eval_batches * batch_rows,
        seed=plan.config.system.seed,
        share=(group.rank, group.world),
    )


def make_loader(
    plan: Plan, prepared: Prepared, *, start_step: int, group: Group | None = None, workers: int | None = None
) -> Loader:
    """This rank's training batches from a step on."""
    data, options, on_gpu = plan.config.data, plan.config.training, plan.device.type == "cuda"
    if workers is None:
        asked = data.num_workers
        workers = asked if asked != "auto" else own_choice(plan.objective, on_gpu=on_gpu)
    return Loader(
        prepared.train,
        plan.objective,
        seed=plan.config.system.seed,
        micro_rows=options.batch_size,
        micro_batches=options.grad_accum_nums,
        rank=group.rank if group else 0,
        world=group.world if group else 1,
        start_step=start_step,
        workers=workers,
        prefetch=data.prefetch_factor,
        pin=data.pin_memory and on_gpu,
        steps=options.max_steps,
    )


def _resume(stepper: Stepper, about: dict[str, Any], point: resume.ResumePoint, *, config: RunConfig) -> Progress:
    saved = _read_state(stepper, point.checkpoint)
    if (belongs := saved.run.get("about")) is not None:  # a file of another program does not say
        allow = config.checkpoint.allow_mismatch
        resume.check_belongs(belongs, about, checkpoint=point.checkpoint, allow=allow)
        if not allow:
            resume.check_batch(belongs.get("batch_rows"), config, world=about["world"], checkpoint=point.checkpoint)
        adapters.check_base(belongs, about, checkpoint=point.checkpoint, model_path=config.model.model_path)
    try:
        return state.restore(stepper, saved)
    except DataError as error:
        raise DataError(error.what, where=error.where or str(point.checkpoint), hint=error.hint) from error


def _read_state(stepper: Stepper, path: Path) -> checkpoint.State:
    if path.suffix != ".pt":
        return checkpoint.load(path, stepper.council.group)
    content, names = torch_file.read(path), legacy.names_in_order(stepper)
    if agent_files.is_one(content):
        return agent_files.read(content, path, names=names)
    if epoch_files.is_one(content):
        model: Any = stepper.model
        return epoch_files.read(content, path, shape=model.shape, names=names)
    return legacy.read(content, path, names)
