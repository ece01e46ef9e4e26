"""From a configuration to histories on the device: which world, whose histories, which of them are unseen."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep import registry
from lockstep.config.load import load, presets
from lockstep.data.cache import key_of
from lockstep.data.histories import FOLDER, HistoryTable
from lockstep.data.options import HistoryOptions
from lockstep.engine import collect
from lockstep.engine.collect import Collection
from lockstep.engine.history_files import read_hdf5, world_settings
from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.models.agent_shapes import AgentShape
from lockstep.runtime import env, hardware
from lockstep.worlds.observed import Histories
from lockstep.worlds.split import Split, split

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.contracts import Array, Objective
    from lockstep.data.options import DataOptions
    from lockstep.engine.prepare import Prepared
    from lockstep.learners.history import Learner
    from lockstep.models.shapes import AnyShape
    from lockstep.worlds.table import World

logger = logging.getLogger(__name__)

LEARNERS = {"PPO": "ppo", "PSRL": "posterior"}  # data.alg -> file of learners/
SET_AS = {"batch_size": "source_batch_size"}  # names of learners' own settings
COLLECTED = (
    "env", "grid_size", "horizon", "alg", "policy", "n_steps", "source_batch_size", "n_epochs", "source_lr",
    "source_noise", "streams_per_learner", "alg_seed", "total_source_timesteps", "n_stream", "data_path",
)  # fmt: skip  # what decides a collection, and where it lies


@dataclass(frozen=True)
class Gathered:
    """What a collection has come to."""

    path: Path
    shape: tuple[int, ...]  # tasks, streams, steps
    last_return: float | None  # mean over all of them; None: not one whole episode
    optimum: float
    made: bool  # just now

    def lines(self) -> list[str]:
        """For people."""
        paid = "no whole episode" if self.last_return is None else f"{self.last_return:.2f} of {self.optimum:.2f}"
        return [
            f"{'Collected' if self.made else 'There already'}: {self.path}",
            f"  histories       {_size(*self.shape)}",
            f"  last return     {paid} (mean of all, against the optimum)",
        ]


def planned(config: RunConfig) -> list[str]:
    """What a collection would come to, for people."""
    asked = wanted(_options(config))
    return [
        f"histories         {_size(len(asked.tasks), asked.streams, asked.steps)}",
        f"file              {asked.file('hdf5')}{', which is there' if asked.file('hdf5').exists() else ''}",
    ]


def _size(tasks: int, streams: int, steps: int) -> str:
    return f"{tasks:,} tasks x {streams:,} streams x {steps:,} steps ({tasks * streams * steps:,})"


def make_world(options: HistoryOptions) -> World:
    """The world that data.env names."""
    size: dict[str, Any] = {"size": options.grid_size}
    if options.horizon is not None:
        size["horizon"] = options.horizon
    return registry.load("worlds", options.env, "build")(**size)


def make_learner(options: HistoryOptions) -> Learner:
    """The source learner that data.alg names."""
    settings: dict[str, Any] = {"region": options.n_steps, "noise": options.source_noise}
    if options.alg == "PPO":
        settings = {
            "n_steps": options.n_steps,
            "batch_size": options.source_batch_size,
            "n_epochs": options.n_epochs,
            "source_lr": options.source_lr,
            "streams_per_learner": options.streams_per_learner or options.n_stream,
        }
    return registry.load("learners", LEARNERS[options.alg], "build")(**settings)


@contextlib.contextmanager
def _named_as_set() -> Generator[None]:
    """What worlds and learners refuse, under the name of the setting."""
    try:
        yield
    except ConfigError as error:
        where = f"data.{SET_AS.get(error.where, error.where)}"
        raise ConfigError(error.what, where=where, hint=error.hint) from None


@_named_as_set()
def wanted(options: HistoryOptions) -> Collection:
    """What is to be collected for these options."""
    folder = Path(options.data_path or FOLDER)
    if folder.is_file():
        what = f"{folder} is a file, expected the folder that it lies in"
        raise ConfigError(what, where="data_path", hint=f"data.data_path={shlex.quote(str(folder.parent))}")
    return collect.plan(
        make_world(options),
        make_learner(options),
        total_timesteps=options.total_source_timesteps,
        streams=options.n_stream,
        seed=options.alg_seed,
        folder=folder,
    )


@_named_as_set()
def tasks_of(options: HistoryOptions, world: World) -> Split:
    """Which tasks are learnt from, and which are unseen."""
    return split(world.tasks, seed=options.env_split_seed, ratio=options.train_env_ratio)


def gather(config: RunConfig, *, overwrite: bool = False) -> Gathered:
    """Collect the histories a configuration asks for, unless they are there."""
    asked = wanted(_options(config))
    made = overwrite or not asked.file("hdf5").exists()
    path = _collected(config, asked, overwrite=overwrite)
    found, horizon = read_hdf5(path, asked.world), asked.world.horizon
    whole = found.table.shape[-1] // horizon * horizon  # steps of whole episodes
    last = found.table[2, :, :, max(0, whole - horizon) : whole]
    mean = float(last.mean()) * horizon if whole else None
    best = asked.world.optimum(torch.tensor(found.tasks)).double().mean().item()
    return Gathered(path, found.table.shape[1:], mean, best, made)


def _options(config: RunConfig) -> HistoryOptions:
    assert isinstance(config.data, HistoryOptions), "of agents"
    return config.data


def _collected(config: RunConfig, asked: Collection, *, overwrite: bool = False) -> Path:
    """The file of the histories, collected here or by whom we have waited for."""
    return collect.collect(
        asked,
        device=hardware.pick_device(config.system.device, hardware.own_index(env.detect(), config.system.device_id)),
        workers=min(_options(config).n_process, len(os.sched_getaffinity(0))),
        overwrite=overwrite,
        again=lambda: f"{how_to_collect(config)} --overwrite, or another data.data_path",
        progress=config.report.progress,
    )


def how_to_collect(config: RunConfig) -> str:
    """The command that collects exactly these histories: the nearest preset, and what differs from it."""
    options = _options(config)
    told: list[list[str]] = []
    for name in sorted({*presets(config.family)} - {"debug"}):
        usual = load(config.family, preset=name).config.data
        other = [f"data.{key}={_word(getattr(options, key))}" for key in COLLECTED if _differs(options, usual, key)]
        told.append([name, *other])
    return shlex.join(["lockstep", "collect", config.family, *min(told, key=len)])


def _differs(options: HistoryOptions, usual: DataOptions, key: str) -> bool:
    return getattr(options, key) != getattr(usual, key)


def _word(value: object) -> str:
    return "null" if value is None else str(value)


def prepare(config: RunConfig, *, actions: int) -> Prepared:
    """Open the histories a configuration asks for, collecting them first if need be; `actions` of the model."""
    from lockstep.engine.prepare import Prepared

    options = _options(config)
    asked = wanted(options)
    if actions != asked.world.actions:
        raise ConfigError(
            f"{actions}, and {options.env} has {asked.world.actions} actions",
            where="model.vocab_size",
            hint=f"model.vocab_size={asked.world.actions}, or leave it out",
        )
    path = asked.file("hdf5")
    told = logging.INFO if env.detect().rank == 0 else logging.DEBUG
    if not path.exists():
        if not options.collect:
            raise NotFoundError("no histories to learn from", where=str(path), hint=how_to_collect(config))
        logger.log(told, "Collecting histories: %s", path)
    found = read_hdf5(_collected(config, asked), asked.world)
    steps = _distilled(found.table, options, asked.world.horizon)
    _check_length(config, steps.shape[-1])
    tasks, notices = _present(tasks_of(options, asked.world), found.tasks, path)
    notices += _fewer(options, found.table)
    for notice in notices:
        logger.log(logging.WARNING if told == logging.INFO else told, notice)
    flat = np.ascontiguousarray(steps).reshape(3, -1, steps.shape[-1])  # a copy only of a part of the table
    about = {"tasks": found.tasks, "world": world_settings(asked.world), "split": tasks}
    key = key_of({"histories": hashlib.sha256(flat.reshape(-1).data).hexdigest(), **about})
    histories = Histories(
        flat,
        size=asked.world.size,
        horizon=asked.world.horizon,
        actions=asked.world.actions,
        region=asked.learner.region,
        stride=options.episode_stride,
    )
    train, validation = (_rows(part, found.tasks, streams=steps.shape[2]) for part in tasks)
    logger.log(told, "Histories: %s, %d to learn from, %d of unseen tasks", path, train.rows, validation.rows)
    return Prepared(train, validation, None, key, path.parent, f"histories {path.name}", tuple(notices), histories)


def _rows(part: tuple[int, ...], tasks: tuple[int, ...], *, streams: int) -> HistoryTable:
    """The histories of a split, one of each task after the other: the first few are of many tasks."""
    place = {task: number for number, task in enumerate(tasks)}
    firsts = np.array([place[task] * streams for task in part])
    return HistoryTable((np.arange(streams)[:, None] + firsts).reshape(-1))


def _present(tasks: Split, there: tuple[int, ...], path: Path) -> tuple[Split, list[str]]:
    """The split without tasks of which there are no histories, and the notice of that."""
    known, notices = set(there), list[str]()
    kept = Split(*(tuple(task for task in part if task in known) for part in tasks))
    for what, part, whole in zip(("to learn from", "that are unseen"), kept, tasks, strict=True):
        if not part:
            raise DataError(
                f"no history of any of the {len(whole)} tasks {what}",
                where=str(path),
                hint="data.env_split_seed or data.train_env_ratio for another split, or a file with more tasks",
            )
        if len(part) < len(whole):
            notices.append(f"{path}: of the {len(whole)} tasks {what} only {len(part)} have histories")
    return kept, notices


def _fewer(options: HistoryOptions, table: Array) -> list[str]:
    """Where more is to be distilled than there is."""
    streams, steps = table.shape[2:]
    wishes = (("train_n_stream", streams, "streams"), ("train_source_timesteps", steps, "steps"))
    return [
        f"data.{name} is {getattr(options, name):,}, the histories have {there:,} {what}: all are distilled"
        for name, there, what in wishes
        if getattr(options, name) > there
    ]


def _check_length(config: RunConfig, steps: int) -> None:
    if steps < config.training.context_length:
        raise ConfigError(
            f"a window of {config.training.context_length} steps, histories of {steps}",
            where="training.context_length",
            hint=f"at most {steps}, or a larger data.total_source_timesteps or data.train_source_timesteps",
        )


def _distilled(table: Array, options: HistoryOptions, horizon: int) -> Array:
    """(3, tasks, streams, steps): the streams, steps and episodes that are learnt from."""
    part = table[:, :, : options.train_n_stream, : options.train_source_timesteps]
    if options.episode_stride == 1:
        return part
    episodes = part.shape[-1] // horizon
    if episodes < 1:
        raise ConfigError("not one whole episode", where="data.train_source_timesteps", hint=f"at least {horizon}")
    whole = part[..., : episodes * horizon].reshape(*part.shape[:3], episodes, horizon)
    return whole[..., :: options.episode_stride, :].reshape(*part.shape[:3], -1)


def terms(config: RunConfig, shape: AgentShape) -> dict[str, float]:
    """The terms of the loss beside the action's, with their coefficients: what else a model of that shape says."""
    strength: float = getattr(config.model, "dynamics_strength", 0.0)
    kinds = {"loss_token_type": 1.0} if shape.compressed else {}
    return {**kinds, **({"loss_dynamics": strength} if shape.dynamics else {})}


def with_histories(objective: Any, prepared: Prepared, config: RunConfig, shape: AnyShape) -> Objective:
    """The objective that knows what was prepared."""
    assert isinstance(shape, AgentShape), "only agents learn from histories"
    length, horizon = config.training.context_length, prepared.histories.horizon if prepared.histories else 0
    if not shape.compressed and length < horizon:
        raise ConfigError(
            f"an episode of {horizon} steps does not fit into a context of {length}",
            where="training.context_length",
            hint=f"training.context_length={horizon} or more, or model.compressed=true",
        )
    return objective.with_histories(prepared.histories, length=length, terms=terms(config, shape))
