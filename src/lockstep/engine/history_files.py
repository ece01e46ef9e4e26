"""The documented HDF5 file of histories: written, and read into memory once all of it was checked.

It has a group per task; what another program wrote in the same form is learnt from too. In memory histories are one
uint8 table (3, tasks, streams, steps): cells, actions, rewards.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.errors import DataError, NotFoundError

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.engine.collect import Collection
    from lockstep.worlds.table import World

SETTINGS = "lockstep"  # the attribute of the HDF5 file that says how it was made
INSIDE, BEGINS, ENDS = range(3)  # compress_markers: where a region of the learner begins and ends


@dataclass(frozen=True)
class HistoryFile:
    """What a file of histories holds."""

    tasks: tuple[int, ...]  # in the order of the table
    table: Array  # uint8 (3, tasks, streams, steps)


def world_settings(world: World) -> dict[str, Any]:
    """What decides the rules of a world."""
    return {"name": world.name, "size": world.size, "horizon": world.horizon}


def export_hdf5(wanted: Collection, histories: Array, path: Path) -> None:
    """The documented file, from a table of histories."""
    import h5py

    time = np.arange(wanted.steps)
    region = wanted.learner.region
    marks = np.where(time % region == region - 1, ENDS, np.where(time % region == 0, BEGINS, INSIDE))
    ends = (time + 1) % wanted.world.horizon == 0
    with _Disk(path, "x+") as disk:
        with h5py.File(disk, "w") as file:
            file.attrs[SETTINGS] = json.dumps(wanted.settings(), sort_keys=True)
            for place, task in enumerate(wanted.tasks):
                group = file.create_group(str(task))
                for name, column in _columns(wanted.world, task, histories[:, place], marks=marks, ends=ends).items():
                    group.create_dataset(name, data=column, track_times=False)
                disk.check()
        disk.check()


def _columns(world: World, task: int, history: Array, *, marks: Array, ends: Array) -> dict[str, Array]:
    """What the file says of a task: (steps, streams, ...) each."""
    cells, actions, rewards = (column.T.astype(np.int32) for column in history)
    return {
        "states": _coordinates(cells, world.size),
        "actions": actions,
        "rewards": rewards,
        "next_states": _coordinates(_after(world, task, cells, actions), world.size),
        "dones": np.broadcast_to(ends[:, None], cells.shape),
        "compress_markers": np.broadcast_to(marks[:, None].astype(np.int32), cells.shape),
    }


class _Disk(io.FileIO):
    """A file for HDF5, which has no way out of a failed write: the first one is kept here, and no other is tried."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self.failure is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.failure = error
        return size

    def truncate(self, size: int | None = None, /) -> int:
        return super().truncate(size) if self.failure is None else self.tell()

    def check(self) -> None:
        """Raise what was kept."""
        if self.failure:
            raise self.failure


