"""PPO for one stream as one would write it down: autograd, torch's own Adam, a Python loop. Ours is held against it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.learners.draws import ACTION, SHUFFLE, bits, uniform
from lockstep.learners.network import Stack
from lockstep.learners.ppo import PPO
from lockstep.worlds.table import World


class Plain(nn.Module):
    """Two towers, copied from one network of a stack."""

    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        w, count = stack.weights, stack.networks
        self.towers = nn.ModuleList()
        for tower, wide in enumerate((stack.actions, 1)):
            at = tower * count + number
            pairs = ((w.w1[at], w.b1[at]), (w.w2[at], w.b2[at]), (w.w3[at, :, :wide], w.b3[at, :, :wide]))
            layers: list[nn.Module] = []
            for weight, offset in pairs:
                layer = nn.Linear(*weight.shape)
                layer.weight.data, layer.bias.data = weight.T.clone(), offset[0].clone()
                layers += [layer, nn.Tanh()]
            self.towers.append(nn.Sequential(*layers[:-1]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.towers[0](x), self.towers[1](x).squeeze(-1)


def run(ppo: PPO, model: Plain, world: World, task: int, key: Tensor, steps: int) -> dict[str, list[int]]:
    """Learn in one stream; the history."""
    optimizer = torch.optim.Adam(model.parameters(), lr=ppo.source_lr, eps=1e-5)
    history: dict[str, list[int]] = {"cells": [], "actions": [], "rewards": []}
    state = world.start
    for start in range(0, steps, ppo.n_steps):
        rows, rewards, values, ends = [], [], [], []
        for time in range(start, start + ppo.n_steps):
            seen = torch.tensor([state // world.size, state % world.size]).float()
            with torch.no_grad():
                logits, value = model(seen)
            chances = logits.softmax(-1).cumsum(-1).tolist()
            drawn = float(uniform(bits(key, ACTION, time)))
            action = sum(drawn >= chance for chance in chances[:-1])
            after, pays = world.step(torch.tensor(task), torch.tensor(state), torch.tensor(action))
            for name, number in (("cells", state), ("actions", action), ("rewards", int(pays))):
                history[name].append(number)
            rows.append((seen, action, float(logits.log_softmax(-1)[action])))
            end, reward = (time + 1) % world.horizon == 0, float(pays)
            if end:
                reward += ppo.gamma * worth(model, world, int(after))
            rewards.append(reward)
            values.append(float(value))
            ends.append(end)
            state = world.start if end else int(after)
        ahead = worth(model, world, state)
        advantages, running = [0.0] * ppo.n_steps, 0.0
        for time in reversed(range(ppo.n_steps)):
            following = ahead if time == ppo.n_steps - 1 else values[time + 1]
            going_on = 0.0 if ends[time] else 1.0
            running = (
                rewards[time] + ppo.gamma * following * going_on - values[time]
                + ppo.gamma * ppo.gae_lambda * going_on * running
            )  # fmt: skip
            advantages[time] = running
        _epochs(ppo, model, optimizer, rows, advantages, values, key, start // ppo.n_steps)
    return history


@torch.no_grad()
def worth(model: Plain, world: World, state: int) -> float:
    return float(model(torch.tensor([state // world.size, state % world.size]).float())[1])


def _epochs(
    ppo: PPO, model: Plain, optimizer: torch.optim.Optimizer, rows: list[tuple[Tensor, int, float]],
    gains: list[float], values: list[float], key: Tensor, number: int,
) -> None:  # fmt: skip
    seen = torch.stack([row[0] for row in rows])
    actions, old = torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows])
    advantages = torch.tensor(gains)
    returns = advantages + torch.tensor(values)
    size = len(rows)
    for epoch in range(ppo.n_epochs):
        times = torch.arange(size) + (number * ppo.n_epochs + epoch) * size
        for part in bits(key, SHUFFLE, times).argsort().split(ppo.batch_size):
            logits, value = model(seen[part])
            ratio = (logits.log_softmax(-1).gather(1, actions[part, None]).squeeze(1) - old[part]).exp()
            gain = advantages[part]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy = -torch.min(gain * ratio, gain * ratio.clamp(1 - ppo.clip_range, 1 + ppo.clip_range)).mean()
            loss = policy + ppo.vf_coef * nn.functional.mse_loss(value, returns[part])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), ppo.max_grad_norm)
            optimizer.step()
