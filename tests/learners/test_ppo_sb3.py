"""PPO against stable-baselines3 itself: one rollout and all its updates, number by number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.learners import draws
from lockstep.learners.network import LINE, Stack
from lockstep.learners.ppo import PPO
from lockstep.worlds import darkroom

pytestmark = pytest.mark.slow
NAMES = (  # ours, and the two of theirs
    ("w1", "mlp_extractor.{}_net.0.weight"), ("b1", "mlp_extractor.{}_net.0.bias"),
    ("w2", "mlp_extractor.{}_net.2.weight"), ("b2", "mlp_extractor.{}_net.2.bias"),
    ("w3", "{}_net.weight"), ("b3", "{}_net.bias"),
)  # fmt: skip


def towers(stack: Stack, theirs: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our weights beside theirs, in one shape."""
    pairs = []
    for ours, pattern in NAMES:
        for tower, (inner, head) in enumerate((("policy", "action"), ("value", "value"))):
            other = theirs[pattern.format(head if ours in ("w3", "b3") else inner)].detach()
            mine = getattr(stack.weights, ours)[tower]
            other = other.T if other.dim() == 2 else other[None]
            pairs.append((mine[:, : other.shape[1]], other))
    return pairs


@pytest.mark.filterwarnings("ignore")  # those of another package
@pytest.mark.parametrize("epochs", [1, 20])
def test_all_updates_of_a_rollout(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import stable_baselines3 as theirs

    from lockstep.worlds.gymnasium_env import GridEnv

    monkeypatch.setattr(np.random, "permutation", (recorded := Recorder()).permutation)
    env = theirs.common.vec_env.DummyVecEnv([lambda: GridEnv(darkroom.build(), 31)] * 3)
    model = theirs.PPO("MlpPolicy", env, n_steps=80, batch_size=40, n_epochs=epochs, seed=3, device="cpu")
    stack = Stack(draws.keys(torch.tensor([31]), torch.tensor([0]), seed=0), 2, hidden=64, actions=5)
    for mine, other in towers(stack, dict(model.policy.named_parameters())):
        mine.copy_(other)
    model.learn(240)
    buffer = model.rollout_buffer  # swapped and flattened: a stream after another
    columns = (buffer.observations, buffer.actions, buffer.log_probs, buffer.advantages, buffer.returns)
    rows = torch.zeros((1, 240, LINE))
    rows[0, :, :2] = torch.from_numpy(columns[0]).float()
    rows[0, :, -4:] = torch.from_numpy(np.concatenate([column.reshape(240, 1) for column in columns[1:]], 1))
    ours = PPO(n_epochs=epochs, streams_per_learner=3)
    check_advantages(ours, buffer)
    assert furthest(stack, model) > 1e-3, "theirs has learnt, ours not yet"
    for order in recorded.orders[:epochs]:
        mixed = rows[:, torch.from_numpy(order)]
        for first in range(0, 240, 40):
            ours.minibatch(stack, mixed[:, first : first + 40], 2)
    assert len(recorded.orders) == epochs
    assert furthest(stack, model) < (2e-6 if epochs == 1 else 2e-5)


def furthest(stack: Stack, model: Any) -> float:
    pairs = towers(stack, dict(model.policy.named_parameters()))
    return max(float((mine - other).abs().max()) for mine, other in pairs)


class Recorder:
    """numpy's permutations, kept."""

    def __init__(self) -> None:
        self.orders: list[np.ndarray] = []
        self.dice = np.random.RandomState(7)

    def permutation(self, count: int) -> np.ndarray:
        self.orders.append(self.dice.permutation(count))
        return self.orders[-1]


def check_advantages(ours: PPO, buffer: Any) -> None:
    """Ours from their rewards (raised where an episode was cut off) and values; 80 steps end with an episode."""
    rewards = list(torch.from_numpy(buffer.rewards))
    values = list(torch.from_numpy(buffer.values.reshape(3, 80).T.copy()))
    assert any(float(reward.max()) not in (0.0, 1.0) for reward in rewards[19::20]), "cut off, and raised"
    found = ours.advantages(rewards, values, torch.zeros(3), 20, 0)
    np.testing.assert_allclose(found.T.reshape(-1), buffer.advantages.reshape(-1), atol=2e-6)
