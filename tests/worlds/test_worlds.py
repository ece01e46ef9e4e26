"""The worlds: each step as a plain Python player would make it, the split as published, the best return exact."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Callable

import pytest
import torch

from lockstep import registry
from lockstep.errors import ConfigError, LockstepError
from lockstep.worlds import darkroom, darkroompermuted, key_door
from lockstep.worlds.split import split
from lockstep.worlds.table import World

BUILDERS: dict[str, Callable[..., World]] = {
    name: importlib.import_module(f"lockstep.worlds.{name}").build for name in registry.names("worlds")
}


class Player:
    """One player of one task, in coordinates and ifs: no table, no vector."""

    def __init__(self, world: str, task: int, size: int) -> None:
        self.size, self.key, self.found = size, None, False
        self.order = tuple(range(5))
        self.x = self.y = size // 2
        if world == "darkroom":
            self.goal = divmod(task, size)
        elif world == "darkroompermuted":
            self.x = self.y = 0
            self.goal = (size - 1, size - 1)
            self.order = list(itertools.permutations(range(5)))[task]
        else:
            key, door = divmod(task, size * size)
            self.key, self.goal = divmod(key, size), divmod(door, size)
        self.world = world

    def step(self, action: int) -> int:
        move = self.order[action]
        if move == 0 and self.x < self.size - 1:
            self.x += 1
        elif move == 1 and self.x > 0:
            self.x -= 1
        elif move == 2 and self.y < self.size - 1:
            self.y += 1
        elif move == 3 and self.y > 0:
            self.y -= 1
        here = (self.x, self.y)
        if self.key is not None:
            if here == self.key:
                self.key = None
                return 1
            return 0
        if self.world == "key_door":
            pays, self.found = here == self.goal and not self.found, self.found or here == self.goal
            return int(pays)
        return int(here == self.goal)


def test_there_are_three_worlds() -> None:
    assert {name: build().tasks for name, build in BUILDERS.items()} == {
        "darkroom": 81, "darkroompermuted": 120, "key_door": 6561,
    }  # fmt: skip


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("size", [3, 9])
def test_every_step_is_that_of_a_plain_player(name: str, size: int) -> None:
    world = BUILDERS[name](size=size)
    dice = random.Random(size)
    tasks = torch.tensor([dice.randrange(world.tasks) for _ in range(200)])
    players = [Player(name, int(task), size) for task in tasks]
    states = torch.full_like(tasks, world.start)
    assert world.coordinates(states).tolist() == [[player.x, player.y] for player in players]
    states = torch.tensor([dice.randrange(world.cells) for _ in players])  # anywhere: few would walk to a far corner
    for player, cell in zip(players, states.tolist(), strict=True):
        player.x, player.y = divmod(cell, size)
    paid = 0
    for _ in range(world.horizon):
        seen = world.coordinates(states).tolist()
        assert seen == [[player.x, player.y] for player in players]
        actions = [dice.randrange(5) for _ in players]
        states, pays = world.step(tasks, states, torch.tensor(actions))
        assert pays.int().tolist() == [player.step(action) for player, action in zip(players, actions, strict=True)]
        paid += int(pays.sum())
    assert paid > 0, "the comparison saw rewards"


def test_the_whole_table_of_darkroom() -> None:
    world = darkroom.build()
    for goal, cell, action in itertools.product(range(81), range(81), range(5)):
        if (goal + cell) % 7:  # a seventh of 32,805
            continue
        player = Player("darkroom", goal, 9)
        player.x, player.y = divmod(cell, 9)
        pays = player.step(action)
        after, found = world.step(torch.tensor(goal), torch.tensor(cell), torch.tensor(action))
        assert (int(after), int(found)) == (player.x * 9 + player.y, pays)


def test_a_wrong_table_is_seen() -> None:
    """The control: two actions exchanged, or a goal that pays when it is left, are found by the comparison above."""
    world = darkroom.build()
    left = world.step(torch.tensor(40), torch.tensor(40), torch.tensor(0))
    assert (int(left[0]), bool(left[1])) == (49, False)
    permuted = darkroompermuted.build()
    exchanged = permuted.meaning_KA[1].tolist()
    assert exchanged == [0, 1, 2, 4, 3]
    assert int(permuted.step(torch.tensor(1), torch.tensor(4), torch.tensor(3))[0]) == 4, "stays, where 3 would move"


def test_darkroom_has_the_documented_optimum() -> None:
    world = darkroom.build()
    best = world.optimum(torch.arange(81))
    far = [abs(cell // 9 - 4) + abs(cell % 9 - 4) for cell in range(81)]
    assert best.tolist() == [min(20, 21 - distance) for distance in far]
    assert best.float().mean() == pytest.approx(16.54, abs=0.01)
    assert (best == 20).sum() == 5


def test_the_others_have_theirs() -> None:
    assert set(darkroompermuted.build().optimum(torch.arange(120)).tolist()) == {5}
    world = key_door.build(size=5)
    assert set(world.optimum(torch.arange(625)).tolist()) == {2}
    short = key_door.build(size=5, horizon=4)
    door_in_a_corner = torch.tensor([12 * 25 + 0, 12 * 25 + 12, 0])  # key at the start; both there; both in the corner
    assert short.optimum(door_in_a_corner).tolist() == [1, 2, 1]


def test_the_split_is_the_published_one() -> None:
    before = random.getstate()
    train, test = split(81, seed=0, ratio=0.9)
    assert random.getstate() == before, "nobody else's generator"
    assert (len(train), len(test)) == (73, 8)
    assert sorted(train + test) == list(range(81))
    assert test == (38, 51, 62, 65, 33, 5, 53, 49)
    assert darkroom.build().optimum(torch.tensor(test)).tolist() == [19, 18, 15, 16, 18, 16, 16, 20]  # mean 17.25
    assert split(81, seed=1).test != test
    assert split(120).test == split(120).test
    assert len(split(120).test) == 12


@pytest.mark.parametrize("ratio", [0.0, 1.0, 0.999])
def test_a_split_has_two_parts(ratio: float) -> None:
    with pytest.raises(ConfigError, match="to train on"):
        split(81, ratio=ratio)


@pytest.mark.parametrize("wrong", [{"size": 1}, {"size": 17}, {"horizon": 0}])
def test_what_is_no_world_is_refused(wrong: dict[str, int]) -> None:
    for build in BUILDERS.values():
        with pytest.raises(ConfigError):
            build(**wrong)


def test_gymnasium_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "lockstep.worlds.gymnasium_env", raising=False)
    with pytest.raises(LockstepError, match="gymnasium is missing") as error:
        importlib.import_module("lockstep.worlds.gymnasium_env")
    assert "lockstep-train[rl]" in str(error.value)


@pytest.mark.parametrize("name", BUILDERS)
def test_every_world_is_a_gymnasium_environment(name: str) -> None:
    """By gymnasium's own checker; what it says of a walk is what the tables say."""
    from gymnasium.utils.env_checker import check_env

    from lockstep.worlds.gymnasium_env import GridEnv

    world, dice = BUILDERS[name](size=3), random.Random(1)
    task = world.tasks // 2
    env = GridEnv(world, task)
    check_env(env, skip_render_check=True)
    for _ in range(2):
        seen, _ = env.reset()
        state = torch.tensor(world.start)
        for _ in range(world.horizon):
            assert seen.tolist() == world.coordinates(state).tolist()
            action = dice.randrange(world.actions)
            state, pays = world.step(torch.tensor(task), state, torch.tensor(action))
            seen, reward, *_ = env.step(action)
            assert reward == float(pays)


def test_a_task_as_a_gymnasium_environment() -> None:
    import gymnasium

    from lockstep.worlds.gymnasium_env import GridEnv

    env = GridEnv(darkroom.build(), 49)
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    env.reset()
    rows = [env.step(0 if time == 0 else 4) for time in range(20)]
    assert [row[1] for row in rows] == [1.0] * 20
    assert rows[0][0].tolist() == [5, 4]
    assert [row[2] for row in rows] == [False] * 20, "cut off, never over"
    assert [row[3] for row in rows] == [False] * 19 + [True]
    with pytest.raises(LockstepError, match="over"):
        env.step(0)
