"""Science G4: the documented 8 unseen goals on a GPU, 500 episodes each, where the seed published 10.77 of 17.25."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engine.parts import Parts
from lockstep.engine.unseen import Outcome, best, unseen_tasks
from lockstep.engine.walks import Journey, walk, whole_agent
from lockstep.models.agent import Agent
from lockstep.objectives.distill import Distill
from tests.science.test_ad import trained

EPISODES, REPEATS = 500, 8
SECONDS = 480  # collection, training and evaluation
PUBLISHED_GOALS = (19, 18, 15, 16, 18, 16, 16, 20)  # their optima
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: science G4 is not shown")


def walks(parts: Parts, *, episodes: int, repeats: int, most_tasks: int | None = None) -> Outcome:
    """Of a trained agent in its unseen tasks."""
    world, tasks = unseen_tasks(parts.config)
    tasks = tasks[:most_tasks]
    model = parts.stepper.model
    assert isinstance(model, Agent)
    length = parts.config.training.context_length
    journey = Journey(world, tasks, episodes, repeats=repeats, context_length=length, temperature=0.5)
    return Outcome(tasks, walk(whole_agent(model), journey, parts.stepper.precision), best(world, tasks))


def shares(found: Outcome) -> Any:
    """(tasks,): the mean of all episodes as a share of the optimum."""
    return found.per_task.mean(1) / found.optimum


def test_the_goals_are_the_published_ones() -> None:
    """Needs no GPU: what the figures are compared with."""
    from lockstep.config.load import load

    world, tasks = unseen_tasks(load("ad", preset="darkroom", flags=[]).config)
    optima = best(world, tasks)
    assert sorted(optima.tolist()) == sorted(PUBLISHED_GOALS)
    assert optima.mean() == 17.25


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.timeout(900)
def test_the_documented_goals_in_eight_minutes(tmp_path: Path) -> None:
    began = time.perf_counter()
    parts = trained(tmp_path, "darkroom", {"system.device": "cuda"})
    found = walks(parts, episodes=EPISODES, repeats=REPEATS)
    seconds = time.perf_counter() - began
    print(
        f"mean {found.returns.mean():.2f} of {found.optimum.mean()}, shares {shares(found).round(3)}, {seconds:.0f} s"
    )
    assert found.returns.mean() >= 15.5
    assert shares(found).min() >= 0.5
    assert seconds <= SECONDS


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", [1, 2, 3])
def test_other_goals_are_found_as_well(tmp_path: Path, split: int) -> None:
    parts = trained(tmp_path, "darkroom", {"system.device": "cuda", "data.env_split_seed": split})
    found = walks(parts, episodes=EPISODES, repeats=REPEATS)
    print(f"split {split}: mean {found.returns.mean():.2f} of {found.optimum.mean()}, {shares(found).round(3)}")
    assert found.returns.mean() >= 0.85 * found.optimum.mean()


@pytest.mark.gpu
@pytest.mark.slow
@needs_gpu
@pytest.mark.timeout(900)
def test_keys_and_doors_are_found_more_often_than_by_the_teacher_at_last(tmp_path: Path) -> None:
    """Its histories end before it has found everything; the agent goes on."""
    parts = trained(tmp_path, "key_door", {"system.device": "cuda"})
    objective = parts.stepper.objective
    assert isinstance(objective, Distill)
    histories = objective.histories
    last = slice(-histories.horizon, None)
    world, tasks = unseen_tasks(parts.config)
    rows = histories.steps[2].reshape(world.tasks, -1, histories.steps.shape[2])[list(tasks)]
    source = float(rows[..., last].sum(-1).mean())
    found = walks(parts, episodes=40, repeats=1)
    print(f"source {source:.3f} in its last episode, agent {found.ends.mean():.3f}, {np.round(found.curve, 2)}")
    assert found.ends.mean() > source
