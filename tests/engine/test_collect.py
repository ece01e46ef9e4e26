"""Collection: the documented file, and the same bytes whatever happened on the way."""

from __future__ import annotations

import hashlib
import resource
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import Tensor

from lockstep.engine import collect as module
from lockstep.engine.collect import Collection, collect, plan
from lockstep.engine.history_files import read_hdf5
from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError
from lockstep.learners.history import History, Learner
from lockstep.learners.posterior import Posterior
from lockstep.learners.ppo import PPO
from lockstep.worlds import darkroom, darkroompermuted, key_door
from lockstep.worlds.table import World

QUICK = PPO(n_epochs=1)


def digest(wanted: Collection) -> str:
    return hashlib.sha256(wanted.file("hdf5").read_bytes()).hexdigest()


def table_of(wanted: Collection) -> np.ndarray:
    return read_hdf5(wanted.file("hdf5"), wanted.world).table


@dataclass(frozen=True)
class Breaking(PPO):
    """A learner that fails when it is asked for the third time."""

    n_epochs: int = 1
    calls: list[int] = field(default_factory=list, repr=False, compare=False)

    def chunk(self, device: torch.device) -> int:
        return 8

    def run(self, world: World, tasks: Tensor, keys: Tensor, *, steps: int) -> History:
        self.calls.append(len(tasks))
        if len(self.calls) == 3:
            raise RuntimeError("the power is gone")
        return super().run(world, tasks, keys, steps=steps)


def breaking(folder: Path, calls: list[int]) -> Collection:
    """`calls` is no setting: it is left out of what the files say of themselves."""

    @dataclass(frozen=True)
    class Quiet(Collection):
        def settings(self) -> dict[str, object]:
            return replace(self, learner=QUICK).plain()

        def plain(self) -> dict[str, object]:
            return Collection.settings(self)

    made = plan(darkroom.build(), Breaking(calls=calls), total_timesteps=200, streams=2, folder=folder)
    return Quiet(**{name: getattr(made, name) for name in made.__dataclass_fields__}).only(range(20))


def test_the_documented_file(tmp_path: Path) -> None:
    wanted = plan(darkroom.build(), Posterior(), total_timesteps=400, streams=4, folder=tmp_path / "datasets")
    path = collect(wanted)
    assert path == tmp_path / "datasets" / "history_darkroom_PSRL_alg-seed42.hdf5"
    assert plan(darkroom.build(), PPO()).file("hdf5") == Path("datasets/history_darkroom_PPO_alg-seed42.hdf5")
    with h5py.File(path) as file:
        assert sorted(file, key=int) == [str(task) for task in range(81)]
        shapes = {name: (data.shape, str(data.dtype)) for name, data in file["80"].items()}
        assert shapes == {
            "states": ((100, 4, 2), "int32"), "actions": ((100, 4), "int32"), "rewards": ((100, 4), "int32"),
            "next_states": ((100, 4, 2), "int32"), "dones": ((100, 4), "bool"),
            "compress_markers": ((100, 4), "int32"),
        }  # fmt: skip
        for name in ("0", "40", "80"):
            check_group({column: data[()] for column, data in file[name].items()}, divmod(int(name), 9))
        streams = [file[name]["actions"][:, stream].tobytes() for name in file for stream in range(4)]
        assert len(set(streams)) == 81 * 4, "each is a history of its own"


def check_group(group: dict[str, np.ndarray], goal: tuple[int, int]) -> None:
    moves = np.array([(1, 0), (-1, 0), (0, 1), (0, -1), (0, 0)])
    after = np.clip(group["states"] + moves[group["actions"]], 0, 8)
    assert (group["next_states"] == after).all()
    assert (group["rewards"] == (after == goal).all(-1)).all()
    assert (group["states"][0::20] == 4).all()
    assert (group["states"][1:][~group["dones"][:-1, 0]] == after[:-1][~group["dones"][:-1, 0]]).all()
    assert np.flatnonzero(group["dones"][:, 1]).tolist() == [19, 39, 59, 79, 99]
    assert group["compress_markers"][[0, 1, 78, 79, 80, 81], 2].tolist() == [1, 0, 0, 2, 1, 0]


