"""PPO (Schulman et al. 2017) in the form of stable-baselines3's MlpPolicy: all learners as one stack, in lockstep.

A rollout of `n_steps` in each of the learner's streams, then `n_epochs` passes over it in minibatches of `batch_size`:

    ratio = pi(a|s) / pi_old(a|s),   A' = (A - mean A) / (std A + 1e-8) within the minibatch
    loss  = -mean min(ratio A', clip(ratio, 1 - clip, 1 + clip) A') + vf_coef * mean (R - V)²

with generalised advantages (Schulman et al. 2016) and returns R = A + V_old. Where the horizon cuts an episode off, its
last reward is raised by gamma * V(last state): being cut off is not the end.

The world has few states, so one pass gives policy and value of all of them; a rollout is then only looking up.
Shapes: N learners, E streams of each, T = n_steps, S states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.learners.draws import ACTION, SHUFFLE, bits, heights, uniform
from lockstep.learners.history import History
from lockstep.learners.network import LINE, Stack, one_thread
from lockstep.worlds.table import World


class Streams(NamedTuple):
    """(N * E,) each; the streams of a learner lie side by side."""

    tasks: Tensor
    keys: Tensor
    states: Tensor


class Rollout(NamedTuple):
    """(N, T * E) each."""

    states: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class PPO:
    """The settings, by their names in stable-baselines3, and with its defaults where the seed says nothing."""

    label: ClassVar[str] = "PPO"
    n_steps: int = 80
    batch_size: int = 40
    n_epochs: int = 20
    source_lr: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    hidden: int = 64
    streams_per_learner: int = 1  # above 1: so many streams feed one learner, as the seed's upstream has it

    def __post_init__(self) -> None:
        if self.n_steps * self.streams_per_learner % self.batch_size:
            raise ConfigError(
                f"a rollout of {self.n_steps} x {self.streams_per_learner} steps is not a whole number of minibatches",
                where="batch_size",
                hint="a divisor of n_steps",
            )

    @property
    def region(self) -> int:
        return self.n_steps

    def steps(self, wanted: int) -> int:
        return -(-wanted // self.n_steps) * self.n_steps

    def chunk(self, device: torch.device) -> int:
        return 32 if device.type == "cpu" else 4096  # 32: what the caches of a core hold

    def run(self, world: World, tasks: Tensor, keys: Tensor, *, steps: int) -> History:
        streams = self.streams_per_learner
        assert steps % self.n_steps == 0
        assert len(tasks) % streams == 0
        if len(tasks) == streams:  # the product of a single pair of matrices takes another path, with other roundings
            twins = self.run(world, tasks.repeat(2), keys.repeat(2), steps=steps)
            return History(*(column[:streams] for column in twins))
        history = History.empty(len(tasks), steps, tasks.device)
        inputs_SD = features(world)
        stack = Stack(keys[::streams], inputs_SD.shape[1], hidden=self.hidden, actions=world.actions)
        running = Streams(tasks, keys, torch.full_like(tasks, world.start))
        with one_thread():
            for start in range(0, steps, self.n_steps):
                rollout, running = self.rollout(stack, world, running, history, start)
                self.learn(stack, rollout, inputs_SD, keys[::streams], start // self.n_steps)
        return history

    def rollout(
        self, stack: Stack, world: World, streams: Streams, history: History, start: int
    ) -> tuple[Rollout, Streams]:  # fmt: skip
        """Walk `n_steps` with the present policy, writing the history; what was seen, and where the streams are."""
        tasks, keys, states = streams
        inputs_SD, count = features(world), stack.networks
        logits, values = stack.forward(inputs_SD.expand(count, -1, -1))
        log_probs = log_softmax(logits)
        limits = heights(log_probs.exp()).float()[..., :-1].reshape(-1, world.actions - 1)
        log_probs, values = log_probs.reshape(-1, world.actions), values.reshape(-1)
        network = torch.arange(count, device=tasks.device).repeat_interleave(self.streams_per_learner) * world.states
        seen: dict[str, list[Tensor]] = {name: [] for name in ("states", "actions", "log_probs", "rewards", "values")}
        for time in range(start, start + self.n_steps):
            place = network + states
            actions = (uniform(bits(keys, ACTION, time))[:, None] >= limits[place]).sum(1)
            after, pays = world.step(tasks, states, actions)
            history.cells[:, time], history.actions[:, time] = states % world.cells, actions
            history.rewards[:, time] = pays
            rewards = pays.float()
            if (time + 1) % world.horizon == 0:
                rewards = rewards + self.gamma * values[network + after]
                after = torch.full_like(after, world.start)
            row = (states, actions, log_probs[place, actions], rewards, values[place])
            for column, value in zip(seen.values(), row, strict=True):
                column.append(value)
            states = after
        advantages = self.advantages(seen["rewards"], seen["values"], values[network + states], world.horizon, start)
        columns = [*(torch.stack(seen[name]) for name in ("states", "actions", "log_probs")), advantages]
        columns.append(advantages + torch.stack(seen["values"]))
        by_learner = (column.view(self.n_steps, count, -1).transpose(0, 1).reshape(count, -1) for column in columns)
        return Rollout(*by_learner), Streams(tasks, keys, states)

    def advantages(
        self, rewards: list[Tensor], values: list[Tensor], last: Tensor, horizon: int, start: int
    ) -> Tensor:  # fmt: skip
        """(T, streams): discounted sums of how much better each step was than foreseen, within its episode."""
        running, found = torch.zeros_like(last), []
        for time in reversed(range(self.n_steps)):
            ends = (start + time + 1) % horizon == 0
            if ends:
                running = rewards[time] - values[time]
            else:
                ahead = last if time + 1 == self.n_steps else values[time + 1]
                error = rewards[time] + self.gamma * ahead - values[time]
                running = error + self.gamma * self.gae_lambda * running
            found.append(running)
        return torch.stack(found[::-1])

    def learn(self, stack: Stack, rollout: Rollout, inputs_SD: Tensor, keys: Tensor, number: int) -> None:
        """All epochs over one rollout."""
        size = rollout.states.shape[1]
        seen = inputs_SD[rollout.states]
        packed = torch.zeros((*seen.shape[:2], LINE), device=seen.device)
        packed[..., : seen.shape[-1]] = seen
        packed[..., -4:] = torch.stack([column.float() for column in rollout[1:]], -1)
        packed, first_row = packed.view(-1, LINE), torch.arange(len(keys), device=keys.device)[:, None] * size
        places = torch.arange(size, device=keys.device)
        for epoch in range(self.n_epochs):
            time = (number * self.n_epochs + epoch) * size
            order = bits(keys[:, None], SHUFFLE, places + time).argsort(1).add_(first_row)
            mixed = packed.index_select(0, order.view(-1)).view(len(keys), size, LINE)
            for first in range(0, size, self.batch_size):
                self.minibatch(stack, mixed[:, first : first + self.batch_size], inputs_SD.shape[1])

    def minibatch(self, stack: Stack, rows_NBC: Tensor, inputs: int) -> Tensor:
        """One update of every learner; the norms of their gradients."""
        x = rows_NBC[..., :inputs]
        actions, old, advantages, returns = rows_NBC[..., -4:].movedim(-1, 0).contiguous()
        count = rows_NBC.shape[1]
        logits, values = stack.forward(x)
        log_probs = log_softmax(logits)
        chosen = actions.long()[..., None]
        ratio = (log_probs.gather(-1, chosen).squeeze(-1) - old).exp()
        centred = advantages - advantages.mean(1, keepdim=True)
        deviation = (centred.square().sum(1, keepdim=True) / max(1, count - 1)).sqrt()
        advantages = centred / (deviation + 1e-8)
        free, clipped = advantages * ratio, advantages * ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        weight = torch.where(free <= clipped, free, 0.0).mul_(-1 / count)[..., None]
        by_logits = log_probs.exp_().mul_(-weight)
        by_logits.scatter_add_(-1, chosen, weight)
        by_values = (values - returns).mul_(2 * self.vf_coef / count)
        stack.backward(x, by_logits, by_values)
        return stack.update(rate=self.source_lr, max_norm=self.max_grad_norm, epsilon=1e-5)


def log_softmax(logits: Tensor) -> Tensor:
    """Step by step: torch's own rounds a row by how many there are."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log_()


def features(world: World) -> Tensor:
    """(S, D): what the networks are shown of each state: x and y as they are, and the phase where there are several."""
    states = torch.arange(world.states, device=world.moves_CA.device)
    seen = world.coordinates(states).float()
    return seen if world.phases == 1 else torch.cat((seen, (states // world.cells)[:, None].float()), 1)


def build(**settings: Any) -> PPO:
    return PPO(**settings)
