"""Histories of source learners on disk: made chunk by chunk, resumed where interrupted, the same bytes each time.

For a world, a learner and a seed there are, once all is done,

    history_<world>_<learner>_alg-seed<seed>.npy    uint8 (3, tasks, streams, steps): cells, actions, rewards
    history_<world>_<learner>_alg-seed<seed>.hdf5   the documented file: a group per task, int32; written last
    history_<world>_<learner>_alg-seed<seed>.png    the learning curves

and until then a folder `.parts` with the finished chunks. `next_states` are where the steps led, also at the end of an
episode, whose next row begins at the start again.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from lockstep import rundir
from lockstep.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.learners import draws, picture
from lockstep.learners.history import Learner
from lockstep.learners.network import one_thread
from lockstep.worlds.table import World

log = logging.getLogger(__name__)

COLUMNS = ("cells", "actions", "rewards")
SETTINGS = "lockstep"  # the attribute of the HDF5 file that says how it was made
INSIDE, BEGINS, ENDS = range(3)  # compress_markers: where a region of the learner begins and ends


@dataclass(frozen=True)
class Collection:
    """What is to be collected, and where it lies."""

    world: World
    learner: Learner
    tasks: tuple[int, ...]
    streams: int
    steps: int
    seed: int
    folder: Path

    @property
    def stem(self) -> str:
        return f"history_{self.world.name}_{self.learner.label}_alg-seed{self.seed}"

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.stem}.{suffix}"

    def only(self, tasks: Iterable[int]) -> Collection:
        """The same for some of the tasks."""
        chosen = tuple(sorted(set(tasks)))
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < self.world.tasks:
            raise ConfigError(f"tasks of {self.world.name} are numbers from 0 to {self.world.tasks - 1}", where="tasks")
        return replace(self, tasks=chosen)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the bytes."""
        world = {"name": self.world.name, "size": self.world.size, "horizon": self.world.horizon}
        learner = {"name": self.learner.label, **asdict(self.learner)}
        tasks = "all" if self.tasks == tuple(range(self.world.tasks)) else list(self.tasks)
        numbers = {"streams": self.streams, "steps": self.steps, "seed": self.seed}
        return {"format": 1, "world": world, "learner": learner, "tasks": tasks, **numbers}


