"""How an agent does in tasks it has never seen: which walks it makes there, and what they are worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.data.options import HistoryOptions
from lockstep.engine.histories import make_world, tasks_of
from lockstep.engine.options import AgentTrainingOptions
from lockstep.engine.walks import Journey, Returns, walk, whole_agent
from lockstep.errors import ConfigError
from lockstep.models.agent import Agent
from lockstep.report import walks as drawing
from lockstep.worlds.table import NOWHERE, World

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.engine.parts import Parts

LAST_EPISODES = 10  # what an agent has come to is judged by
MOST_TASKS = 64  # that a run walks in while it trains
TEMPERATURE = 0.5  # surer than the source learner, whose noise need not be copied; greedy it would stop to search


@dataclass(frozen=True)
class Outcome:
    """What walks paid, beside what could be had."""

    tasks: tuple[int, ...]
    returns: Returns  # (tasks, repeats, episodes)
    optimum: Returns  # (tasks,)

    @property
    def per_task(self) -> Returns:
        """(tasks, episodes): the mean of the walks in each task."""
        return self.returns.mean(1)

    @property
    def curve(self) -> list[float]:
        """The mean of each episode."""
        return self.returns.mean((0, 1)).tolist()

    @property
    def last_episodes(self) -> int:
        """No more than half of them: the end is compared with the beginning."""
        return max(1, min(LAST_EPISODES, self.returns.shape[2] // 2))

    @property
    def ends(self) -> Returns:
        """(tasks,): the mean of the last episodes."""
        return self.per_task[:, -self.last_episodes :].mean(1)

    def lines(self) -> list[str]:
        """The mean return of each episode, for people."""
        return drawing.curve(self.curve, float(self.optimum.mean()), last=self.last_episodes)

    def fields(self) -> dict[str, Any]:
        """For programs, and for everyone who follows a run."""
        return {
            "return": float(self.returns.mean()),
            "first_return": float(self.returns[:, :, 0].mean()),
            "last_return": float(self.ends.mean()),
            "optimum": float(self.optimum.mean()),
            "tasks": len(self.tasks),
            "repeats": self.returns.shape[1],
            "episodes": self.returns.shape[2],
            "last_episodes": self.last_episodes,
            "curve": self.curve,
        }


def unseen_tasks(config: RunConfig) -> tuple[World, tuple[int, ...]]:
    """The world of a run, and those of its tasks that are kept unseen."""
    assert isinstance(config.data, HistoryOptions)
    world = make_world(config.data)
    return world, tasks_of(config.data, world).test


def check_context(config: RunConfig, world: World, agent: Agent) -> None:
    """Refuse a memory that is shorter than an episode."""
    length = config.training.context_length
    if not agent.shape.compressed and world.horizon > length:
        what = f"an episode of {world.horizon} steps does not fit a context of {length}"
        raise ConfigError(what, where="training.context_length", hint=f"at least {world.horizon}, to walk in it")


def best(world: World, tasks: tuple[int, ...]) -> Returns:
    """The largest return of an episode of each task."""
    return world.optimum(torch.tensor(tasks)).numpy()


def in_training(parts: Parts) -> Outcome | None:
    """The walks of a run at this moment; None where there are to be none. All ranks call it."""
    config, options = parts.config, parts.config.training
    if not isinstance(options, AgentTrainingOptions) or not options.gen_episodes:
        return None
    model = parts.stepper.model
    assert isinstance(model, Agent)
    world, tasks = unseen_tasks(config)
    check_context(config, world, model)
    journey = Journey(
        world,
        tasks[:MOST_TASKS],
        options.gen_episodes,
        repeats=options.gen_repeats,
        context_length=options.context_length,
        seed=config.system.seed,
        temperature=TEMPERATURE,
    )
    returns = walk(
        whole_agent(model), journey, parts.stepper.precision, group=parts.council.group, link=parts.link
    )  # fmt: skip
    return Outcome(journey.tasks, returns, best(world, journey.tasks))


def describe(world: World, task: int) -> str:
    """A task in words: where it pays, or what its actions do."""
    targets = [int(cell) for cell in world.targets_KP[task] if int(cell) != NOWHERE]
    places = [f"({cell // world.size}, {cell % world.size})" for cell in targets]
    if len(places) > 1:
        return f"key {places[0]}, door {places[1]}"
    order = world.meaning_KA[task].tolist()
    moved = order != sorted(order)
    return (
        f"{places[0]}, actions {' '.join(map(str, order))}" if moved or world.name == "darkroompermuted" else places[0]
    )


def mean_and_spread(returns: Returns) -> tuple[float, float]:
    """Of single episodes."""
    return float(np.mean(returns)), float(np.std(returns))
