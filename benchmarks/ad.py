"""What collecting histories costs: environment steps per CPU second of our learners and of stable-baselines3's PPO.

Both PPOs with the seed's settings (80 steps, minibatches of 40, 20 epochs, two towers of 64 x 64) in darkroom, on one
thread, interleaved; stable-baselines3 with one stream per learner, and with 10 that share one, whichever is faster.
Then our PPO with settings of our own, whose mean learning curve must stay within half the standard deviation of the
faithful streams around theirs.
Last, supervised actions per CPU second of a training step: the objective `distill`, which learns from every step of a
window, beside one target for a full window of 240, as in the seed (a torch encoder, post-norm, last position). Same
width, layers, rows and optimizer, same loop around both.
Usage: python benchmarks/ad.py [--rounds 3] [--curve-steps 8000] [--anyway]
The exit code is 1 when a limit is missed. Needs the extra `rl`; without it ours is measured alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import sys
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import busy
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.contracts import Draw, Rows
from lockstep.learners import draws
from lockstep.learners.history import Learner
from lockstep.learners.posterior import Posterior
from lockstep.learners.ppo import PPO
from lockstep.models.agent import Agent
from lockstep.models.agent_shapes import AgentShape
from lockstep.models.initialise import initialise
from lockstep.objectives.distill import Distill
from lockstep.worlds import darkroom
from lockstep.worlds.observed import Histories
from lockstep.worlds.table import World

FAITHFUL = PPO()
OWN = PPO(hidden=32, batch_size=80, n_epochs=6, source_lr=4e-3)
FASTER, OWN_FASTER, PSRL_STEPS, MORE_ACTIONS = 15, 100, 1_000_000, 100  # the limits
DROPOUT = 0.1  # in both, as in the product
WINDOW, WIDTH, INNER, LAYERS, HEADS, ROWS = (
    240,
    64,
    256,
    4,
    4,
    32,
)  # of both training steps; INNER is what the seed runs
APART = 0.5  # standard deviations between streams, of the mean curves
EVERY, ONE = "training, every action", "training, one action per window"
GOALS = (40, 31, 49, 22, 58, 60, 30, 13)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def speed(work: Callable[[], int]) -> float:
    """Steps per CPU second."""
    before = cpu_seconds()
    steps = work()
    return steps / (cpu_seconds() - before)


def ours(learner: Learner, world: World, *, streams: int, steps: int) -> int:
    tasks = torch.arange(streams) % world.tasks
    learner.run(world, tasks, draws.keys(tasks, torch.arange(streams), seed=42), steps=steps)
    return streams * steps


def theirs(streams: int) -> Callable[[], int]:
    """A learner of stable-baselines3, warmed up; each call is three rollouts and their updates."""
    import gymnasium
    from stable_baselines3 import PPO as Their
    from stable_baselines3.common.vec_env import DummyVecEnv

    moves = np.array(((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)))

    class Room(gymnasium.Env):
        """Darkroom as one would write it for gymnasium: no tensor in it that would cost time."""

        observation_space = gymnasium.spaces.Box(0, 8, (2,), np.int32)
        action_space = gymnasium.spaces.Discrete(5)

        def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple:
            super().reset(seed=seed, options=options)
            self.place, self.steps = np.array((4, 4), np.int32), 0
            return self.place, {}

        def step(self, action: int) -> tuple:
            self.place = np.minimum(np.maximum(self.place + moves[action], 0), 8).astype(np.int32)
            self.steps += 1
            return self.place, float(self.place[0] == 3 and self.place[1] == 4), False, self.steps >= 20, {}

    settings = {"n_steps": 80, "batch_size": 40, "n_epochs": 20, "learning_rate": 3e-4}
    model = Their("MlpPolicy", DummyVecEnv([Room] * streams), device="cpu", seed=1, **settings)
    model.learn(80 * streams)

    def work() -> int:
        steps = 3 * 80 * streams
        model.learn(steps)
        return steps

    return work


def curves(learner: PPO, world: World, *, streams: int, steps: int) -> torch.Tensor:
    """(streams, 10): the mean return of each tenth of each history."""
    tasks = torch.tensor(GOALS).repeat_interleave(streams)
    keys = draws.keys(tasks, torch.arange(len(tasks)) % streams, seed=7)
    returns = learner.run(world, tasks, keys, steps=learner.steps(steps)).returns(world.horizon).float()
    return torch.stack([tenth.mean(1) for tenth in returns.tensor_split(10, 1)], 1)


def alike(faithful: torch.Tensor, own: torch.Tensor) -> float:
    """How far the mean curves are apart at most, in standard deviations of the faithful streams."""
    return float(((faithful.mean(0) - own.mean(0)).abs() / faithful.std(0)).max())


class LastOnly(nn.Module):
    """The seed's model: a token of the context is a whole transition, the state that is asked about comes last."""

    def __init__(self, cells: int, actions: int) -> None:
        super().__init__()
        self.context, self.query = nn.Linear(2 + actions + 1 + 2, WIDTH), nn.Embedding(cells, WIDTH)
        self.places = nn.Parameter(torch.zeros(WINDOW, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=DROPOUT, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, actions)

    def forward(self, context_BLF: Tensor, query_B: Tensor) -> Tensor:
        tokens_BLD = torch.cat((self.context(context_BLF), self.query(query_B)[:, None]), 1) + self.places
        return self.head(self.layers(tokens_BLD)[:, -1])


def optimized(model: nn.Module, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """What follows a loss, the same for both."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learning_materials(world: World) -> Histories:
    tasks = torch.arange(world.tasks).repeat_interleave(4)
    keys = draws.keys(tasks, torch.arange(len(tasks)) % 4, seed=42)
    steps = torch.stack(tuple(Posterior().run(world, tasks, keys, steps=2 * WINDOW))).numpy()
    return Histories(np.ascontiguousarray(steps), world.size, world.horizon, world.actions, 80)


def every_action(histories: Histories) -> Callable[[], int]:
    """Training steps of ours, from the numbers of the rows to the new weights; how many actions were learnt from."""
    shape = AgentShape(histories.actions, WIDTH, INNER, LAYERS, HEADS, attention_dropout=DROPOUT)
    model = Agent(shape, attention="native_flash", dropout=DROPOUT)
    initialise(model, seed=1, std=0.06)
    objective = Distill().with_histories(histories, length=WINDOW, terms={})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    places = np.arange(histories.steps.shape[1])

    def work() -> int:
        learnt = 0
        for step in range(3):
            ids = (places[:ROWS] + ROWS * step) % len(places)
            rows = Rows(ids, np.full(ROWS, step), np.arange(ROWS), {"histories": ids[:, None]})
            batch = objective.collate(rows, Draw(1, step, ROWS))
            total = objective.loss(model, batch)["loss_action"]
            optimized(model, total / batch.weights["loss_action"], optimizer)
            learnt += batch.weights["loss_action"]
        return learnt

    return work


def one_action(histories: Histories) -> Callable[[], int]:
    """The same of a model that is asked for the last action of a full window only."""
    size, actions = histories.size, histories.actions
    model = LastOnly(size * size, actions)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    steps, draw = torch.from_numpy(histories.steps).long(), torch.Generator().manual_seed(1)

    def work() -> int:
        for _ in range(3):
            which = torch.randint(steps.shape[1], (ROWS, 1), generator=draw)
            start = torch.randint(steps.shape[2] - WINDOW + 1, (ROWS, 1), generator=draw)
            cells, taken, rewards = steps[:, which, start + torch.arange(WINDOW)]
            places = torch.stack((cells // size, cells % size), -1).float()
            told = (places[:, :-1], F.one_hot(taken[:, :-1], actions).float(), rewards[:, :-1, None].float())
            logits = model(torch.cat((*told, places[:, 1:]), -1), cells[:, -1])
            optimized(model, F.cross_entropy(logits, taken[:, -1]), optimizer)
        return 3 * ROWS

    return work


def verdict(name: str, value: float, limit: float) -> bool:
    print(f"{'ok' if value >= limit else 'TOO SLOW'}: {name} {value:,.1f}, at least {limit:,}")
    return value >= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curve-steps", type=int, default=8000, help="0 leaves the learning curves out")
    busy.add_anyway(parser)
    options = parser.parse_args()
    busy.ensure_quiet(parser, options)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = darkroom.build()
    contenders: dict[str, Callable[[], int]] = {
        "PPO": lambda: ours(FAITHFUL, world, streams=64, steps=240),
        "PPO, settings of our own": lambda: ours(OWN, world, streams=64, steps=480),
        "posterior sampling": lambda: ours(Posterior(), world, streams=4096, steps=200),
    }
    if importlib.util.find_spec("stable_baselines3"):
        contenders |= {f"stable-baselines3, {streams} a learner": theirs(streams) for streams in (1, 10)}
    else:
        print("stable-baselines3 is left out: pip install 'lockstep-train[rl]'")
    histories = learning_materials(world)
    learners = {EVERY: every_action(histories), ONE: one_action(histories)}
    contenders |= learners
    for work in contenders.values():  # first calls are nobody's step
        work()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, work in contenders.items():
            found[name].append(speed(work))
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    speeds = {name: statistics.median(values) for name, values in found.items()}
    for name, value in speeds.items():
        print(f"{name:36} {value:12,.0f} {'actions' if name in learners else 'steps'} per CPU second")
    good = [verdict("posterior sampling, steps per CPU second", speeds["posterior sampling"], PSRL_STEPS)]
    good.append(verdict("actions over one per window, times", speeds[EVERY] / speeds[ONE], MORE_ACTIONS))
    if other := max((value for name, value in speeds.items() if name.startswith("stable")), default=0.0):
        good.append(verdict("PPO over stable-baselines3, times", speeds["PPO"] / other, FASTER))
        own = speeds["PPO, settings of our own"] / other
        good.append(verdict("PPO with settings of our own, times", own, OWN_FASTER))
    if options.curve_steps:
        faithful, own_curve = (curves(each, world, streams=8, steps=options.curve_steps) for each in (FAITHFUL, OWN))
        for name, curve in (("faithful", faithful), ("own", own_curve)):
            print(f"{name:10}" + " ".join(f"{value:5.1f}" for value in curve.mean(0).tolist()))
        apart = alike(faithful, own_curve)
        good.append(apart <= APART)
        print(f"{'ok' if good[-1] else 'NOT ALIKE'}: curves {apart:.2f} standard deviations apart, at most {APART}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
