"""Algorithm Distillation: which windows, the loss against its formula, exact weights, and what must not be seen."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.contracts import Batch, Draw, Rows
from lockstep.errors import ConfigError
from lockstep.learners import draws
from lockstep.learners.posterior import build as posterior
from lockstep.models.agent import Agent
from lockstep.models.initialise import initialise
from lockstep.objectives.distill import BEGINS, ENDS, INSIDE, Distill, build
from lockstep.objectives.options import DistillOptions
from lockstep.worlds.darkroom import build as darkroom
from lockstep.worlds.observed import FEATURES, NO_REWARD, Histories, observe
from tests.agents import REGIONS, TINY

WORLD = darkroom(size=5, horizon=6)
LENGTH, STEPS, REGION = 20, 48, 12
SHAPE = replace(REGIONS, region=8, dynamics=True)
TERMS = {"loss_token_type": 0.5, "loss_dynamics": 2.0}
DRAW = Draw(seed=5, step=0, batch_rows=8)


def learnt(histories: int = 30) -> Histories:
    """Of real learners in a real world."""
    tasks = torch.arange(histories) % WORLD.tasks
    keys = draws.keys(tasks, torch.arange(histories), seed=1)
    steps = np.stack([part.numpy() for part in posterior(region=REGION).run(WORLD, tasks, keys, steps=STEPS)])
    return Histories(steps, size=5, horizon=6, actions=5, region=REGION)


@pytest.fixture(scope="module")
def histories() -> Histories:
    return learnt()


@pytest.fixture(scope="module")
def agent() -> Agent:
    made = Agent(SHAPE, attention="native_flash")
    initialise(made, seed=1, std=0.2)
    made.double().rebuild_buffers()
    return made


def made(histories: Histories, *, terms: dict[str, float] | None = None, **options: Any) -> Distill:
    objective = build(DistillOptions.model_validate(options))
    return objective.with_histories(histories, length=LENGTH, terms=TERMS if terms is None else terms)


def rows_of(ids: range, *, epoch: int = 0) -> Rows:
    numbers = np.array(ids)
    return Rows(
        numbers, np.full_like(numbers, epoch), numbers - ids[0], {"histories": numbers[:, None].astype(np.int32)}
    )


# ------------------------------------------------------------------------------------------------------------ windows


def test_windows_begin_with_an_episode_and_are_what_the_history_says(histories: Histories) -> None:
    objective = made(histories)
    batch = objective.collate(rows_of(range(30)), DRAW)
    cells, actions, rewards = objective.windows(batch).numpy()
    for row, (place, start) in enumerate(
        zip(*(batch.tensors[name].tolist() for name in ("histories", "starts")), strict=True)
    ):
        assert place == row
        assert start % 6 == 0
        assert 0 <= start <= STEPS - LENGTH
        assert np.array_equal(
            np.stack((cells, actions, rewards))[:, row], histories.steps[:, row, start : start + LENGTH]
        )
        assert cells[row, ::6].tolist() == [WORLD.start] * 4
    assert (batch.rows, batch.tokens) == (30, 30 * LENGTH)


def test_every_window_comes_equally_often_and_anew_in_each_epoch(histories: Histories) -> None:
    objective = made(histories)
    starts = [
        tuple(objective.collate(rows_of(range(30), epoch=epoch), DRAW).tensors["starts"].tolist())
        for epoch in range(200)
    ]
    counts = Counter(start for each in starts for start in each)
    assert set(counts) == {0, 6, 12, 18, 24}
    assert all(abs(count - 1200) < 4.5 * math.sqrt(1200 * 0.8) for count in counts.values())
    assert len(set(starts)) == 200
    other = objective.collate(rows_of(range(30)), DRAW._replace(seed=6)).tensors["starts"]
    assert tuple(other.tolist()) != starts[0]
    later = objective.collate(rows_of(range(30)), DRAW._replace(step=7, batch_rows=99)).tensors["starts"]
    assert tuple(later.tolist()) == starts[0], "the row and the epoch decide, not when it comes"


def test_one_window_is_all_there_is_where_the_history_is_no_longer(histories: Histories) -> None:
    short = replace(histories, steps=histories.steps[:, :, :LENGTH])
    assert not made(short).collate(rows_of(range(30)), DRAW).tensors["starts"].any()


def test_what_is_seen_is_of_before(histories: Histories) -> None:
    """The place is that of the step, all else of the step before; the first of a window has none before."""
    cells, actions, rewards = (torch.from_numpy(part[:2, :LENGTH]) for part in histories.steps)
    seen = dict(zip(FEATURES, observe(cells, actions, rewards, size=5, horizon=6, no_action=5).unbind(-1), strict=True))
    assert torch.equal(seen["x"] * 5 + seen["y"], cells.long())
    assert torch.equal(seen["action before"][:, 1:], actions[:, :-1].long())
    assert torch.equal(seen["reward before"][:, 1:], rewards[:, :-1].long())
    assert (seen["action before"][:, 0] == 5).all()
    assert (seen["reward before"][:, 0] == NO_REWARD).all()
    assert seen["first"][0].tolist() == [int(place % 6 == 0) for place in range(LENGTH)]


# --------------------------------------------------------------------------------------------------------------- loss


def by_hand(agent: Agent, objective: Distill, batch: Batch, *, smoothing: float = 0.0) -> dict[str, float]:
    """Every sum, step by step, from the histories and the world's own table; each step from its own past alone."""
    found: dict[str, float] = defaultdict(float)
    steps = torch.from_numpy(objective.histories.steps).long()
    for place, start in zip(batch.tensors["histories"].tolist(), batch.tensors["starts"].tolist(), strict=True):
        cells, actions, rewards = steps[:, place, start : start + LENGTH]
        for time in range(LENGTH):
            past = [part[None, : time + 1] for part in (cells, actions, rewards)]
            seen = observe(past[0], past[1], past[2], size=5, horizon=6, no_action=5)
            with torch.no_grad():
                said = {name: logits[0, -1].log_softmax(-1) for name, logits in agent(seen, past[1]).items()}
            action = int(actions[time])
            found["loss_action"] -= float((1 - smoothing) * said["action"][action] + smoothing * said["action"].mean())
            found["acc_action"] += int(said["action"].argmax()) == action
            phase = (start + time) % REGION
            kind = BEGINS if phase == 0 else ENDS if phase == REGION - 1 else INSIDE
            found["loss_token_type"] -= float(said["kind"][kind])
            found["acc_token_type"] += int(said["kind"].argmax()) == kind
            if (time + 1) % 6 and time + 1 < LENGTH:
                task = torch.tensor(place % WORLD.tasks)
                after, pays = WORLD.step(task, cells[time], actions[time])
                outcome = {"x": int(after) // 5, "y": int(after) % 5, "reward": int(pays)}
                found["loss_dynamics"] -= sum(float(said[name][value]) for name, value in outcome.items())
                found["acc_dynamics"] += all(int(said[name].argmax()) == value for name, value in outcome.items())
                found["told"] += 1
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_its_formula(histories: Histories, agent: Agent, smoothing: float) -> None:
    """The outcome against the world's table; smoothing against its definition; the weights counted."""
    objective = made(histories, label_smoothing=smoothing)
    batch = objective.collate(rows_of(range(4, 8)), DRAW)
    expected = by_hand(agent, objective, batch, smoothing=smoothing)
    found = objective.loss(agent, batch)
    for name in objective.watched:
        assert float(found[name].detach()) == pytest.approx(expected[name], abs=1e-9), name
    told = int(expected["told"])
    assert batch.weights == {"loss_action": 80, "loss_token_type": 80, "loss_dynamics": told}
    assert told == 4 * 16
    assert not found["acc_action"].requires_grad
    plain = objective.evaluate(agent, batch)
    unsmoothed = by_hand(agent, objective, batch)
    for name in objective.watched:
        assert float(plain[name].total) == pytest.approx(unsmoothed[name], abs=1e-9), name
        assert plain[name].weight == batch.weights[objective.watched[name]]
    assert plain["loss"] == plain["loss_action"]


def test_smoothing_is_that_of_torch(histories: Histories, agent: Agent) -> None:
    objective = made(histories, terms={}, label_smoothing=0.1)
    batch = objective.collate(rows_of(range(4)), DRAW)
    cells, actions, rewards = objective.windows(batch)
    logits = agent(observe(cells, actions, rewards, size=5, horizon=6, no_action=5))["action"].flatten(0, 1)
    theirs = F.cross_entropy(logits, actions.long().flatten(), reduction="sum", label_smoothing=0.1)
    assert float(objective.loss(agent, batch)["loss_action"].detach()) == pytest.approx(
        float(theirs.detach()), abs=1e-9
    )
    assert set(objective.loss(agent, batch)) == {"loss_action", "acc_action"}


def test_the_cut_changes_nothing(histories: Histories, agent: Agent) -> None:
    objective, rows = made(histories), rows_of(range(8))
    whole = objective.collate(rows, DRAW)
    sums = {name: float(value.detach()) for name, value in objective.loss(agent, whole).items()}
    for sizes in ((1,) * 8, (3, 5), (2, 2, 4)):
        parts = [objective.collate(rows_of(range(*cut)), DRAW) for cut in pairwise(np.cumsum((0, *sizes)).tolist())]
        for name in ("histories", "starts"):
            assert torch.equal(torch.cat([part.tensors[name] for part in parts]), whole.tensors[name])
        assert {term: sum(part.weights[term] for part in parts) for term in whole.weights} == whole.weights
        found = [objective.loss(agent, part) for part in parts]
        for name, expected in sums.items():
            assert sum(float(each[name].detach()) for each in found) == pytest.approx(expected, abs=1e-9), (sizes, name)
    means = [float(objective.loss(agent, part)["loss_action"].detach()) / part.rows for part in parts]
    assert sum(means) / 3 != pytest.approx(sums["loss_action"] / 8, rel=1e-3), "control: a mean of means"


def test_regions_are_where_they_were_before_episodes_were_left_out(histories: Histories) -> None:
    """Every second episode of 6 steps, regions of 12: the episodes kept begin at 0, 12, 24, ... of the source."""
    thinned = replace(histories, stride=2)
    objective = made(thinned)
    batch = objective.collate(rows_of(range(30)), DRAW)
    kinds = objective._kinds(batch)
    for start, row in zip(batch.tensors["starts"].tolist(), kinds.tolist(), strict=True):
        for time, kind in enumerate(row):
            episode, step = divmod(start + time, 6)
            phase = (episode * 12 + step) % REGION
            assert kind == (BEGINS if phase == 0 else ENDS if phase == REGION - 1 else INSIDE)
    assert not torch.equal(kinds, made(histories)._kinds(batch)), "control: as if all episodes were there"


# -------------------------------------------------------------------------------------------------- negative controls


class Oracle(nn.Module):
    """Says what it was shown: the actions of a place among the features, and the outcome."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, seen_BLF: Tensor, taken_BL: Tensor) -> dict[str, Tensor]:
        known = (
            taken_BL if self.shift == 0 else F.pad(seen_BLF[:, 1:, 2], (0, 1)) if self.shift > 0 else seen_BLF[..., 2]
        )
        return {"action": 50.0 * F.one_hot(known.clamp(0, 4), 5).double()}


def test_a_leak_would_be_seen(histories: Histories) -> None:
    """Who is told the action itself, or reads it in the next step, has no loss; the action before is no such thing."""
    objective = made(histories, terms={})
    batch = objective.collate(rows_of(range(30)), DRAW)
    losses = {shift: objective.evaluate(Oracle(shift), batch) for shift in (0, 1, -1)}
    accuracy = {shift: float(found["acc_action"].total) / found["acc_action"].weight for shift, found in losses.items()}
    assert accuracy[0] == 1
    assert accuracy[1] >= 1 - 1 / LENGTH
    assert accuracy[-1] < 0.9


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_target_would_be_seen(
    histories: Histories, agent: Agent, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = made(histories, terms={})
    batch = objective.collate(rows_of(range(4)), DRAW)
    right = by_hand(agent, objective, batch)["loss_action"]
    windows = objective.windows(batch)
    shifted = windows.clone()
    shifted[1] = windows[1].roll(shift, -1)
    monkeypatch.setattr(Distill, "windows", lambda *_: shifted)
    assert float(objective.loss(agent, batch)["loss_action"].detach()) != pytest.approx(right, rel=1e-3)


def test_gradients_of_an_answer_come_from_its_past_only(histories: Histories, agent: Agent) -> None:
    """Of the loss at each step to what is shown at all steps: nothing above the diagonal, nothing missing below."""
    objective = made(histories, terms={})
    batch = objective.collate(rows_of(range(1)), DRAW)
    shown: list[Tensor] = []

    def note(_table: nn.Module, _given: Any, out: Tensor) -> None:
        shown.append(out)

    handle = agent.tok_embed.register_forward_hook(note)
    try:
        cells, actions, rewards = objective.windows(batch)
        seen = observe(cells, actions, rewards, size=5, horizon=6, no_action=5)
        losses = F.cross_entropy(agent(seen)["action"][0], actions[0].long(), reduction="none")
    finally:
        handle.remove()
    reached = torch.stack(
        [torch.autograd.grad(loss, shown[0], retain_graph=True)[0].flatten(2).norm(dim=-1)[0] > 0 for loss in losses]
    )
    assert torch.equal(reached, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())


# ------------------------------------------------------------------------------------------------------------- others


def test_learning_lowers_every_term(histories: Histories) -> None:
    agent = Agent(replace(SHAPE, attention_dropout=0.0), attention="native_flash")
    initialise(agent, seed=1, std=0.05)
    objective = made(histories)
    optimizer = torch.optim.AdamW(agent.parameters(), 3e-3)
    first: dict[str, float] = {}
    means: dict[str, Tensor] = {}
    for step in range(60):
        batch = objective.collate(rows_of(range(30), epoch=step), DRAW)
        sums = objective.loss(agent, batch)
        means = {term: sums[term] / batch.weights[term] for term in objective.terms}
        first = first or {term: float(mean.detach()) for term, mean in means.items()}
        optimizer.zero_grad()
        torch.stack(list(means.values())).sum().backward()
        optimizer.step()
    for term, margin in (("loss_action", 0.4), ("loss_token_type", 0.4), ("loss_dynamics", 2.0)):
        assert float(means[term].detach()) < first[term] - margin, term


def test_text_is_refused(histories: Histories) -> None:
    with pytest.raises(ConfigError, match="histories, not from text"):
        made(histories).pack([], context_length=8, separator=0)
    with pytest.raises(ConfigError, match="histories, not from text"):
        made(histories).sample(nn.Identity(), [1], None)  # pyright: ignore[reportArgumentType]


def test_the_plain_objective_has_one_term() -> None:
    assert dict(Distill().terms) == {"loss_action": 1.0}
    assert dict(Distill().watched) == {"loss_action": "loss_action", "acc_action": "loss_action"}
    assert TINY.said == {"action": 5}
