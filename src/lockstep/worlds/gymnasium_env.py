"""A task of a world as a gymnasium environment, for whoever brings an agent from there. Needs the extra `rl`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.errors import LockstepError
from lockstep.worlds.table import World

try:
    import gymnasium  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise LockstepError("the package gymnasium is missing", hint="pip install 'lockstep-train[rl]'") from error


class GridEnv(gymnasium.Env[Any, Any]):
    """One task, one player. At the horizon an episode is truncated, never terminated: its last state has a value."""

    def __init__(self, world: World, task: int) -> None:
        self.world, self.task = world.to("cpu"), torch.tensor(task)
        self.observation_space = gymnasium.spaces.Box(0, world.size - 1, (2,), np.int32)
        self.action_space = gymnasium.spaces.Discrete(world.actions)
        self.state, self.steps = torch.tensor(world.start), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.state, self.steps = torch.tensor(self.world.start), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps >= self.world.horizon:
            raise LockstepError("the episode is over", hint="reset() begins the next one")
        self.state, pays = self.world.step(self.task, self.state, torch.tensor(int(action)))
        self.steps += 1
        return self._seen(), float(pays), False, self.steps >= self.world.horizon, {}

    def _seen(self) -> Any:
        return self.world.coordinates(self.state).numpy().astype(np.int32)
