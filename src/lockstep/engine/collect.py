"""Histories of source learners on disk: made chunk by chunk, resumed where interrupted, the same bytes each time.

For a world, a learner and a seed there is, once all is done,

    history_<world>_<learner>_alg-seed<seed>.hdf5   the documented file: a group per task, int32

and until then a folder `.parts` with the finished chunks. `next_states` are where the steps led, also at the end of an
episode, whose next row begins at the start again. Of several processes one collects, the others wait for it.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lockstep import rundir
from lockstep.data.builders import building, read_json
from lockstep.data.histories import stem
from lockstep.engine.headway import Headway
from lockstep.engine.history_files import differences, export_hdf5, settings_of, world_settings
from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError, Stopped
from lockstep.learners import draws
from lockstep.learners.history import Learner
from lockstep.learners.network import one_thread
from lockstep.runtime.signals import UNSTOPPABLE
from lockstep.worlds.table import World

log = logging.getLogger(__name__)

STEP_BYTES = 3 + 29  # on disk: in a chunk, in the HDF5 file


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
        return stem(self.world.name, self.learner.label, self.seed)

    def file(self, suffix: str) -> Path:
        return self.folder / f"{self.stem}.{suffix}"

    @property
    def learners(self) -> int:
        return len(self.tasks) * self.streams // self.learner.streams_per_learner

    def side_by_side(self, device: torch.device) -> int:
        """How many learners are a chunk: all of a small collection, which is not filled up to a large one's."""
        return min(self.learners, self.learner.chunk(device))

    def only(self, tasks: Iterable[int]) -> Collection:
        """The same for some of the tasks."""
        chosen = tuple(sorted(set(tasks)))
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < self.world.tasks:
            raise ConfigError(f"tasks of {self.world.name} are numbers from 0 to {self.world.tasks - 1}", where="tasks")
        return replace(self, tasks=chosen)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the bytes."""
        learner = {"name": self.learner.label, **asdict(self.learner)}
        tasks = "all" if self.tasks == tuple(range(self.world.tasks)) else list(self.tasks)
        numbers = {"streams": self.streams, "steps": self.steps, "seed": self.seed}
        return {"format": 1, "world": world_settings(self.world), "learner": learner, "tasks": tasks, **numbers}


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


@dataclass(frozen=True)
class How:
    """How a collection is made: none of it decides the bytes, save the device for learners that compute with floats."""

    device: torch.device
    workers: int
    overwrite: bool
    again: Callable[[], str]
    progress: Literal["auto", "on", "off"]

    @property
    def threads(self) -> int:
        return (self.workers or torch.get_num_threads()) if self.device.type == "cpu" else 1


def collect(
    wanted: Collection,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    overwrite: bool = False,
    again: Callable[[], str] = lambda: "overwrite it, or choose another folder or seed",
    progress: Literal["auto", "on", "off"] = "auto",
) -> Path:
    """Make what is not there yet; the path of the HDF5 file.

    workers: threads on a CPU, 0 for one per core. again: what to do about histories of other settings.
    """
    how, final = How(torch.device(device), workers, overwrite, again, progress), wanted.file("hdf5")
    if overwrite or not final.exists():
        _make_alone(wanted, how)
    if not overwrite:
        _refuse_others(settings_of(final), wanted, final, again)
    return final


def _make_alone(wanted: Collection, how: How) -> None:
    """Of several processes one collects; the others wait, and then find it done."""
    final = wanted.file("hdf5")
    rundir.probe(wanted.folder, key="data.data_path")
    try:
        with building(wanted.folder, f".{wanted.stem}", what=final):
            for leftover in wanted.folder.glob(f"{wanted.stem}.*.tmp-*"):  # of one that was killed: we hold its lock
                leftover.unlink(missing_ok=True)
            if how.overwrite or not final.exists():
                _collect(wanted, how)
    except OSError as error:
        raise rundir.io_error(error, wanted.folder, doing="collecting histories") from error


def _collect(wanted: Collection, how: How) -> None:
    import h5py  # noqa: F401 - who has no such package hears it before the work, not after

    final = wanted.file("hdf5")
    _check_room(wanted)
    parts = _parts(wanted, how)
    total = len(wanted.tasks) * wanted.streams * wanted.steps
    with Headway(progress=how.progress, unit="steps") as headway:
        headway.begin("Collecting", total=total)
        _make(wanted, parts, how, headway)
    with rundir.replacing(final) as temporary:
        export_hdf5(wanted, _joined(wanted, parts), temporary)
    shutil.rmtree(parts[0].parent)


def _check_room(wanted: Collection) -> None:
    """Refuse before the work what the disk cannot hold."""
    steps = len(wanted.tasks) * wanted.streams * wanted.steps
    there = sum(path.stat().st_size for path in wanted.file("parts").glob("*.npy"))
    needed, free = steps * STEP_BYTES - there, shutil.disk_usage(wanted.folder).free
    if needed > free:
        raise LockstepError(
            f"{steps:,} steps need {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free",
            where=str(wanted.folder),
            hint="a smaller data.total_source_timesteps, or a data.data_path on another disk",
            exit_code=ExitCode.IO,
        )


def _parts(wanted: Collection, how: How) -> list[Path]:
    """The files of the chunks, in order; some may be there. What they were made with lies beside them."""
    folder, device = wanted.file("parts"), how.device
    chunk = wanted.side_by_side(device)
    settings = {**wanted.settings(), "chunk": chunk, "device": device.type}
    told = folder / "settings.json"
    if told.exists() and how.overwrite and differences(read_json(told), settings):
        shutil.rmtree(folder)
    if told.exists():
        _refuse_others(read_json(told) or {"format": "unreadable"}, settings, folder, lambda: f"rm -r {folder}")
    else:
        folder.mkdir(exist_ok=True)
        rundir.write_json(told, settings)
    return [folder / f"{number:05d}.npy" for number in range(-(-wanted.learners // chunk))]


def _make(wanted: Collection, parts: list[Path], how: How, headway: Headway) -> None:
    """Run the chunks that are missing. Who is asked to stop keeps the finished ones and waits for no other."""
    missing = [number for number, path in enumerate(parts) if not path.exists()]
    if 0 < len(missing) < len(parts):
        log.info("%s: %d of %d chunks are there", wanted.stem, len(parts) - len(missing), len(parts))
    world = wanted.world.to(how.device)
    each = wanted.side_by_side(how.device) * wanted.learner.streams_per_learner * wanted.steps
    headway.done = each * (len(parts) - len(missing))
    with one_thread():
        pool = ThreadPoolExecutor(how.threads, initializer=_begin_thread)
        futures = [pool.submit(_chunk, wanted, world, number, parts[number]) for number in missing]
        try:
            for future in as_completed(futures):
                future.result()
                headway.done += each
                headway.tokens += each
        except BaseException as error:
            stopped = isinstance(error, Stopped | KeyboardInterrupt)
            pool.shutdown(wait=not stopped, cancel_futures=True)
            if isinstance(error, Stopped):
                kept = sum(path.exists() for path in parts)
                error.hint = f"the same command goes on: {kept} of {len(parts)} chunks are kept in {parts[0].parent}"
            raise
        pool.shutdown()


def _begin_thread() -> None:
    threading.current_thread().name = UNSTOPPABLE  # who leaves does not wait for a chunk
    torch.set_num_threads(1)


def _chunk(wanted: Collection, world: World, number: int, path: Path) -> None:
    """Run the learners of one chunk and keep their histories."""
    device = world.moves_CA.device
    learner, shared = wanted.learner, wanted.learner.streams_per_learner
    most = wanted.side_by_side(device) * shared
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


def _joined(wanted: Collection, parts: list[Path]) -> np.ndarray[Any, Any]:
    """All chunks as one table: (3, tasks, streams, steps)."""
    whole = len(wanted.tasks) * wanted.streams
    table, start = np.empty((3, whole, wanted.steps), np.uint8), 0
    for part in parts:
        try:
            rows = np.load(part, allow_pickle=False)
            table[:, start : start + rows.shape[1]] = rows
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"a damaged chunk: {error}", where=str(part), hint=f"rm {part}, and again") from error
        start += rows.shape[1]
    if start != whole:
        raise DataError(f"{start} of {whole} streams", where=str(parts[0].parent), hint=f"rm -r {parts[0].parent}")
    return table.reshape(3, len(wanted.tasks), wanted.streams, wanted.steps)


def _refuse_others(
    there: dict[str, Any], wanted: Collection | dict[str, Any], where: Path, hint: Callable[[], str]
) -> None:
    """What lies there was made with other settings: say which, before any work is done. Of other programs: nothing."""
    asked = wanted.settings() if isinstance(wanted, Collection) else wanted
    if there and (other := differences(there, asked)):
        raise ConfigError(f"made with other settings: {'; '.join(other)[:300]}", where=str(where), hint=hint())
