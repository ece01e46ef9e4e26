"""Workers that have prepared different data do not train: nobody would notice that each learns something else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.prepare import check_same
from lockstep.errors import DataError
from lockstep.runtime import env
from lockstep.runtime.group import Group
from tests.data.stories import write_stories

KEYS = ("a" * 40, "b" * 40)


class Said(Group):
    """A group in which the others have said something."""

    def __init__(self, rank: int, said: list[Any]) -> None:
        super().__init__()
        self.rank, self.said = rank, said

    def gather(self, value: Any) -> list[Any]:
        assert value[0] == self.said[self.rank][0]
        return self.said


def test_who_has_what_is_said_once() -> None:
    first, second = KEYS
    said = [[first, 0], [first, 0], [second, 1]]
    for rank, key in enumerate((first, first, second)):
        with pytest.raises(DataError, match="different data") as caught:
            check_same(key, Said(rank, said))
        assert f"{first}: rank 0 (node 0), rank 1 (node 0)\n" in caught.value.what
        assert f"{second}: rank 2 (node 1)" in caught.value.what
        assert caught.value.secondary == (rank > 0)
    check_same(first, Said(0, [[first, 0], [first, 1]]))
    check_same(first, Group())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("same", [True, False])
def test_two_machines_with_other_files_under_the_same_path(in_dir: Path, same: bool) -> None:
    port = str(env.free_port("127.0.0.1"))
    processes: list[subprocess.Popen[str]] = []
    for node in range(2):
        folder = in_dir / f"node{node}"
        folder.mkdir()
        write_stories(folder)
        if node and not same:
            path = folder / "stories.jsonl"
            path.write_text(path.read_text().replace("lazy", "busy"))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=2", f"--node_rank={node}",
            "--master_addr=127.0.0.1", f"--master_port={port}", "-m", "lockstep", "train", "llama", "tiny",
            "--data-path", "stories.jsonl", "--tokenizer-name", "bytes", "--device", "cpu", "--max-steps", "2",
            "training.context_length=64", "training.eval_batches=1", "report.tensorboard=false",
            "--name", "run", f"run.out={in_dir / 'runs'}",
        ]  # fmt: skip
        with (in_dir / f"said{node}").open("w") as out:
            processes.append(subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True))
    codes = [process.wait(timeout=180) for process in processes]
    said = (in_dir / "said0").read_text() + (in_dir / "said1").read_text()
    if same:  # the control
        assert codes == [0, 0], said
        return
    assert all(codes), said
    assert said.count("the workers have prepared different data") >= 1, said
    assert "rank 1 (node 1)" in said
    assert not list(in_dir.glob("runs/run/checkpoints/step_*"))
