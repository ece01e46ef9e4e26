"""Files of histories: what another program made is learnt from, what is damaged is refused and left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lockstep.cli import main
from lockstep.engine import collect, history_files
from lockstep.errors import DataError, ExitCode
from lockstep.learners.posterior import Posterior
from lockstep.worlds import key_door, split
from tests.engine.gathered import STEPS, STREAMS, TASKS, collected, configuration, file_in, own, prepare
from tests.gates.training import run

__all__ = ["collected", "own"]


def foreign(path: Path, *, tasks: int = TASKS, streams: int = 4, steps: int = 80) -> None:
    """The file as another program would have made it: no word of ours, no markers, fewer of everything, floats."""
    with h5py.File(path) as file:
        kept = {
            str(task): {name: file[str(task)][name][:steps, :streams] for name in ("states", "actions", "rewards")}
            for task in range(tasks)
        }
    path.unlink()
    with h5py.File(path, "w") as file:
        for task, columns in kept.items():
            for name, column in columns.items():
                file[f"{task}/{name}"] = column.astype(np.float32 if name == "rewards" else np.int64)


def test_histories_of_another_program_are_learnt_from(own: Path, tmp_path: Path) -> None:
    whole = prepare(configuration(own)).histories
    foreign(file_in(own), tasks=20)
    before = file_in(own).read_bytes()
    prepared = prepare(configuration(own))
    assert whole is not None
    assert prepared.histories is not None
    first = whole.steps.reshape(3, TASKS, STREAMS, STEPS)[:, :20, :4, :80]
    assert np.array_equal(prepared.histories.steps.reshape(first.shape), first)
    assert [notice.partition(": ")[2] for notice in prepared.notices] == [
        "of the 22 tasks to learn from only 17 have histories",
        "all are distilled",
        "all are distilled",
    ]
    parts, recorder = run(tmp_path / "run", {"data.data_path": own, "training.max_steps": 2}, family="ad")
    assert len(recorder.records) == 2
    assert parts.rows == 17 * 4
    assert file_in(own).read_bytes() == before, "another's file stays as it is"


def test_without_one_unseen_task_there_is_nothing_to_measure(own: Path) -> None:
    _, unseen = split.split(TASKS, seed=0, ratio=0.9)
    with h5py.File(file_in(own), "r+") as file:
        del file.attrs[history_files.SETTINGS]
        for task in unseen:
            del file[str(task)]
    with pytest.raises(DataError, match="no history of any of the 3 tasks that are unseen"):
        prepare(configuration(own))


def change(name: str, value: Any, place: Any = (3, 1)) -> Callable[[Any], None]:
    def do(file: Any) -> None:
        file["4"][name][place] = value

    return do


def replaced(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def do(file: Any) -> None:
        column = file["4"][name][()]
        del file["4"][name]
        file["4"][name] = make(column)

    return do


DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "action": (change("actions", 7), "task 4: actions from 0 to 7, which should be whole numbers from 0 to 4"),
    "below": (change("actions", -1), "task 4: actions from -1 to 4"),
    "cell": (change("states", 200), "task 4: states from 0 to 200"),
    "reward": (change("rewards", 2), "task 4: rewards from 0 to 2"),
    "fraction": (replaced("actions", lambda column: column / 2), "which should be whole numbers"),
    "nothing": (replaced("rewards", lambda column: column * np.nan), "task 4: rewards from nan to nan"),
    "missing": (replaced("dones", lambda column: column), ""),  # the control: what is not read may be anything
    "gone": (lambda file: file["4"].pop("states"), "task 4 has no 'states'"),
    "a folder": (
        lambda file: (file["4"].pop("states"), file["4"].create_group("states")),
        "task 4 has no 'states'",
    ),
    "no folder": (lambda file: (file.pop("4"), file.create_dataset("4", data=[1, 2])), "task 4 has no 'states'"),
    "shape": (replaced("actions", lambda column: column[:, :, None]), "task 4: actions is int32"),
    "short": (replaced("actions", lambda column: column[:-1]), "do not belong together"),
    "text": (replaced("actions", lambda column: column.astype("S3")), "task 4: actions is"),
    "shorter": (
        lambda file: [replaced(name, lambda column: column[:-1])(file) for name in ("states", "actions", "rewards")],
        "task 4: 8 streams x 99 steps, not 8 x 100",
    ),
    "more tasks": (lambda file: file.create_group("81"), "task 81, and darkroom of 5 x 5 cells has 25"),
    "no tasks": (lambda file: [file.pop(name) for name in list(file)], "groups 0, 1, ... are missing"),
    "a jump": (
        change("states", (0, 0), (30, 2)),
        "task 4, stream 2, step 30 does not follow the rules of darkroom, 5 x 5",
    ),
    "a gift": (change("rewards", 1, (0, 5)), "task 4, stream 5, step 0 does not follow the rules"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "foreign"])
def test_a_damaged_file_is_refused_and_left_alone(kind: str, ours: bool, own: Path) -> None:
    damage, said = DAMAGE[kind]
    with h5py.File(file_in(own), "r+") as file:
        damage(file)
        if not ours:
            del file.attrs[history_files.SETTINGS]
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    if not said:
        assert prepare(configuration(own)).train.rows == 22 * STREAMS
        return
    with pytest.raises(DataError) as error:
        prepare(configuration(own))
    assert said in error.value.what
    assert error.value.where == str(file_in(own))
    assert error.value.exit_code == ExitCode.DATA
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before


@pytest.mark.parametrize(
    ("key", "cells", "pays"),
    [
        (3, (1, 3, 3, 2, 2), (0, 1, 0, 1, 0)),  # key, then door, once each
        (3, (2, 2, 3, 3, 2), (0, 0, 1, 0, 1)),  # the door before the key
        (2, (1, 2, 2, 2, 3), (0, 1, 1, 0, 0)),  # key and door in one cell
        (3, (1, 1, 0, 0, 1), (0, 0, 0, 0, 0)),
    ],
)
def test_what_keys_and_doors_pay(key: int, cells: tuple[int, ...], pays: tuple[int, ...]) -> None:
    """Twice, and cut short the third time: each episode begins without the key."""
    world = key_door.build(size=2, horizon=len(cells))
    after = np.array(3 * cells, np.uint8)[:-1, None]
    assert history_files._pays(world, key * 4 + 2, after)[:, 0].tolist() == [bool(paid) for paid in 3 * pays][:-1]


def test_histories_of_keys_and_doors_are_checked_too(tmp_path: Path) -> None:
    wanted = collect.plan(
        key_door.build(size=2, horizon=7), Posterior(), total_timesteps=60, streams=3, folder=tmp_path
    )
    file = collect.collect(wanted)
    foreign(file, tasks=16)
    assert history_files.read_hdf5(file, wanted.world).table[2].any()
    with h5py.File(file, "r+") as content:
        content["9"]["rewards"][12, 1] = 1 - content["9"]["rewards"][12, 1]
    with pytest.raises(DataError, match="task 9, stream 1, step 12 does not follow the rules of key_door"):
        history_files.read_hdf5(file, wanted.world)


@pytest.mark.parametrize("keep", [0, 100, 20_000, -1])
def test_a_cut_file_is_refused(keep: int, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = file_in(own).read_bytes()[:keep]
    file_in(own).write_bytes(content)
    code = main(["train", "ad", "tiny", "--device", "cpu", f"data.data_path={own}", f"run.out={own.parent / 'runs'}"])
    said = capsys.readouterr().err
    assert code == ExitCode.DATA, said
    assert f"{file_in(own)}: not a readable HDF5 file" in said
    assert "Traceback" not in said
    assert file_in(own).read_bytes() == content


def test_another_horizon_is_seen(own: Path) -> None:
    """The control of the rules: as the file was made it is fine, read in episodes of another length it is not."""
    foreign(file_in(own))
    assert prepare(configuration(own))
    with pytest.raises(DataError, match="does not follow the rules of darkroom, 5 x 5 cells, 10 steps an episode"):
        prepare(configuration(own, horizon=10))
