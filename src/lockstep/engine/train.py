"""One run from a configuration to its results: folder, log, data, model, loop, summary."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep import rundir
from lockstep.config.load import Loaded, as_asked
from lockstep.config.schema import RunConfig
from lockstep.contracts import Sink
from lockstep.engine import (
    endings,
    find_batch,
    first_loss,
    fitting,
    folder,
    graphs,
    handover,
    loop,
    present,
    replicas,
    resume,
    settle,
    shortage,
    usage,
)
from lockstep.engine.build import Assembled, Plan, assemble, hub_token, plan
from lockstep.engine.estimate import estimate
from lockstep.engine.milestones import close_the_end, make_good, write_results
from lockstep.engine.parts import Parts
from lockstep.engine.samples import draw_sample
from lockstep.errors import LockstepError
from lockstep.launch.link import Link, attach
from lockstep.models.agent_shapes import AgentShape
from lockstep.models.build import forget_compiled
from lockstep.report.console import ConsoleSink
from lockstep.report.jsonl import EventSink
from lockstep.report.logs import setup_logging
from lockstep.report.tensorboard import TensorboardSink
from lockstep.report.words import USUAL, WORDINGS
from lockstep.rundir import RunDir
from lockstep.runtime import determinism, env, hardware, nodes, owner, rounds, signals
from lockstep.runtime.gpu_facts import Sampler
from lockstep.runtime.group import Group, is_lost_peer, join

logger = logging.getLogger(__name__)

WHOLE = ("ddp", "replicas")  # modes in which one worker has the whole model


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run: Path
    steps: int
    loss: float
    val_loss: float | None
    exit_code: int = 0


def train(loaded: Loaded, listeners: Sequence[Sink] = ()) -> Result:
    """Train what the configuration says, alone or as one of several workers; listeners hear of the first one's steps.

    Failures raise LockstepError; the run folder tells the rest.
    """
    if token := hub_token(loaded.config):
        env.hide(token)
    loaded = folder.go_on(comparable(loaded))
    system, place = loaded.config.system, env.detect()
    link = attach(place)
    with signals.listening() as stop, contextlib.ExitStack() as closing:
        device = hardware.pick_device(system.device, hardware.own_index(place, system.device_id))
        label_by_device(device)
        start_log(loaded, None)
        group = join(place, device, timeout_seconds=system.hang_seconds)
        closing.callback(group.close)
        group.link = link
        link.enter("start")
        link.tell_limit(system.hang_seconds)
        bell, addresses = nodes.gather(place, group)
        if bell:
            closing.callback(bell.close)
            link.tell_nodes(addresses)
        decided = group.together(lambda: settle.decide(loaded.config, as_asked(loaded)))
        for notice in loaded.notices if place.rank == 0 and place.launcher != "lockstep" else ():
            logger.info("%s", notice)
        for line in settle.lines(decided) if place.rank == 0 else ():
            logger.warning("%s", line)
        loaded = settle.settled(loaded, decided)
        with determinism.mode(device, deterministic=system.deterministic, threads=system.threads):
            if loaded.finds_batch:
                link.enter("prepare")  # which may take as long as it likes
                loaded = find_batch.resolved(loaded, device, group)
            forget_compiled()  # sizes of runs before this one, in the same process: they would give it other bits
            planned = plan(loaded, device)
            work = fitting.work_of(planned, place)
            fitting.check_memory(work)
            link.tell_remedy(shortage.foreseen(work, workers=place.local_world))
            run, point = folder.choose_run(group, planned, loaded, closing)
            if point:
                handover.hand_over(point.checkpoint, group, place)
            start_log(loaded, run)
            planned = folder.with_own_files(group, planned, run, closing)
            link.tell_run(run.root.absolute())
            result = train_in(run, planned, point, Surroundings(loaded, stop, group, link, place, listeners))
            group.barrier()  # nobody leaves while another still needs it, however long that takes
            link.close()
            return result


def comparable(loaded: Loaded) -> Loaded:
    """Replicas are compared bit for bit, so they compute with kernels that repeat their bits."""
    system = loaded.config.system
    if system.mode != "replicas" or system.deterministic:
        return loaded
    config = loaded.config.model_copy(update={"system": system.model_copy(update={"deterministic": True})})
    return replace(loaded, config=config)


@dataclass(frozen=True)
class Surroundings:
    """What a run needs beside its plan."""

    loaded: Loaded
    stop: signals.StopRequest
    group: Group
    link: Link
    place: env.Env
    listeners: Sequence[Sink] = ()

    @property
    def first(self) -> bool:
        """Whether this worker keeps the records of the run."""
        return self.place.rank == 0


def label_by_device(device: torch.device) -> None:
    """No variable names the GPU: its number is the label of every line. Without a GPU there is none."""
    if device.type == "cuda" and not env.gpu_label():
        env.setdefault("GPU_RANK", str(device.index or 0))


def train_in(run: RunDir, planned: Plan, point: resume.ResumePoint | None, around: Surroundings) -> Result:
    """Train in a run folder that is ours."""
    config, stop, loaded = planned.config, around.stop, around.loaded
    started = time.perf_counter()
    parts: Parts | None = None
    with contextlib.ExitStack() as closing:
        sampler = watch_gpu(planned.device, run.worker(around.place.tag, around.place.node))
        closing.callback(sampler.close)
        sinks = make_sinks(run, config, around, sampler)
        for sink in sinks:
            closing.callback(sink.close)
        try:
            if around.first:
                folder.tidy(run)
                folder.tell_restart(run, sinks)
                closing.callback(owner.leave, run.root)
            around.link.enter("prepare")
            assembled = assemble(
                planned, run, point=point, sinks=sinks, stop=stop, group=around.group, link=around.link
            )
            closing.callback(assembled.loader.close)
            closing.callback(assembled.parts.saver.snapshot.free)
            if around.first:
                rundir.point_latest(run)  # a run that could not begin is not the latest
            parts = assembled.parts
            parts.until = env.last_step(run.root)
            planned = as_built(planned, assembled)
            announce(run, planned, assembled, point, loaded)
            train_parts(parts, planned, stop)
            replicas.compare(parts, around.group, mode=config.system.mode)
            finish(run, assembled, around, sampler, seconds=time.perf_counter() - started)
        except BaseException as error:
            stop.patient = True  # what is left to do is quick, or worth waiting for
            explained = endings.explain(error, planned, run=run, place=around.place)
            if stop and not isinstance(error, LockstepError) and (is_lost_peer(error) or signals.behind(error)):
                explained = stop.error()  # the others were asked too, and have left; or the compiler was at work
            if parts and parts.progress.step:
                endings.point_to_resuming(explained, run)
            explained.run = run.root  # pyright: ignore[reportAttributeAccessIssue] - where a crash report belongs
            if point and not parts and isinstance(explained, LockstepError):
                sinks.clear()  # refused before it began: what the run has done so far stands as it is
            endings.end_badly(run, explained, sinks, parts, place=around.place, link=around.link)
            if explained is error:
                raise
            raise explained from error
    return Result(run.root, parts.progress.step, parts.last.loss if parts.last else math.nan, parts.val_loss)


def as_built(planned: Plan, assembled: Assembled) -> Plan:
    """The plan as it turned out: compiled or not, which costs memory."""
    model = planned.config.model.model_copy(update={"compile": "on" if assembled.built.compiled else "off"})
    return replace(planned, config=planned.config.model_copy(update={"model": model}))


def train_parts(parts: Parts, planned: Plan, stop: signals.StopRequest) -> None:
    """Rehearse and train, unless all is done already."""
    if parts.has_ended:
        go_on_from_the_end(parts)
        return
    stop.patient = not parts.council.alone  # several ranks leave by agreement, once they have begun
    rehearse(parts, planned)
    estimate(parts)
    stop.patient = True
    loop.run(parts)
    stop.patient = False


def finish(run: RunDir, assembled: Assembled, around: Surroundings, sampler: Sampler, *, seconds: float) -> None:
    """After the last step: what each worker has done, what the model says, and the summary."""
    parts, group = assembled.parts, around.group
    tells_usage = parts.epochs is not None or group.world > 1
    workers = usage.gather(parts, group, sampler, seconds=seconds) if tells_usage else []
    speaks = around.first and (parts.config.system.mode in WHOLE or parts.outcome is not None)
    sample = draw_sample(parts, assembled, group.told(around.link)) if speaks else ""
    around.stop.patient = True  # it is done
    summary = replace(present.summary(run, parts, sample, seconds), workers=tuple(workers))
    parts.tell("end", exit_code=0, step=parts.progress.step, tokens=parts.progress.tokens, **summary.fields())


def go_on_from_the_end(parts: Parts) -> None:
    """A run that is complete: say so, measure it, and make good result files that are missing."""
    step, over = parts.progress.step, parts.is_over(parts.progress.step)
    count = f", {parts.epochs.count} epochs" if parts.epochs else ""
    done = f"all {step} steps are done{count}" if over else f"early stopping ended it after {step} steps"
    logger.info("Nothing left to do: %s", done)
    more = [f"--max-steps {2 * step}"] if over and not parts.epochs else []
    more += ["training.patience=0"] if parts.is_stale and not (over and parts.epochs) else []
    if more:
        run = shlex.quote(str(parts.checkpointer.folder.parent))
        logger.info("  more: lockstep resume %s %s --checkpoint.allow-mismatch true", run, " ".join(more))
    close_the_end(parts)
    write_results(parts)
    make_good(parts)


def watch_gpu(device: torch.device, folder: Path) -> Sampler:
    """Ask the driver about this worker's card now and then; nothing on the CPU."""
    if device.type != "cuda":
        return Sampler(None)
    return Sampler(f"GPU-{torch.cuda.get_device_properties(device).uuid}", folder / "gpu.jsonl")


