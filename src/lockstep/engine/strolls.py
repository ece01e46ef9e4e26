"""`lockstep sample` of an agent: it walks in a task it has not seen, episode by episode, before one's eyes."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from lockstep.engine.trials import at_rest, checked_goal, load_agent
from lockstep.engine.unseen import TEMPERATURE, best, describe, unseen_tasks
from lockstep.engine.walks import Journey, steps
from lockstep.report import walks as drawing
from lockstep.report.logs import COLUMNS, is_terminal
from lockstep.worlds.table import NOWHERE, World

EPISODES = 20
FRAME_SECONDS, WHOLE_SECONDS = 0.08, 15.0  # of one step, and of all at most, on a terminal
FALLBACK = (COLUMNS, 24)  # columns and lines where no terminal says


@dataclass(frozen=True)
class Moment:
    """After a step: which episode, from 0, what it has paid so far, and how things stand."""

    episode: int
    paid: int
    scene: drawing.Scene


def walk_run(
    path: Path,
    stream: IO[str],
    *,
    goal_idx: int = 0,
    episodes: int = EPISODES,
    temperature: float = TEMPERATURE,
    seed: int = 0,
) -> str:
    """The first episodes and the last as pictures, and all returns; a terminal sees every step before.

    It is the first of the walks of `lockstep eval` with the same seed.
    """
    loaded = load_agent(path)
    world, goals = unseen_tasks(loaded.config)
    task = goals[checked_goal(goal_idx, goals)]
    length = loaded.config.training.context_length
    journey = Journey(world, (task,), episodes, context_length=length, seed=seed, temperature=temperature)
    agent, precision = at_rest(loaded)
    taken = (int(actions) for _, actions, _ in steps(agent, journey, precision, *journey.rows()))
    letters = drawing.letters_for(getattr(stream, "encoding", None), len(targets_of(world, task)))
    title = f"unseen task {goal_idx} of {len(goals)}: {describe(world, task)}"
    last: dict[int, Moment] = {}
    with _watching(stream, letters, title, episodes * world.horizon) as show:
        for moment in moments(world, task, taken):
            last[moment.episode] = moment
            show(moment, [found.paid for found in last.values()])
    optimum = int(best(world, (task,))[0])
    return "\n".join(still(list(last.values()), letters, title=title, optimum=optimum))


def moments(world: World, task: int, actions: Iterator[int]) -> Iterator[Moment]:
    """What each action leads to."""
    targets, start = targets_of(world, task), world.start
    which, state, paid, trail = torch.tensor(task), torch.tensor(start), 0, [start % world.cells]
    for number, action in enumerate(actions):
        if number % world.horizon == 0:
            state, paid, trail = torch.tensor(start), 0, [start % world.cells]
        state, pays = world.step(which, state, torch.tensor(action))
        paid += int(pays)
        trail.append(int(state) % world.cells)
        held = int(state) // world.cells
        scene = drawing.Scene(world.size, targets, tuple(trail), paid=bool(pays), held=held)
        yield Moment(number // world.horizon, paid, scene)


def targets_of(world: World, task: int) -> tuple[int, ...]:
    """The cells that pay, in their order."""
    return tuple(int(cell) for cell in world.targets_KP[task] if int(cell) != NOWHERE)


def still(ends: list[Moment], letters: drawing.Letters, *, title: str, optimum: int) -> list[str]:
    """Some episodes as they ended, and the curve of all; no more than fits the screen."""
    columns, rows = shutil.get_terminal_size(FALLBACK)
    size, returns = ends[0].scene.size, [float(moment.paid) for moment in ends]
    last = max(1, min(10, len(ends) // 2))
    words = [title, drawing.legend(letters)]
    after = drawing.curve(returns, float(optimum), letters, width=min(60, columns), last=last)
    if rows < size + len(words) + len(after) + 4:  # two labels, the line of the command and of the next prompt
        return [words[0], *after]
    chosen = drawing.shown_episodes(len(ends), drawing.room_for(size, columns))
    pictures = [
        [f"episode {place + 1}", *drawing.grid(ends[place].scene, letters), f"return {ends[place].paid}"]
        for place in chosen
    ]
    return [*words, *drawing.side_by_side(pictures), *after]


@contextlib.contextmanager
def _watching(
    stream: IO[str], letters: drawing.Letters, title: str, count: int
) -> Generator[Callable[[Moment, list[int]], None]]:
    """Who looks on: a terminal, if there is one and rich draws on it."""
    try:
        view = drawing.View(stream, letters) if is_terminal(stream) else None
    except ImportError:
        view = None
    if view is None:
        yield lambda _moment, _returns: None
        return
    pause = min(FRAME_SECONDS, WHOLE_SECONDS / count)
    drawn = time.monotonic()

    def show(moment: Moment, returns: list[int]) -> None:
        nonlocal drawn
        time.sleep(max(0.0, drawn + pause - time.monotonic()))
        drawn = time.monotonic()
        below = [f"episode {moment.episode + 1}, return {moment.paid}"]
        top = max(1, *returns)
        below.append(drawing.bars([float(each) for each in returns], float(top), 60, letters))
        view.show(moment.scene, title, [*below, drawing.legend(letters)])

    with view:
        yield show
