"""SIGKILL of any rank at any moment of a save in shards: the newest checkpoint that verifies is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import rundir
from lockstep.engine import checkpoint
from lockstep.engine.checkpoint import Checkpointer, State
from lockstep.runtime.env import detect
from lockstep.runtime.group import Group, join
from tests.ranks.pool import free_port

pytestmark = pytest.mark.ranks

WORLD, ROWS = 2, 301
SAVERS = {"ours": Checkpointer}


class InPlace(Checkpointer):
    """What not to do: every save over the files of the last one."""

    def _stage(self, final: Path) -> str:
        final.with_name("step_00000001").mkdir(exist_ok=True)
        return str(final.with_name("step_00000001"))

    def save(self, step: int, state: State) -> Path:
        staged = Path(self.group.together(lambda: self._stage(self.folder / "step")))
        written = self.group.gather(self._write_pieces(staged, staged, state))

        def finish() -> None:
            for file in checkpoint.KINDS:
                index = checkpoint.make_index([said[file] for said in written])
                rundir.write_json(staged / checkpoint.index_of(file), index)
            self._write_rest(staged, state, finite=True)
            (staged / rundir.MANIFEST).unlink(missing_ok=True)
            rundir.seal(staged)

        self.group.together(finish)
        return staged


SAVERS["in-place"] = InPlace


def state_of(step: int, mesh: Any) -> State:
    """Tensors that say which step they are of, in shards."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def cut(value: float) -> torch.Tensor:
        return distribute_tensor(torch.full((ROWS, 256), value), mesh, [Shard(0)], src_data_rank=None)

    return State({"w": cut(step)}, {"m": cut(-step)}, {"step": step})


def check_whole(path: Path) -> int:
    """The step that every element of a checkpoint says it is of."""
    state = checkpoint.load(path)
    step = state.run["step"]
    assert torch.equal(state.model["w"], torch.full((ROWS, 256), float(step)))
    assert torch.equal(state.optimizer["m"], torch.full((ROWS, 256), -float(step)))
    return step


def serve() -> None:
    """For each line `saver folder port`: as many ranks as needed, saving until they are killed."""
    while line := sys.stdin.readline():
        saver, folder, port = line.split()
        pids = [os.fork() or _rank(rank, saver, Path(folder), port) for rank in range(WORLD)]
        _say(f"pids {' '.join(map(str, pids))}")
        sys.stdin.readline()  # until then their numbers are nobody else's
        for pid in pids:
            os.waitpid(pid, 0)
        _say("dead")


def _rank(rank: int, saver: str, folder: Path, port: str) -> int:
    from torch.distributed.device_mesh import init_device_mesh

    place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    group: Group = join(detect(), torch.device("cpu"), timeout_seconds=20)
    mesh = init_device_mesh("cpu", (WORLD,))
    try:
        checkpointer = SAVERS[saver](folder, group=group, sharded=True)
        for step in range(1, 1000):
            checkpointer.save(step, state_of(step, mesh))
            _say(f"saved {rank} {step}")
    except Exception as error:
        _say(f"failed {rank} {error!r}".replace("\n", " "))
    os._exit(0)


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process with torch loaded that becomes ranks by forking."""
    command = [sys.executable, "-c", "from tests.ranks.test_shard_kills import serve; serve()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        cwd=Path(__file__).parents[2],
    ) as process:  # fmt: skip
        yield process
        assert process.stdin
        process.stdin.close()


def kills(server: subprocess.Popen[str], count: int, root: Path, saver: str) -> Iterator[tuple[Path, int]]:
    """Kill one rank at a random moment, the other soon after; (folder, last step that a rank knew to be saved)."""
    chance = random.Random(f"{saver}{count}")
    assert server.stdin
    assert server.stdout
    for kill in range(count):
        folder = root / f"kill-{kill}"
        server.stdin.write(f"{saver} {folder} {free_port()}\n")
        server.stdin.flush()
        acknowledged, pids = 0, list[int]()
        while not acknowledged or not pids:
            kind, *numbers = server.stdout.readline().split()
            assert kind != "failed", numbers
            if kind == "pids":
                pids = [int(number) for number in numbers]
            else:
                acknowledged = int(numbers[1])
        chance.shuffle(pids)
        for pid, longest in zip(pids, (0.1, 0.03), strict=True):
            time.sleep(chance.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
        server.stdin.write("reap\n")
        server.stdin.flush()
        while (words := server.stdout.readline().split())[0] != "dead":
            if words[0] == "saved":  # the other one may fail before it is killed
                acknowledged = max(acknowledged, int(words[2]))
        yield folder, acknowledged


@pytest.mark.parametrize("count", [pytest.param(4, id="4"), pytest.param(200, id="200", marks=pytest.mark.slow)])
@pytest.mark.timeout(2400)
def test_sigkill_of_any_rank_loses_nothing_acknowledged(
    server: subprocess.Popen[str], count: int, tmp_path: Path
) -> None:
    unfinished = 0
    for number, (folder, acknowledged) in enumerate(kills(server, 4 * count, tmp_path, "ours"), start=1):
        newest = Checkpointer(folder).latest()
        assert newest is not None, f"{folder.name}: nothing can be loaded"
        assert check_whole(newest) >= acknowledged, f"{folder.name}: an acknowledged save is lost"
        unfinished += any(".tmp-" in path.name for path in folder.iterdir())
        rundir.sweep(folder)
        assert not [path for path in folder.iterdir() if ".tmp-" in path.name]
        if number >= count and unfinished:  # a few alone may all miss the moment of a save
            break
    assert unfinished > 0, "no kill ever hit a save: the test tests nothing"


def test_saving_in_place_does_lose_states(server: subprocess.Popen[str], tmp_path: Path) -> None:
    """Negative control: the harness sees what a save over the same files does."""
    assert any(Checkpointer(folder).latest() is None for folder, _ in kills(server, 24, tmp_path, "in-place"))