def make_sinks(run: RunDir, config: RunConfig, around: Surroundings, sampler: Sampler) -> list[Sink]:
    """Who hears of the steps: the screen (or this worker's log), and from the first worker the run's records.

    A replica of its own keeps its own record beside its log.
    """

    def facts() -> dict[str, Any]:
        latest = sampler.latest()
        return asdict(latest) if latest else {}

    console = ConsoleSink(
        config.training.max_steps,
        clip=config.training.max_grad_norm > 0,
        log_interval=config.report.log_interval,
        progress=config.report.progress if around.first else "off",
        brief=not around.first,
        facts=facts,
        family=config.family,
    )
    if not around.first:
        own = run.worker(around.place.tag, around.place.node) / "events.jsonl"
        return [console, EventSink(own, facts=facts)] if config.system.mode == "replicas" else [console]
    sinks: list[Sink] = [*around.listeners, console, EventSink(run.events, facts=facts)]
    if config.report.tensorboard:
        sinks.append(TensorboardSink(run.tensorboard, validation=WORDINGS.get(config.family, USUAL).validation))
    return sinks


def start_log(loaded: Loaded, run: RunDir | None) -> None:
    """Lines to the screen and to every log file that is wanted; those of the run folder once there is one."""
    place, config = env.detect(), loaded.config
    files = present.wanted_logs(config, run) if place.rank == 0 or config.system.log_dir else []
    if run:
        files.append(run.worker(place.tag, place.node) / "log.txt")
    silent = place.rank > 0 and not config.report.log_all_ranks
    screen = "launched" if env.get("LOCKSTEP_LABELLED") else "none" if silent else "own"
    level, prefix = config.debug.log_level, config.report.log_prefix
    setup_logging(tag=place.tag, prefix=prefix, level=level, log_files=files, screen=screen)