def test_a_history_is_as_long_as_whole_rollouts() -> None:
    assert plan(darkroom.build(), PPO(), total_timesteps=100_000, streams=100).steps == 1040
    assert plan(darkroom.build(), Posterior(), total_timesteps=100_000, streams=100).steps == 1000


def test_the_same_bytes_after_an_interruption(tmp_path: Path) -> None:
    whole = plan(darkroom.build(), QUICK, total_timesteps=200, streams=2, folder=tmp_path / "a").only(range(20))
    collect(whole)
    time.sleep(1.1)  # a file that keeps the time of its making would differ
    calls: list[int] = []
    broken = breaking(tmp_path / "b", calls)
    with pytest.raises(RuntimeError, match="power is gone"):
        collect(broken, workers=1)
    assert not broken.file("hdf5").exists()
    kept = {path.name for path in broken.file("parts").glob("*.npy")}
    assert {"00000.npy", "00001.npy"} <= kept <= {"00000.npy", "00001.npy", "00003.npy"}  # 3: already begun
    assert collect(broken, workers=1)
    assert len(calls) == 5 + 1, "the finished chunks were not made again"
    assert digest(whole) == digest(broken), "also with another cut into chunks"
    assert not broken.file("parts").exists()
    other = replace(whole, seed=43, folder=tmp_path / "c")
    collect(other)
    assert digest(whole) != digest(other)


def test_threads_do_not_show(tmp_path: Path) -> None:
    one, three = (
        plan(darkroom.build(), QUICK, total_timesteps=80, streams=1, folder=tmp_path / name)
        for name in ("one", "three")
    )
    collect(one, workers=1)
    collect(three, workers=3)
    assert digest(one) == digest(three)


def test_a_damaged_chunk_does_not_pass(tmp_path: Path) -> None:
    """The control: what the parts hold is what the file gets, so a lost row must be seen."""
    broken = breaking(tmp_path, [])
    with pytest.raises(RuntimeError):
        collect(broken, workers=1)
    first = broken.file("parts") / "00000.npy"
    np.save(first, np.load(first)[:, :-1])
    with pytest.raises(DataError, match="39 of 40 streams"):
        collect(broken, workers=1)
    assert not broken.file("hdf5").exists()


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plan(darkroom.build(size=3), Posterior(), total_timesteps=60, streams=3, folder=tmp_path)
    collect(wanted)
    before = digest(wanted)
    monkeypatch.setattr(module, "_make", lambda *_: pytest.fail("made again"))
    collect(wanted)
    assert digest(wanted) == before
    other = replace(wanted, steps=40)
    with pytest.raises(ConfigError, match="steps is 20, not 40"):
        collect(other)
    monkeypatch.undo()
    assert collect(other, overwrite=True)
    assert table_of(other).shape == (3, 9, 3, 40)


def test_unfinished_work_of_other_settings_is_refused(tmp_path: Path) -> None:
    broken = breaking(tmp_path, [])
    with pytest.raises(RuntimeError):
        collect(broken, workers=1)
    with pytest.raises(ConfigError, match="made with other settings: steps is 160, not 240"):
        collect(replace(broken, steps=240))


def test_what_is_no_file_of_histories_is_refused_and_left_alone(tmp_path: Path) -> None:
    wanted = plan(darkroom.build(size=3), Posterior(), total_timesteps=60, streams=3, folder=tmp_path)
    with h5py.File(wanted.file("hdf5"), "w") as file:
        file.create_group("0")
    before = wanted.file("hdf5").read_bytes()
    collect(wanted)
    with pytest.raises(DataError, match="task 0 has no 'states'"):
        table_of(wanted)
    assert wanted.file("hdf5").read_bytes() == before
    wanted.file("hdf5").write_bytes(b"no such format")
    with pytest.raises(DataError, match="not a readable HDF5"):
        collect(wanted)
    assert wanted.file("hdf5").read_bytes() == b"no such format"
    assert collect(wanted, overwrite=True)


