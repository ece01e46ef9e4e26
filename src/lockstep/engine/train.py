"""One run from a configuration to its results: folder, log, data, model, loop, summary."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from lockstep import rundir
from lockstep.config.load import Loaded, identity, to_dict
from lockstep.contracts import SampleOptions, Sink
from lockstep.engine import endings, inference, loop, present, resume
from lockstep.engine.build import Assembled, Plan, assemble, hub_token, plan, versions
from lockstep.engine.parts import Parts
from lockstep.errors import ConfigError, LockstepError, OutputError, Stopped
from lockstep.report.console import ConsoleSink
from lockstep.report.jsonl import EventSink
from lockstep.report.logs import setup_logging
from lockstep.report.tensorboard import TensorboardSink
from lockstep.rundir import RunDir
from lockstep.runtime import determinism, env, hardware, signals

logger = logging.getLogger(__name__)

FIRST_LOSS_TOLERANCE = 0.1  # beyond four standard errors of the mean over the batch


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Path
    steps: int
    loss: float
    val_loss: float | None
    exit_code: int = 0


def train(loaded: Loaded) -> Result:
    """Train what the configuration says. Failures raise LockstepError; the run folder tells the rest."""
    if token := hub_token(loaded.config):
        env.hide(token)
    system = loaded.config.system
    with signals.listening() as stop:
        device = hardware.pick_device(system.device, system.device_id)
        label_by_device(device)
        start_log(loaded, None)
        for notice in loaded.notices:
            logger.info("%s", notice)
        with determinism.mode(device, deterministic=system.deterministic, threads=system.threads):
            planned = plan(loaded, device)
            endings.check_memory(planned.config, planned.shape, device)
            point = resume.find(planned.config, planned.identity_hash)
            if point:
                allow = planned.config.checkpoint.allow_mismatch
                resume.check_early(point, identity(planned.config), allow=allow)
            run = point.run if point and point.run else new_run(planned, loaded)
            with owned(run):
                if point and point.run:  # whoever had the run until now may have saved more
                    point = resume.point_of_run(run.root)
                start_log(loaded, run)
                return train_in(run, planned, point, stop, loaded)


def label_by_device(device: torch.device) -> None:
    """No variable names the GPU: its number is the label of every line. Without a GPU there is none."""
    if device.type == "cuda" and not env.gpu_label():
        env.setdefault("GPU_RANK", str(device.index or 0))


def train_in(
    run: RunDir, planned: Plan, point: resume.ResumePoint | None, stop: signals.StopRequest, loaded: Loaded
) -> Result:
    """Train in a run folder that is ours."""
    config = planned.config
    started = time.perf_counter()
    console = ConsoleSink(
        config.training.max_steps,
        clip=config.training.max_grad_norm > 0,
        log_interval=config.report.log_interval,
        progress=config.report.progress,
    )
    sinks: list[Sink] = [console, EventSink(run.events)]
    if config.report.tensorboard:
        sinks.append(TensorboardSink(run.tensorboard))
    parts: Parts | None = None
    with contextlib.ExitStack() as closing:
        for sink in sinks:
            closing.callback(sink.close)
        try:
            for name in rundir.sweep(run.checkpoints):
                logger.info("Removed an unfinished save: %s", name)
            assembled = assemble(planned, run, point=point, sinks=sinks, stop=stop)
            closing.callback(assembled.loader.close)
            parts = assembled.parts
            rundir.point_latest(run)
            run.failure.unlink(missing_ok=True)  # of an earlier attempt that this one makes good
            announce(run, planned, assembled, point, loaded)
            if parts.progress.step < config.training.max_steps:
                rehearse(parts, planned)
                stop.patient = True
                loop.run(parts)
                stop.patient = False
            else:
                logger.info("Nothing left to do: all %d steps are done", config.training.max_steps)
                loop.validate(parts)
            summary = present.summary(run, parts, draw_sample(parts, assembled), time.perf_counter() - started)
            parts.tell("end", exit_code=0, step=parts.progress.step, tokens=parts.progress.tokens, **summary.fields())
        except BaseException as error:
            stop.patient = False
            explained = endings.explain(error, config, planned.device)
            if isinstance(explained, Stopped) and parts and parts.progress.step:
                explained.where, explained.hint = str(run.root), present.resume_command(run)
            explained.run = run.root  # pyright: ignore[reportAttributeAccessIssue] - where a crash report belongs
            endings.end_badly(run, explained, sinks, parts)
            if explained is error:
                raise
            raise explained from error
    return Result(run.root, parts.progress.step, parts.last.loss if parts.last else math.nan, parts.val_loss)


def start_log(loaded: Loaded, run: RunDir | None) -> None:
    """Lines to the screen and to every log file that is wanted; those of the run folder once there is one."""
    tag, config = env.detect().tag, loaded.config
    files = present.wanted_logs(config, run)
    if run:
        files.append(run.worker(tag) / "log.txt")
    setup_logging(tag=tag, prefix=config.report.log_prefix, level=config.debug.log_level, log_files=files)


def new_run(planned: Plan, loaded: Loaded) -> RunDir:
    """A fresh run folder with its configuration; fails before anything is loaded if it cannot be written."""
    config, out = planned.config, Path(planned.config.run.out)
    for key, folder in (("training.checkpoint_dir", config.training.checkpoint_dir), ("run.out", config.run.out)):
        if folder:
            rundir.probe(Path(folder), key=key)
    name = config.run.name or f"{config.family}-{loaded.name or 'custom'}-{rundir.timestamp()}"
    if config.run.name is None and (out / name).exists():  # two in one second
        name = f"{name}-{time.time_ns() % 1_000_000:06d}"
    run = rundir.create_run(out, name)
    saved = {
        "family": config.family,
        "preset": loaded.preset,
        "created": time.time(),
        "identity_hash": planned.identity_hash,
        "config": to_dict(config),
        "origins": {key: f"{origin.layer} {origin.where}".strip() for key, origin in loaded.origins.items()},
    }
    about_place = {"variables": env.saved(), "versions": versions(), "argv": [env.redact(word) for word in sys.argv]}
    try:
        rundir.write_json(run.config, saved)
        rundir.write_json(run.env, about_place)
        if config.system.output_dir:
            path = Path(config.system.output_dir) / f"{config.run.experiment_name}_config.json"
            rundir.write_json(path, saved["config"])
            logger.info("Configuration saved to %s", path)
    except OSError as error:
        raise rundir.io_error(error, run.root, doing="writing the configuration") from error
    return run


@contextlib.contextmanager
def owned(run: RunDir) -> Iterator[None]:
    """One process at a time trains in a run folder."""
    try:
        lock = FileLock(run.root / "lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            "another process is training in this run", where=str(run.root), hint="wait for it, or --name NEW"
        ) from None
    except OSError as error:
        raise OutputError(f"cannot write to the run: {error.strerror or error}", where=str(run.root)) from error
    try:
        yield
    finally:
        lock.release()


def announce(
    run: RunDir, planned: Plan, assembled: Assembled, point: resume.ResumePoint | None, loaded: Loaded
) -> None:
    """What is about to happen, before it does."""
    parts = assembled.parts
    for notice in assembled.built.notices:
        if not (point and notice.startswith("weights: random")):
            logger.info("%s", notice)
    parts.tell("start", step=parts.progress.step, **present.banner(run, planned, assembled, loaded).fields())
    if point:
        parts.tell("resume", step=parts.progress.step, path=str(point.checkpoint))


def rehearse(parts: Parts, planned: Plan) -> None:
    """A step that changes nothing: out-of-memory comes now, and the first loss shows whether the model is sane."""
    first = next(parts.batches)
    parts.batches = itertools.chain([first], parts.batches)
    reading = parts.stepper.rehearse(first)
    if parts.progress.step > 0 or parts.config.model.init != "random":
        return
    std = parts.config.model.head_init_std or parts.config.model.init_std
    spread = std * math.sqrt(planned.shape.hidden_size)  # of a logit: after the last norm |h| is sqrt(d)
    expected = math.log(planned.shape.vocab_size) + spread**2 / 2
    allowed = FIRST_LOSS_TOLERANCE + 4 * spread / math.sqrt(sum(batch.tokens for batch in first))
    parts.tell("first_loss", step=0, loss=reading.loss, expected=expected)
    if not abs(reading.loss - expected) <= allowed:
        logger.warning("First loss %.4f, expected %.2f ± %.2f (ln V + d std²/2)", reading.loss, expected, allowed)


def draw_sample(parts: Parts, assembled: Assembled) -> str:
    """What the model says to the configured prompt."""
    report, tokenizer = parts.config.report, assembled.prepared.tokenizer
    if not report.sample_prompt:
        return ""
    options = SampleOptions(
        tokens=report.sample_tokens, temperature=0.6, seed=parts.config.system.seed, stop=(tokenizer.separator,)
    )
    try:
        with parts.stepper.precision.context():
            return inference.continue_text(
                parts.stepper.model, parts.stepper.objective, tokenizer, report.sample_prompt, options
            )
    except (LockstepError, RuntimeError) as error:  # the training is done and saved: this does not undo it
        logger.warning("No sample: %s", error)
        return ""