def plan(
    world: World,
    learner: Learner,
    *,
    total_timesteps: int = 100_000,
    streams: int = 100,
    seed: int = 42,
    folder: Path = Path("datasets"),
) -> Collection:
    """`total_timesteps` are those of all streams of a task together, rounded up to whole rollouts of the learner."""
    if streams < 1 or streams % learner.streams_per_learner:
        raise ConfigError(
            f"{streams} streams cannot be shared out to learners of {learner.streams_per_learner}",
            where="n_stream",
            hint=f"n_stream={max(1, streams // learner.streams_per_learner) * learner.streams_per_learner}",
        )
    if total_timesteps < 1:
        raise ConfigError("a history has at least one step", where="total_source_timesteps", hint="100000")
    steps = learner.steps(-(-total_timesteps // streams))
    return Collection(world, learner, tuple(range(world.tasks)), streams, steps, seed, folder)


def collect(
    wanted: Collection, *, device: torch.device | str = "cpu", workers: int = 0, overwrite: bool = False
) -> Path:  # fmt: skip
    """Make what is not there yet; the path of the HDF5 file. `workers`: threads on a CPU, 0 for one per core."""
    wanted.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(wanted.folder / f".{wanted.stem}.lock")
    try:
        with lock.acquire(timeout=0):
            return _collect(wanted, torch.device(device), workers or torch.get_num_threads(), overwrite=overwrite)
    except Timeout:
        raise LockstepError(
            "another process is collecting these histories", where=str(wanted.file("hdf5")), hint="wait for it"
        ) from None


def _collect(wanted: Collection, device: torch.device, workers: int, *, overwrite: bool) -> Path:
    final, table = wanted.file("hdf5"), wanted.file("npy")
    if final.exists() and not overwrite:
        _refuse_others(_settings_of(final), wanted, final, "overwrite it, or choose another folder or seed")
        if not table.exists():
            import_hdf5(final, table)
        log.info("%s is there already", final)
        return final
    parts = _parts(wanted, device)
    _make(wanted, parts, device, workers)
    with rundir.replacing(table) as temporary:
        _join(wanted, parts, temporary)
    histories = np.load(table, mmap_mode="r")
    _draw(wanted, histories)
    with rundir.replacing(final) as temporary:
        export_hdf5(wanted, histories, temporary)
    shutil.rmtree(parts[0].parent)
    log.info("%s: %d tasks x %d streams x %d steps", final, len(wanted.tasks), wanted.streams, wanted.steps)
    return final


def _parts(wanted: Collection, device: torch.device) -> list[Path]:
    """The files of the chunks, in order; some may be there. What they were made with lies beside them."""
    folder = wanted.file("parts")
    learners = len(wanted.tasks) * wanted.streams // wanted.learner.streams_per_learner
    chunk = wanted.learner.chunk(device)
    settings = {**wanted.settings(), "chunk": chunk, "device": device.type}
    told = folder / "settings.json"
    if told.exists():
        _refuse_others(json.loads(told.read_text(encoding="utf-8")), settings, folder, f"rm -r {folder}")
    else:
        folder.mkdir(exist_ok=True)
        rundir.write_json(told, settings)
    return [folder / f"{number:05d}.npy" for number in range(-(-learners // chunk))]


def _make(wanted: Collection, parts: list[Path], device: torch.device, workers: int) -> None:
    missing = [number for number, path in enumerate(parts) if not path.exists()]
    if 0 < len(missing) < len(parts):
        log.info("%s: %d of %d chunks are there", wanted.stem, len(parts) - len(missing), len(parts))
    world = wanted.world.to(device)
    if device.type != "cpu":
        workers = 1
    with one_thread(), ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(_chunk, wanted, world, number, parts[number]) for number in missing]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                log.debug("%s: %d of %d chunks", wanted.stem, len(parts) - len(missing) + done, len(parts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # those that run are finished, and kept
            raise


def _chunk(wanted: Collection, world: World, number: int, path: Path) -> None:
    """Run the learners of one chunk and keep their histories."""
    device = world.moves_CA.device
    learner, shared = wanted.learner, wanted.learner.streams_per_learner
    most = learner.chunk(device) * shared
    rows = torch.arange(number * most, min((number + 1) * most, len(wanted.tasks) * wanted.streams), device=device)
    real = len(rows)
    if device.type != "cpu":  # a product on a GPU may round by how many there are: always the same number
        rows = torch.cat((rows, rows[:shared].repeat((most - real) // shared)))
    tasks = torch.tensor(wanted.tasks, device=device)[rows // wanted.streams]
    keys = draws.keys(tasks, rows % wanted.streams, seed=wanted.seed)
    history = learner.run(world, tasks, keys, steps=wanted.steps)
    part = torch.stack([column[:real] for column in history]).cpu().numpy()
    with rundir.replacing(path) as temporary, temporary.open("xb") as file:
        np.save(file, part)


def _join(wanted: Collection, parts: list[Path], path: Path) -> None:
    """All chunks as one table."""
    shape = (len(COLUMNS), len(wanted.tasks), wanted.streams, wanted.steps)
    table = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    flat, start = table.reshape(len(COLUMNS), -1, wanted.steps), 0
    for part in parts:
        rows = np.load(part, mmap_mode="r")
        flat[:, start : start + rows.shape[1]] = rows
        start += rows.shape[1]
    if start != flat.shape[1]:
        raise DataError(f"{start} of {flat.shape[1]} streams", where=str(parts[0].parent), hint="delete it")
    table.flush()


def export_hdf5(wanted: Collection, histories: np.ndarray[Any, Any], path: Path) -> None:
    """The documented file, from a table of histories."""
    import h5py

    time = np.arange(wanted.steps)
    region = wanted.learner.region
    marks = np.where(time % region == region - 1, ENDS, INSIDE)
    marks[time % region == 0] = BEGINS
    ends = (time + 1) % wanted.world.horizon == 0
    with h5py.File(path, "w") as file:
        file.attrs[SETTINGS] = json.dumps(wanted.settings(), sort_keys=True)
        for place, task in enumerate(wanted.tasks):
            cells, actions, rewards = (column.T.astype(np.int32) for column in histories[:, place])
            after = wanted.world.moves_CA.numpy()[cells, wanted.world.meaning_KA.numpy()[task][actions]]
            columns = {
                "states": _coordinates(cells, wanted.world.size),
                "actions": actions,
                "rewards": rewards,
                "next_states": _coordinates(after, wanted.world.size),
                "dones": np.broadcast_to(ends[:, None], cells.shape),
                "compress_markers": np.broadcast_to(marks[:, None].astype(np.int32), cells.shape),
            }
            group = file.create_group(str(task))
            for name, column in columns.items():
                group.create_dataset(name, data=column, track_times=False)


def _coordinates(cells: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return np.stack((cells // size, cells % size), -1).astype(np.int32)


def import_hdf5(path: Path, table: Path, *, size: int = 9) -> None:
    """The table of histories of any file of the documented form; tasks in the order of their numbers."""
    import h5py

    told = _settings_of(path)
    size = told["world"]["size"] if told else size
    with h5py.File(path) as file, rundir.replacing(table) as temporary:
        tasks = sorted(int(name) for name in map(str, file) if name.isdigit())
        groups: list[Any] = [file[str(task)] for task in tasks]
        if not groups:
            raise DataError("no histories in it: groups 0, 1, ... are missing", where=str(path), hint="collect again")
        steps, streams = groups[0]["actions"].shape
        shape = (len(COLUMNS), len(groups), streams, steps)
        out = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
        for place, group in enumerate(groups):
            states = group["states"][()]
            out[0, place] = (states[..., 0] * size + states[..., 1]).T
            out[1, place], out[2, place] = group["actions"][()].T, group["rewards"][()].T
        out.flush()


def _settings_of(path: Path) -> dict[str, Any]:
    """How an HDF5 file was made; empty for one of another program."""
    import h5py

    try:
        with h5py.File(path) as file:
            told: Any = file.attrs.get(SETTINGS, "{}")
            return json.loads(told)
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=str(path), hint="lockstep collect ad") from None
    except OSError as error:
        raise DataError(f"not a readable HDF5 file: {error}", where=str(path), hint="collect it again") from error


def _refuse_others(there: dict[str, Any], wanted: Collection | dict[str, Any], where: Path, hint: str) -> None:
    """What lies there was made with other settings: say which, before any work is done."""
    asked = wanted.settings() if isinstance(wanted, Collection) else wanted
    asked = json.loads(json.dumps(asked))
    if there != asked:
        other = [
            f"{name} is {there.get(name)!r}, not {asked[name]!r}" for name in asked if there.get(name) != asked[name]
        ]
        raise ConfigError(f"made with other settings: {'; '.join(other)[:300]}", where=str(where), hint=hint)


def returns(wanted: Collection, histories: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """For each task (streams, episodes): what each whole episode paid."""
    horizon = wanted.world.horizon
    whole = wanted.steps // horizon
    for rewards in histories[COLUMNS.index("rewards")]:
        yield rewards[:, : whole * horizon].reshape(-1, whole, horizon).sum(-1, dtype=np.int64)


def _draw(wanted: Collection, histories: np.ndarray[Any, Any]) -> None:
    """The learning curves, where there is an episode to show and a package to draw it."""
    curves = [(task.mean(0), task[0]) for task in returns(wanted, histories)]
    best = wanted.world.optimum(torch.tensor(wanted.tasks)).double().mean().item()
    if len(curves[0][0]) and (drawn := picture.curves(
        np.stack([mean for mean, _ in curves]), single=curves[0][1], optimum=best, title=wanted.stem
    )):  # fmt: skip
        rundir.write_bytes(wanted.file("png"), drawn)
