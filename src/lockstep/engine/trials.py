"""Measuring a trained agent: `lockstep eval` of a run lets it loose in the tasks it has not seen, and writes it down.

Files: `eval_result.npy`, the mean return of the walks as float64 (goals, episodes), and a picture beside it; of one
goal alone `eval_result_goal<k>`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import rundir
from lockstep.config.load import from_saved
from lockstep.data.options import HistoryOptions
from lockstep.engine import legacy
from lockstep.engine.inference import LoadedModel, bare_model, fill, load_model
from lockstep.engine.unseen import TEMPERATURE, Outcome, best, check_context, describe, mean_and_spread, unseen_tasks
from lockstep.engine.walks import Journey, walk, whole_agent
from lockstep.errors import ConfigError, DataError
from lockstep.models import shapes
from lockstep.models.agent import Agent
from lockstep.report import returns as pictures
from lockstep.report.console import Bar
from lockstep.report.logs import is_terminal
from lockstep.runtime import torch_file
from lockstep.runtime.hardware import pick_device
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.precision import Precision, for_measuring, resolve
from lockstep.worlds.table import World

EPISODES, REPEATS = 100, 4
LISTED = 24  # goals; of more only some have a line of their own
RESULT = "eval_result"


@dataclass(frozen=True)
class Evaluation:
    """How an agent did in its unseen tasks."""

    checkpoint: Path
    world: World
    goals: tuple[int, ...]  # all unseen tasks
    chosen: tuple[int, ...]  # the places among them that were walked in
    outcome: Outcome
    temperature: float
    max_reward: float
    files: tuple[Path, ...]

    @property
    def names(self) -> list[str]:
        return [describe(self.world, task) for task in self.goals]

    def fields(self) -> dict[str, Any]:
        """For programs."""
        mean, spread = mean_and_spread(self.outcome.returns)
        return {
            "checkpoint": str(self.checkpoint),
            "world": self.world.name,
            "temperature": self.temperature,
            "max_reward": self.max_reward,
            "overall_mean_reward": mean,
            "std_deviation": spread,
            "share_of_optimum": mean / float(self.outcome.optimum.mean()),
            **self.outcome.fields(),
            "goals": [
                {
                    "goal_idx": place,
                    "task": self.goals[place],
                    "name": self.names[place],
                    "mean_reward": float(self.outcome.returns[row].mean()),
                    "last_return": float(self.outcome.ends[row]),
                    "optimum": int(self.outcome.optimum[row]),
                }
                for row, place in enumerate(self.chosen)
            ],
            "files": [str(path) for path in self.files],
        }

    def lines(self) -> list[str]:
        """For people; the documented lines among them."""
        outcome, names = self.outcome, self.names
        (mean, spread), best_mean = mean_and_spread(outcome.returns), float(outcome.optimum.mean())
        _, repeats, episodes = outcome.returns.shape
        width = max(len(name) for name in names[:LISTED])
        rows = [
            f"  {place:>3}: {names[place]:<{width}}  {outcome.returns[row].mean():6.2f} of {outcome.optimum[row]:>2} "
            f"({_share(outcome.returns[row].mean(), outcome.optimum[row])}), "
            f"{outcome.per_task[row, 0]:.2f} → {outcome.ends[row]:.2f}"
            for row, place in enumerate(self.chosen)
        ]
        walks = f"{repeats} walk{'s' * (repeats > 1)} of {episodes} episodes in each, temperature {self.temperature:g}"
        last, tasks = f"last {outcome.last_episodes}", "task" if len(self.chosen) == 1 else "tasks"
        ends = f"{last} episodes" if outcome.last_episodes > 1 else "last episode"
        return [
            f"{self.checkpoint}: {len(self.chosen)} unseen {tasks} of {self.world.name}, {walks}",
            f"Available test goals ({len(names)} total):",
            *_some([f"  {place:>3}: {name}" for place, name in enumerate(names)]),
            f"Mean reward per environment: (of its optimum, first episode → {last})",
            *_some(rows),
            f"Overall mean reward: {mean:.4f}",
            f"Std deviation: {spread:.4f}",
            f"Optimum: {best_mean:.4f}, reached {_share(mean, best_mean)} (max_reward {self.max_reward:g})",
            f"First episode: {outcome.curve[0]:.4f}, {ends}: {float(outcome.ends.mean()):.4f} "
            f"({_share(float(outcome.ends.mean()), best_mean)})",
            *(f"Saved to {path}" for path in self.files),
        ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def _some(lines: list[str]) -> list[str]:
    left = len(lines) - LISTED
    return lines if left <= 0 else [*lines[:LISTED], f"  ... and {left} more (--json, --goal-idx)"]


def evaluate_run(  # noqa: PLR0913 - how to walk, by name
    path: Path,
    *,
    episodes: int = EPISODES,
    repeats: int = REPEATS,
    temperature: float = TEMPERATURE,
    seed: int = 0,
    goal_idx: int | None = None,
    folder: Path | None = None,
    device: str = "auto",
) -> Evaluation:
    """`lockstep eval RUN` of an agent, all unseen goals or one of them; its files go to `folder`, if that is said."""
    loaded = load_agent(path, device=device)
    config, data = loaded.config, loaded.config.data
    assert isinstance(data, HistoryOptions)
    world, goals = unseen_tasks(config)
    chosen = tuple(range(len(goals))) if goal_idx is None else (checked_goal(goal_idx, goals),)
    tasks = tuple(goals[place] for place in chosen)
    length = config.training.context_length
    journey = Journey(world, tasks, episodes, repeats, context_length=length, seed=seed, temperature=temperature)
    agent, precision = at_rest(loaded)
    with _progress(journey.signs(precision.device)) as link:
        outcome = Outcome(tasks, walk(agent, journey, precision, link=link), best(world, tasks))
    stem = RESULT if goal_idx is None else f"{RESULT}_goal{goal_idx}"
    files = tuple(folder / f"{stem}{suffix}" for suffix in (".npy", ".png")) if folder else ()
    found = Evaluation(loaded.checkpoint, world, goals, chosen, outcome, temperature, data.max_reward, files)
    return _written(found) if files else found


@contextlib.contextmanager
def _progress(signs: int) -> Generator[Marks]:
    """Who is told of each step: a bar, where somebody waits at a terminal."""
    try:
        bar = Bar(sys.stderr, signs, counted=False, label="Walking") if is_terminal(sys.stderr) else None
    except ImportError:
        bar = None
    if bar is None:
        yield NoMarks()
        return
    try:
        yield Steps(bar)
    finally:
        bar.close()


class Steps:
    """Marks that move a bar on."""

    def __init__(self, bar: Bar) -> None:
        self.bar, self.done = bar, 0

    def enter(self, section: str, step: int = -1) -> None:
        del section, step
        self.done += 1
        self.bar.update(self.done, "")

    def busy(self, step: int, seconds: float) -> None: ...


def load_agent(path: Path, *, device: str = "auto") -> LoadedModel:
    """The agent of a run, of a checkpoint or of a documented ckpt-<step>.pt; a model that is none is refused."""
    loaded = _of_file(path, device) if path.suffix == ".pt" else load_model(path, device=device)
    if not isinstance(loaded.model, Agent):
        raise ConfigError("this run is not of an agent (family ad)", where=str(path), hint="a run of lockstep train ad")
    check_context(loaded.config, unseen_tasks(loaded.config)[0], loaded.model)
    return loaded


def _of_file(path: Path, device: str) -> LoadedModel:
    """Such a file of ours says what it belongs to."""
    content: Any = torch_file.read(path)
    try:
        about, weights = content[legacy.EXTRA_KEY]["about"], content["model"]
        config, shape = from_saved(about["config"]), shapes.from_hf(about["shape"])
        model = bare_model(config, shape, pick_device(device, 0), documents_apart=False)
        fill(model, weights)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        what = f"does not say which agent it is of: {error!r}"
        raise DataError(what, where=str(path), hint="the run folder, or a file that lockstep has written") from error
    return LoadedModel(model.eval(), config, shape, path, about)


def at_rest(loaded: LoadedModel) -> tuple[Agent, Precision]:
    """The agent as it walks, with the precision it was trained in."""
    assert isinstance(loaded.model, Agent)
    device = next(loaded.model.parameters()).device
    named = loaded.config.training.precision
    return whole_agent(loaded.model), Precision(resolve(for_measuring(named), device), device)


def checked_goal(goal_idx: int, goals: tuple[int, ...]) -> int:
    """One of the unseen goals, by its place among them."""
    if not 0 <= goal_idx < len(goals):
        what = f"there are {len(goals)} test goals, and {goal_idx} is none of them"
        raise ConfigError(what, where="--goal-idx", hint=f"0 to {len(goals) - 1}")
    return goal_idx


def _written(found: Evaluation) -> Evaluation:
    """The same, its files written; without the package that draws there is no picture."""
    table, image = found.files
    outcome, count = found.outcome, len(found.chosen)
    title = f"{found.world.name}: mean of {count} unseen tasks, {outcome.returns.shape[1]} walks in each"
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        with rundir.replacing(table) as temporary, temporary.open("xb") as file:
            np.save(file, outcome.per_task)
        if drawn := pictures.picture(outcome.curve, optimum=float(outcome.optimum.mean()), title=title):
            rundir.write_bytes(image, drawn)
            return found
    except OSError as error:
        raise rundir.io_error(error, table, doing="writing the evaluation") from error
    return Evaluation(**{**found.__dict__, "files": (table,)})