def _coordinates(cells: Array, size: int) -> Array:
    return np.stack((cells // size, cells % size), -1).astype(np.int32)


def _after(world: World, task: int, cells: Array, actions: Array) -> Array:
    """The cell each step leads to."""
    return world.moves_CA.numpy()[cells, world.meaning_KA.numpy()[task][actions]]


def _pays(world: World, task: int, after: Array) -> Array:
    """(steps, streams): whether each step pays, from the cells they lead to."""
    targets = world.targets_KP[task].tolist()
    if world.phases == 1:
        return after == targets[0]
    steps, streams = after.shape
    episodes = np.pad(after, ((0, -steps % world.horizon), (0, 0))).reshape(-1, world.horizon, streams)
    pays, begun = np.zeros_like(episodes, bool), np.ones_like(episodes, bool)
    for target in targets:  # phase by phase, once in each
        found = begun & (episodes == target)
        found &= found.cumsum(1) == 1
        pays |= found
        begun = found.cumsum(1) > found  # the next one, from the step after
    return pays.reshape(-1, streams)[:steps]


def settings_of(path: Path) -> dict[str, Any]:
    """How an HDF5 file was made; empty for one of another program."""
    import h5py

    try:
        with h5py.File(path) as file:
            told: Any = json.loads(str(file.attrs.get(SETTINGS, "{}")))
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=str(path), hint="lockstep collect ad") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise _damaged(path, f"not a readable HDF5 file: {error}") from error
    return told if isinstance(told, dict) else {}


def read_hdf5(path: Path, world: World) -> HistoryFile:
    """A file of the documented form, tasks in the order of their numbers; refused unless all of it is sound."""
    import h5py

    try:
        with h5py.File(path) as file:
            tasks = sorted(int(name) for name in map(str, file) if name.isdecimal() and str(int(name)) == name)
            if not tasks:
                raise _damaged(path, "no histories in it: groups 0, 1, ... are missing")
            if tasks[-1] >= world.tasks:
                rules = f"{world.name} of {world.size} x {world.size} cells has {world.tasks}"
                raise _damaged(path, f"task {tasks[-1]}, and {rules}", "data.env and data.grid_size as it was made")
            table: Array | None = None
            for place, task in enumerate(tasks):
                rows = _checked(_Group(file[str(task)], path, task), world)
                if table is None:
                    table = np.empty((len(rows), len(tasks), *rows.shape[1:]), np.uint8)
                if rows.shape[1:] != table.shape[2:]:
                    streams, steps = rows.shape[1:]
                    usual = f"{table.shape[2]} x {table.shape[3]}, as those before"
                    raise _damaged(path, f"task {task}: {streams} streams x {steps} steps, not {usual}")
                table[:, place] = rows
    except (OSError, RuntimeError, KeyError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    assert table is not None
    return HistoryFile(tuple(tasks), table)


@dataclass(frozen=True)
class _Group:
    """The datasets of one task, as they lie in a file."""

    group: Any
    path: Path
    task: int

    def column(self, name: str, *, limit: int, dimensions: int = 2) -> Array:
        """Whole numbers from 0 to below a limit, (steps, streams, ...)."""
        dataset = self.group.get(name) if hasattr(self.group, "keys") else None
        if dataset is None or not hasattr(dataset, "dtype"):  # a group has none
            raise _damaged(self.path, f"task {self.task} has no {name!r}")
        found: Array = np.asarray(dataset[()])
        if found.ndim != dimensions or not found.size or found.dtype.kind not in "biuf":
            raise _damaged(self.path, f"task {self.task}: {name} is {found.dtype} {found.shape}")
        low, high = found.min(), found.max()
        if not (low >= 0 and high < limit) or (found.dtype.kind == "f" and (found % 1).any()):
            what = f"whole numbers from 0 to {limit - 1}"
            raise _damaged(self.path, f"task {self.task}: {name} from {low} to {high}, which should be {what}")
        return found.astype(np.uint8)


def _checked(group: _Group, world: World) -> Array:
    """(3, streams, steps) of a task, if it happened in this world."""
    states = group.column("states", limit=world.size, dimensions=3)
    actions, rewards = group.column("actions", limit=world.actions), group.column("rewards", limit=2)
    if states.shape[2] != 2 or not states.shape[:2] == actions.shape == rewards.shape:
        shapes = f"states {states.shape}, actions {actions.shape}, rewards {rewards.shape}"
        raise _damaged(group.path, f"task {group.task}: {shapes} do not belong together")
    cells = states[..., 0] * np.uint8(world.size) + states[..., 1]
    after = _after(world, group.task, cells, actions)
    expected = np.concatenate((np.full_like(after[:1], world.start % world.cells), after[:-1]))
    expected[:: world.horizon] = world.start % world.cells
    wrong = (expected != cells) | (rewards != _pays(world, group.task, after))
    if wrong.any():
        step, stream = (int(place[0]) for place in np.nonzero(wrong))
        rules = f"{world.name}, {world.size} x {world.size} cells, {world.horizon} steps an episode"
        what = f"task {group.task}, stream {stream}, step {step} does not follow the rules of {rules}"
        raise _damaged(group.path, what, "data.env, data.grid_size and data.horizon as it was made")
    return np.stack((cells.T, actions.T, rewards.T))


def _damaged(path: Path, what: str, hint: str = "") -> DataError:
    return DataError(what, where=str(path), hint=hint or "another file, or lockstep collect ad ... --overwrite")


def differences(there: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Each setting in which two collections differ, in the words of the configuration."""
    old, new = dict(_flat(there)), dict(_flat(json.loads(json.dumps(asked))))
    return [f"{WORDS.get(name, name)} is {old.get(name)!r}, not {new.get(name)!r}"
            for name in new | old if old.get(name) != new.get(name)]  # fmt: skip


WORDS = {
    "world.name": "env", "world.size": "grid_size", "world.horizon": "horizon", "learner.name": "alg",
    "learner.batch_size": "source_batch_size", "learner.noise": "source_noise", "learner.region": "n_steps",
    "streams": "n_stream", "seed": "alg_seed",
}  # fmt: skip


def _flat(tree: dict[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