def test_of_two_collections_one_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = plan(darkroom.build(size=3), Posterior(), total_timesteps=60, streams=3, folder=tmp_path)
    other = FileLock(tmp_path / f".{wanted.stem}.lock", thread_local=False)
    other.acquire()
    waiting = f"waiting for another process, who is building {wanted.file('hdf5')}"

    def release() -> None:
        until = time.monotonic() + 30
        while waiting not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        other.release()

    began = time.monotonic()
    threading.Thread(target=release, daemon=True).start()
    with caplog.at_level("INFO"):
        assert collect(wanted)
    assert time.monotonic() - began >= 0.25
    assert waiting in caplog.text


@pytest.mark.parametrize("learner", [Posterior(), replace(QUICK, streams_per_learner=2)])
def test_other_worlds_are_kept_too(tmp_path: Path, learner: Learner) -> None:
    for world in (darkroompermuted.build(size=4), key_door.build(size=3, horizon=20)):
        wanted = plan(world, learner, total_timesteps=320, streams=4, folder=tmp_path).only([7, 3, 50])
        collect(wanted)
        table = table_of(wanted)
        assert table.shape == (3, 3, 4, 80)
        with h5py.File(wanted.file("hdf5")) as file:
            assert sorted(file, key=int) == ["3", "7", "50"]
            assert (file["50"]["actions"][()] == table[1, 2].T).all()


def test_histories_may_be_shorter_than_an_episode(tmp_path: Path) -> None:
    wanted = plan(darkroom.build(size=3, horizon=20), Posterior(), total_timesteps=30, streams=3, folder=tmp_path)
    collect(wanted)
    assert table_of(wanted).shape == (3, 9, 3, 10)


def test_a_disk_that_is_full_is_said_once_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the HDF5 file too, whose own library goes on complaining."""
    wanted = plan(darkroom.build(), Posterior(), total_timesteps=500, streams=10, folder=tmp_path)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, usual[1]))
    try:
        with pytest.raises(LockstepError, match="collecting histories failed: File too large"):
            collect(wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.name[0] != ".") == [".parts"]
    monkeypatch.setattr(Posterior, "run", lambda *_: pytest.fail("made again"))
    collect(wanted)
    assert table_of(wanted).shape == (3, 81, 10, 50)


def test_what_no_disk_can_hold_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Posterior, "run", lambda *_: pytest.fail("begun"))
    wanted = plan(darkroom.build(), Posterior(), total_timesteps=10**15, streams=10, folder=tmp_path)
    told = r"81,000,000,000,000,000 steps need 2,471,923,828,125\.0 MiB, and .* are free"
    with pytest.raises(LockstepError, match=told) as said:
        collect(wanted)
    assert said.value.exit_code == ExitCode.IO, "as of a disk that is full later on"
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    small = plan(darkroom.build(), QUICK, total_timesteps=4000, streams=10, folder=tmp_path)
    collect(small)
    size = small.file("hdf5").stat().st_size
    assert size == pytest.approx((module.STEP_BYTES - 3) * 81 * 4000, rel=0.2)


def test_a_small_collection_is_not_filled_up_to_a_large_one() -> None:
    """On a GPU all chunks are equally large: 81 learners of 100 streams are not made to be 4096."""
    shared = replace(QUICK, streams_per_learner=100)
    gpu = torch.device("cuda")
    assert plan(darkroom.build(), shared).side_by_side(gpu) == 81
    assert plan(darkroom.build(), QUICK).side_by_side(gpu) == QUICK.chunk(gpu) < 8100
    assert plan(darkroom.build(), QUICK).only([5]).side_by_side(torch.device("cpu")) == 32


def test_what_cannot_be_collected_is_said() -> None:
    shared = replace(QUICK, streams_per_learner=2)
    with pytest.raises(ConfigError, match="n_stream=2"):
        plan(darkroom.build(), shared, streams=3)
    with pytest.raises(ConfigError, match="at least one step"):
        plan(darkroom.build(), shared, total_timesteps=0)
    for wrong in ([], [81], [-1, 3]):
        with pytest.raises(ConfigError, match="from 0 to 80"):
            plan(darkroom.build(), shared).only(wrong)
