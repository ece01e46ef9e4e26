"""`lockstep sample` of an agent: it walks in a task it has not seen; its last episode as a picture, and all returns."""

from __future__ import annotations

from pathlib import Path

from lockstep.engine.trials import at_rest, checked_goal, load_agent
from lockstep.engine.unseen import TEMPERATURE, Outcome, best, describe, unseen_tasks
from lockstep.engine.walks import Journey, follow
from lockstep.learners.history import History
from lockstep.report import walks as drawing
from lockstep.worlds.table import NOWHERE, World

EPISODES = 20


def walk_run(
    path: Path, *, goal_idx: int = 0, episodes: int = EPISODES, temperature: float = TEMPERATURE, seed: int = 0
) -> str:
    """The first of the walks of `lockstep eval` with the same seed, in lines."""
    loaded = load_agent(path)
    world, goals = unseen_tasks(loaded.config)
    task = goals[checked_goal(goal_idx, goals)]
    length = loaded.config.training.context_length
    journey = Journey(world, (task,), episodes, context_length=length, seed=seed, temperature=temperature)
    agent, precision = at_rest(loaded)
    history = follow(agent, journey, precision, *journey.rows())
    outcome = Outcome((task,), history.returns(world.horizon).cpu().numpy()[None], best(world, (task,)))
    return "\n".join([
        f"unseen task {goal_idx} of {len(goals)}: {describe(world, task)}",
        *last_episode(world, task, history),
        f"episode {episodes}, return {outcome.returns[0, 0, -1]}",
        *outcome.lines(),
    ])  # fmt: skip


def last_episode(world: World, task: int, history: History) -> list[str]:
    """How the first row's last episode ended."""
    cells, actions, rewards = (column[0, -world.horizon :].tolist() for column in history)
    end = int(world.moves_CA[cells[-1], world.meaning_KA[task, actions[-1]]])
    targets = [int(cell) for cell in world.targets_KP[task] if int(cell) != NOWHERE]
    names = {"G": "goal"} if world.phases == 1 else {"K": "key", "D": "door"}
    found = 0 if world.phases == 1 else sum(rewards)  # a key and a door are gone once they are found
    left = [*zip(targets, names, strict=True)][found:]
    picture = drawing.grid(world.size, [*cells, end], dict(reversed(left)), paid=bool(rewards[-1]))
    return [drawing.legend(names), *picture]
