"""Science C9 and C10: an agent finds goals that it has never seen, faster with each episode; what cannot, does not.

The controls: agents that never see a reward, agents that remember one episode, histories in which no episode is better
for being later. The last do not fail, since where a goal pays can be read from episodes in any order; they learn less.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lockstep.engine.parts import Parts
from lockstep.engine.unseen import Outcome, unseen_tasks
from lockstep.engine.walks import Journey, walk, whole_agent
from lockstep.models.agent import Agent
from lockstep.objectives.distill import Distill
from lockstep.worlds.observed import FEATURES, Histories
from tests.gates.training import run

PAID = FEATURES.index("reward before")
SMALL: dict[str, Any] = {  # 36 goals, 29 to learn from and 7 unseen
    "data.grid_size": 6,
    "model.hidden_size": 48,
    "model.init_std": 0.06,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "data.train_env_ratio": 0.8,
    "data.horizon": 10,
    "data.n_stream": 50,
    "data.total_source_timesteps": 6000,
    "data.train_source_timesteps": 120,
    "data.train_n_stream": 50,
    "training.batch_size": 16,
    "training.context_length": 120,
    "training.max_steps": 100,
    "training.learning_rate": 6e-3,
    "training.warmup_steps": 10,
    "training.min_lr_ratio": 0.0,
    "training.adam_beta2": 0.99,
    "training.eval_interval": 0,
    "training.save_interval": 0,
    "training.gen_episodes": 24,
    "system.threads": 1,
}


class Shuffled(Distill):
    """The episodes of each history in any order: none of them is better for being later."""

    def with_histories(self, histories: Histories, *, length: int, terms: Mapping[str, float]) -> Shuffled:
        count, steps = histories.steps.shape[1:]
        episodes = np.random.default_rng(1).permuted(np.tile(np.arange(steps // histories.horizon), (count, 1)), axis=1)
        places = (episodes[:, :, None] * histories.horizon + np.arange(histories.horizon)).reshape(count, -1)
        mixed = np.take_along_axis(histories.steps[:, :, : places.shape[1]], places[None], 2)
        return super().with_histories(replace(histories, steps=mixed), length=length, terms=terms)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that never see a reward, in training and in the world: each step has paid nothing."""
    embedded = Agent.embedded

    def without(agent: Agent, seen_BLF: Tensor) -> Tensor:
        seen_BLF = seen_BLF.clone()
        seen_BLF[..., PAID][seen_BLF[..., PAID] == 1] = 0
        return embedded(agent, seen_BLF)

    monkeypatch.setattr(Agent, "embedded", without)


def trained(folder: Path, preset: str, settings: Mapping[str, Any], **named: Any) -> Parts:
    """An agent of these settings, which has also walked in its unseen tasks."""
    began = time.process_time()
    own = {"data.data_path": folder / "histories", **settings}
    parts, recorder = run(folder, own, family="ad", preset=preset, **named)
    losses = [record.loss for record in recorder.records]
    curve = " ".join(f"{value:.1f}" for value in outcome(parts).curve)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; returns {curve}; {time.process_time() - began:.0f} CPU s")
    return parts


def outcome(parts: Parts) -> Outcome:
    assert parts.outcome is not None
    return parts.outcome


def walked(folder: Path, preset: str, settings: Mapping[str, Any], **named: Any) -> Outcome:
    """How an agent of these settings does in its unseen tasks."""
    return outcome(trained(folder, preset, settings, **named))


def first_and_last(found: Outcome, episodes: int = 10) -> tuple[float, float]:
    return float(np.mean(found.curve[:episodes])), float(np.mean(found.curve[-episodes:]))


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("histories")


def test_a_small_agent_does_better_from_episode_to_episode(tmp_path: Path, histories: Path) -> None:
    """Items 151 and 160: seven unseen goals, optimum 7.7. The first ten episodes pay 3.6 each, the last ten 6.3."""
    parts = trained(tmp_path, "tiny", {**SMALL, "data.data_path": histories})
    (first, last), optimum = first_and_last(outcome(parts)), outcome(parts).optimum.mean()
    assert last > first + 1.5
    assert last > 0.65 * optimum

    world, tasks = unseen_tasks(parts.config)
    model = parts.stepper.model
    assert isinstance(model, Agent)
    forgetful = Journey(world, tasks, 24, repeats=4, context_length=world.horizon, temperature=0.5)
    returns = walk(whole_agent(model), forgetful, parts.stepper.precision)
    print(f"with one episode in mind: {returns.mean():.2f}")
    assert returns.mean() < first


@pytest.mark.usefixtures("blind")
def test_who_never_sees_a_reward_does_not(tmp_path: Path, histories: Path) -> None:
    """The control: the same steps, the same histories. 0.3, then 0.1."""
    found = walked(tmp_path, "tiny", {**SMALL, "data.data_path": histories})
    first, last = first_and_last(found)
    assert last < first + 0.5
    assert last < 0.2 * found.optimum.mean()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_histories_in_no_order_teach_less(tmp_path: Path, histories: Path) -> None:
    for seed in (1, 2, 3):
        own = {**SMALL, "data.data_path": histories, "system.seed": seed}
        (_, ordered), (_, mixed) = (
            first_and_last(walked(tmp_path / f"{seed}-{name}", "tiny", own, objective=objective))
            for name, objective in (("ordered", None), ("mixed", Shuffled()))
        )
        assert mixed < ordered - 1.0, seed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_comes_close_to_the_optimum_in_unseen_goals(tmp_path: Path) -> None:
    """C9: sixteen goals of a 9 x 9 room, optimum 16.6. Five minutes on two cores, collection and walks included."""
    began = time.process_time()
    found = walked(tmp_path, "demo", {"system.threads": 2})
    seconds = time.process_time() - began
    last = float(found.ends.mean())
    print(f"last ten {last:.2f}, first {found.curve[0]:.2f}, optimum {found.optimum.mean():.2f}, {seconds:.0f} CPU s")
    assert seconds < 500
    assert (len(found.tasks), found.last_episodes) == (16, 10)
    assert last >= 0.9 * found.optimum.mean(), "C9 asks for 9 of 16.5 and aims at 70 %"
    assert last >= 3 * found.curve[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("blind")
def test_without_rewards_the_demo_fails(tmp_path: Path) -> None:
    """C10."""
    assert float(walked(tmp_path, "demo", {"system.threads": 2}).ends.mean()) <= 3