def announce(
    run: RunDir, planned: Plan, assembled: Assembled, point: resume.ResumePoint | None, loaded: Loaded
) -> None:
    """What is about to happen, before it does."""
    parts = assembled.parts
    for notice in assembled.built.notices if env.detect().rank == 0 else ():
        if not (point and notice.startswith("weights: random")):
            logger.info("%s", notice)
    options, world = parts.config.training, parts.council.group.world
    if env.detect().rank == 0 and world > 1:
        shown = present.workers_banner(options.precision, options.grad_accum_nums, device=planned.device, world=world)
        for line in shown:
            logger.info("%s", line)
    parts.tell("start", step=parts.progress.step, **present.banner(run, planned, assembled, loaded).fields())
    if point:
        told = {"changed": resume.changed(point, parts.about), "crew": resume.other_crew(point, parts.about)}
        news = {key: value for key, value in told.items() if value}
        parts.tell("resume", step=parts.progress.step, path=str(point.checkpoint), **news)
    elif rounds.current().number:  # from the start: what an earlier round has told of its steps is void
        parts.tell("resume", step=0)


def rehearse(parts: Parts, planned: Plan) -> None:
    """A step that changes nothing: out-of-memory comes now, and the first loss shows whether the model is sane."""
    first = parts.council.fetch(parts.batches, parts.stop)
    parts.batches = itertools.chain([first], parts.batches)
    reading = parts.stepper.rehearse(first)
    graphs.choose(parts.stepper, first, compiles=parts.config.model.compile != "off")
    if parts.progress.step > 0 or parts.config.model.init != "random" or not any(parts.council.agreed.weights.values()):
        return
    if isinstance(planned.shape, AgentShape):
        return
    expected = first_loss.expected(parts.config, planned.shape, first, parts.stepper.objective, parts.council.group)
    parts.tell("first_loss", step=0, loss=reading.loss, expected=expected)
    if not abs(reading.loss - expected) <= first_loss.TOLERANCE * expected:
        logger.warning("First loss %.4f, expected %.2f (ln V + d std²/2)", reading.loss, expected)
