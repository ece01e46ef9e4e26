"""Agents let loose in a world: they act, see what it pays and go on, and no weight is ever changed.

All walks, tasks x repeats, are rows of one batch; episode follows episode, and what a row has lived through so far is
all it can learn from. What is drawn in a step is a hash of (seed, task, repeat, step). Rows are cut into chunks of one
size, whoever walks them: ranks share the chunks out, and their numbers are those of one process.
Shapes: B rows, A actions, F features of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.learners import draws
from lockstep.learners.history import History
from lockstep.models.agent import Agent
from lockstep.runtime.group import Group
from lockstep.runtime.marks import Marks, NoMarks
from lockstep.runtime.parallel import whole
from lockstep.runtime.precision import Precision
from lockstep.worlds.observed import NO_REWARD
from lockstep.worlds.table import World

CHUNK_ROWS = {"cpu": 32, "cuda": 1024}  # walked side by side; never by the number of ranks
KERNEL = "native_flash"  # of attention: it takes rows of any length, everywhere

Returns = np.ndarray[Any, Any]  # int64 (tasks, repeats, episodes)
Step = tuple[Tensor, Tensor, Tensor]  # cells, actions and rewards of each row


class Follower(Protocol):
    """Who reads histories as they happen."""

    def see(self, seen_BF: Tensor) -> Tensor:
        """One step more of each history: the logits (B, A) of what to do in it."""
        ...


class Walker(Protocol):
    """Who can walk: an Agent, or whatever reads as it does."""

    def reader(self, rows: int, *, context_length: int, horizon: int) -> Follower: ...


@dataclass(frozen=True)
class Journey:
    """Where to walk, how often, how long, and how to choose."""

    world: World
    tasks: tuple[int, ...]
    episodes: int
    repeats: int = 1
    context_length: int = 1  # steps that are remembered, as in training
    seed: int = 0
    temperature: float = 1.0  # of the draw; 0: the likeliest action

    def signs(self, device: torch.device) -> int:
        """How often a process alone tells that it goes on: once a step of each chunk."""
        chunks = -(-len(self.tasks) * self.repeats // CHUNK_ROWS[device.type])
        return chunks * self.episodes * self.world.horizon

    def rows(self) -> tuple[Tensor, Tensor]:
        """The task of each row, and the key of its randomness."""
        tasks = torch.tensor(self.tasks).repeat_interleave(self.repeats)
        repeats = torch.arange(self.repeats).repeat(len(self.tasks))
        return tasks, draws.keys(tasks, repeats, seed=self.seed)


def walk(
    agent: Walker,
    journey: Journey,
    precision: Precision,
    *,
    group: Group | None = None,
    link: Marks | None = None,
    chunk_rows: int = 0,
) -> Returns:
    """What each episode of each walk paid. All ranks call it, and all get everything; agents are whole on each."""
    group = group or Group()
    link = group.told(link or NoMarks())  # who has fewer chunks waits, and hears that the others go on
    tasks, keys = journey.rows()
    size = chunk_rows or CHUNK_ROWS[precision.device.type]
    chunks = list(zip(tasks.split(size), keys.split(size), strict=True))
    own: dict[str, list[list[int]]] = {}
    for number in range(group.rank, len(chunks), group.world):
        history = follow(agent, journey, precision, *chunks[number], link=link)
        own[str(number)] = history.returns(journey.world.horizon).tolist()
    found: dict[str, list[list[int]]] = {}
    for part in group.gather(own):
        found |= part
    rows = [row for number in range(len(chunks)) for row in found[str(number)]]
    return np.array(rows, np.int64).reshape(len(journey.tasks), journey.repeats, journey.episodes)


def follow(
    agent: Walker, journey: Journey, precision: Precision, tasks: Tensor, keys: Tensor, *, link: Marks | None = None
) -> History:
    """All steps of some rows."""
    horizon = journey.world.horizon
    history = History.empty(len(tasks), journey.episodes * horizon, precision.device)
    for time, (cells, actions, rewards) in enumerate(steps(agent, journey, precision, tasks, keys)):
        if link:
            link.enter("evaluate")
        history.cells[:, time], history.actions[:, time], history.rewards[:, time] = cells, actions, rewards
    return history


@torch.no_grad()
def steps(agent: Walker, journey: Journey, precision: Precision, tasks: Tensor, keys: Tensor) -> Iterator[Step]:
    """Some rows, step by step. The first one of an episode still tells what the last one of the episode before did."""
    device = precision.device
    world, tasks, keys = journey.world.to(device), tasks.to(device), keys.to(device)
    reader = agent.reader(len(tasks), context_length=journey.context_length, horizon=world.horizon)
    before, paid = torch.full_like(tasks, world.actions), torch.full_like(tasks, NO_REWARD)
    start = states = torch.full_like(tasks, world.start)
    for time in range(journey.episodes * world.horizon):
        first = time % world.horizon == 0
        states = start if first else states
        x_B, y_B = world.coordinates(states).unbind(-1)
        seen_BF = torch.stack((x_B, y_B, before, paid, torch.full_like(tasks, first)), -1)
        with precision.context():
            logits_BA = reader.see(seen_BF)
        actions = choose(logits_BA, draws.bits(keys, draws.WALK, time), journey.temperature)
        after, pays = world.step(tasks, states, actions)
        yield states % world.cells, actions, pays.long()
        states, before, paid = after, actions, pays.long()


def choose(logits_BA: Tensor, bits_B: Tensor, temperature: float) -> Tensor:
    """One action of each row; in double precision, so that only the logits' own rounding can decide otherwise."""
    if temperature == 0:
        return logits_BA.argmax(-1)
    heights_BA = draws.heights((logits_BA.double() / temperature).softmax(-1))
    drawn_B1 = draws.uniform(bits_B).double()[:, None] * heights_BA[:, -1:]
    return (heights_BA[:, :-1] <= drawn_B1).sum(-1)


@torch.no_grad()
def whole_agent(model: Agent) -> Agent:
    """The same agent by itself: whole where it lies in shards, not compiled, at rest. All ranks ask for theirs.

    So walking leaves the one that is trained as it is, and ranks need not walk equally often.
    """
    parameters = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    some = next(iter(parameters.values()))
    with torch.device("meta"):
        agent = Agent(model.shape, attention=KERNEL)
    agent = agent.to(some.dtype).to_empty(device=some.device)
    agent.rebuild_buffers()
    for name, parameter in agent.named_parameters():
        parameter.copy_(parameters[name])
    return agent.eval()
