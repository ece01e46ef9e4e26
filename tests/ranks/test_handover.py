"""A checkpoint for machines that share no disk: whole, the same one everywhere, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import rundir
from lockstep.engine import handover
from lockstep.runtime.env import Env
from lockstep.runtime.group import Group
from tests.ranks.pool import Failed, Pool

pytestmark = pytest.mark.ranks

NAME = "step_00000003"
CONTENT = {"model.safetensors": bytes(range(256)) * 5, "run.json": b"{}", "empty": b""}


def write(folder: Path, content: dict[str, bytes]) -> None:
    with rundir.publishing(folder / NAME) as staged:
        for name, each in content.items():
            (staged / name).write_bytes(each)


def found(folder: Path) -> dict[str, bytes]:
    rundir.verify(folder / NAME)
    return {path.name: path.read_bytes() for path in (folder / NAME).iterdir() if path.name != rundir.MANIFEST}


def take(group: Group, disks: Path, spoilt: bool = False) -> None:
    """Each rank is a machine with a disk of its own."""
    handover.PART_BYTES = 1000  # several parts
    if spoilt and group.rank == 1:
        spread = group.spread
        group.spread = lambda content, size: bytes(reversed(spread(content, size)))
    place = Env(rank=group.rank, world=group.world, node=group.rank, nodes=group.world)
    handover.hand_over(disks / str(group.rank) / NAME, group, place)


def test_who_lacks_it_or_has_another_gets_it(tmp_path: Path, ranks: Pool) -> None:
    write(tmp_path / "0", CONTENT)
    write(tmp_path / "2", {**CONTENT, "run.json": b"{} ", "more": b"of an older run of that name"})
    left = tmp_path / "1" / f"{NAME}.tmp-0123456789ab"
    left.mkdir(parents=True)
    ranks(3, take, tmp_path)
    assert [found(tmp_path / str(rank)) for rank in range(3)] == [CONTENT] * 3
    assert [sorted(path.name for path in (tmp_path / str(rank)).iterdir()) for rank in range(3)] == [[NAME]] * 3


def test_what_does_not_arrive_as_it_was_sent_is_refused(tmp_path: Path, ranks: Pool) -> None:
    write(tmp_path / "0", CONTENT)
    first, second = ranks(2, take, tmp_path, True, may_fail=True)
    assert isinstance(second, Failed), first
    assert "not arrived" in second.error
