"""What the banner and the summary say about a run."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import lockstep
from lockstep.config.load import Loaded
from lockstep.config.schema import RunConfig
from lockstep.engine.parts import Parts
from lockstep.engine.prepare import Prepared
from lockstep.models.agent import Agent
from lockstep.models.hf_names import TABLES
from lockstep.models.shapes import Lora, Memory, Shape, memory_bytes
from lockstep.report.words import USUAL, WORDINGS, Banner, Summary
from lockstep.rundir import RunDir
from lockstep.runtime import determinism, env, grid, hardware

if TYPE_CHECKING:
    from lockstep.engine.build import Assembled, Plan


def banner(run: RunDir, planned: Plan, assembled: Assembled, loaded: Loaded) -> Banner:
    """The facts before the first step."""
    config, shape, epochs = planned.config, planned.shape, assembled.parts.epochs
    options = assembled.parts.config.training  # with the steps counted
    parted = shards(config.system.mode, env.detect())
    memory = memory_estimate(config, shape, compiled=assembled.built.compiled, shards=parted)
    total = hardware.total_memory_bytes(planned.device)
    label, prepared = env.detect().tag, assembled.prepared
    layers = f"{shape.num_layers} layer{'s' * (shape.num_layers != 1)}"
    return Banner(
        experiment=config.run.experiment_name,
        run=str(run.root),
        device=hardware.device_name(planned.device) + (f", {total / 2**30:.1f} GiB" if total else ""),
        model=f"{config.model.model_path}, {layers}, width {shape.hidden_size:,}",
        parameters=shape.parameters(),
        memory_bytes={
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.moments,
            "activations": memory.activations,
        },
        tokens_per_step=assembled.parts.batch_rows * options.context_length,
        max_steps=options.max_steps,
        dataset=dataset_text(prepared),
        precision=options.precision,
        attention=assembled.built.attention + (", compiled" if assembled.built.compiled else ""),
        determinism=determinism.label(planned.device, deterministic=config.system.deterministic),
        batch=batch_text(assembled.parts),
        batch_size=options.batch_size,
        accumulated=options.grad_accum_nums,
        settings=settings(loaded),
        logs=tuple(str(path) for path in wanted_logs(config, run)),
        tag=label.replace("GPU", "GPU "),
        version=lockstep.__version__,
        epochs=epochs.count if epochs else 0,
        epoch_steps=epochs.epoch_steps if epochs else 0.0,
        vocab_size=shape.vocab_size,
        unit=WORDINGS.get(config.family, USUAL).unit,
    )


def dataset_text(prepared: Prepared) -> str:
    """What is learnt from: how many rows, in which words."""
    words = f", tokenizer of {prepared.words.vocab_size:,} ids" if prepared.words else ""
    return f"{prepared.source}, {prepared.train.rows:,} rows{words}"


def batch_text(parts: Parts) -> str:
    """How the tokens of a step come about: rows, accumulation, workers, length."""
    options = parts.config.training
    workers = f"{parts.council.group.world} workers x " if parts.council.group.world > 1 else ""
    return f"{workers}{options.batch_size} rows x {options.grad_accum_nums} x {options.context_length:,}"


def workers_banner(precision: str, accumulated: int, *, device: torch.device, world: int) -> list[str]:
    """The documented lines that say how many processes share the work."""
    kind = "NO" if world == 1 else "MULTI_GPU" if device.type == "cuda" else "MULTI_CPU"
    rule = "=" * 60
    return [
        rule,
        "Multi-GPU Training Configuration",
        rule,
        f"Number of processes: {world}",
        f"Distributed type: DistributedType.{kind}",
        f"Mixed precision: {'no' if precision == 'fp32' else precision}",
        f"Gradient accumulation steps: {accumulated}",
        f"Main process device: {device}",
        rule,
    ]


def memory_estimate(config: RunConfig, shape: Shape, *, compiled: bool, shards: int = 1) -> Memory:
    """What this configuration will need on one device."""
    return memory_bytes(
        shape,
        batch_size=config.training.batch_size,
        context_length=config.training.context_length,
        dtype_name=config.training.precision,
        checkpointing=config.system.gradient_checkpointing,
        compiled=compiled,
        optimizer_states=config.training.optimizer_states,
        lora=Lora.of(config.model),
        shards=shards,
    )


def shards(mode: str, place: env.Env) -> int:
    """In how many parts the state of the model is cut."""
    return grid.shards(mode, world=place.world, nodes=place.nodes)


def summary(run: RunDir, parts: Parts, sample: str, seconds: float) -> Summary:
    """The facts after the last step."""
    pace, place, tb = parts.pace, shlex.quote(str(run.root)), shlex.quote(str(run.tensorboard))
    fills = hasattr(parts.stepper.objective, "fill") and "[MASK]" not in parts.config.report.sample_prompt
    asks = "What is the capital of France?" if getattr(parts.stepper.objective, "answers", False) else ""
    prompt = shlex.quote("the [MASK] of" if fills else asks or parts.config.report.sample_prompt.strip() or "The")
    model = parts.stepper.model
    walks, others_read_it = isinstance(model, Agent), getattr(model.shape, "model_type", "") in TABLES
    of_texts = (f"sample {place} {prompt}", *([f"export {place} --to hf"] if others_read_it else []))
    of_agents = (f"sample {place}", f"eval {place}")
    rate = pace.tokens / pace.seconds if pace.seconds else 0.0
    words = WORDINGS.get(parts.config.family, USUAL)
    return Summary(
        outcome=words.outcome,
        at_most=words.at_most,
        best_val_loss=best_val_loss(parts) if words.best else None,
        steps=parts.progress.step,
        loss=parts.last.loss if parts.last else math.nan,
        first_loss=pace.first_loss,
        val_loss=parts.val_loss,
        val_accuracy=parts.measures.get(words.accuracy) if words.accuracy else None,
        unit=words.unit,
        tokens_per_second=rate,
        data_share=min(1.0, pace.data / pace.seconds) if pace.seconds else 0.0,
        mfu=rate * parts.flops_per_token / parts.peak_flops if parts.peak_flops and rate else None,
        seconds=seconds,
        peak_memory_bytes=hardware.peak_memory_bytes(parts.device),
        skipped=parts.progress.skipped,
        sample=sample,
        results=str(run.root),
        next_commands=(
            *(f"{callable_as('lockstep')} {words}" for words in (of_agents if walks else of_texts)),
            *([f"{callable_as('tensorboard')} --logdir {tb}"] if parts.config.report.tensorboard else []),
        ),
    )


def best_val_loss(parts: Parts) -> float | None:
    """Of all validations, and of epochs that another program has trained."""
    known = [loss for loss in (*parts.progress.val_losses, parts.progress.best_val_loss) if loss is not None]
    return min(known, default=None)


def settings(loaded: Loaded) -> str:
    """Where the values come from: the preset, the files, and each key that a flag set over them."""
    origins = loaded.origins.items()
    files = sorted({origin.where.rsplit(":", 2)[0] for _, origin in origins if origin.layer == "file"})
    flags = sorted(key for key, origin in origins if origin.layer == "flag")
    return ", ".join([*([f"preset {loaded.preset}"] if loaded.preset else []), *files, *flags])


def wanted_logs(config: RunConfig, run: RunDir | None) -> list[Path]:
    """The log files that were asked for, beside the one in the run folder."""
    files = [Path(config.report.log_file)] if config.report.log_file else []
    if run and config.system.log_dir:
        files.append(Path(config.system.log_dir) / run.root.name / f"{env.detect().tag.lower() or 'cpu'}.log")
    return files


def resume_command(run: RunDir) -> str:
    """How to go on with a run, ready to be copied."""
    return f"{callable_as('lockstep')} resume {shlex.quote(str(run.root))}"


def callable_as(command: str) -> str:
    """How the user can call a command of this environment from here: by name if it is on PATH, else by its place."""
    place = Path(sys.executable).parent / command
    if shutil.which(command) or not place.exists():
        return command
    return str(place.relative_to(Path.cwd())) if place.is_relative_to(Path.cwd()) else str(place)
