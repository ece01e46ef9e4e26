"""Ranks that are slow are waited for, ranks that fail are not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.contracts import Batch
from lockstep.engine import build, loop, milestones, replicas
from lockstep.engine.council import Council
from lockstep.runtime import env
from lockstep.runtime.group import Group, is_lost_peer, join
from tests.gates.training import run
from tests.ranks.data_parallel import SMALL
from tests.ranks.pool import Failed, Pool, Silent
from tests.ranks.sharding import assembled

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

CPU = torch.device("cpu")
SLOW_SECONDS = 3.5
SHORT = {**SMALL, "training.max_steps": 3, "training.batch_size": 1, "training.grad_accum_nums": 2}


class Watched:
    """Marks as a watchdog sees them: the section, and the longest silence in it."""

    def __init__(self) -> None:
        self.section, self.silence, self.since = "save", dict[str, float](), time.monotonic()

    def enter(self, section: str, step: int = -1) -> None:
        now = time.monotonic()
        self.silence[self.section] = max(self.silence.get(self.section, 0.0), now - self.since)
        self.section, self.since = section, now

    def busy(self, step: int, seconds: float) -> None: ...


def wait_for_a_slow_rank(_group: Group, exchange: str, tells: bool) -> tuple[Any, dict[str, float], str]:
    """The last rank works for long; a collective of this group would give up after 1.5 s."""
    group = join(env.detect(), CPU, timeout_seconds=-28.5, join_seconds=20)
    link = group.link = Watched()
    slow = 0 if exchange == "together" else 1

    def work() -> int:
        told, until = group.told(link), time.monotonic() + SLOW_SECONDS
        while time.monotonic() < until:
            time.sleep(0.2)
            if tells:
                told.enter("save")
        return 7

    if group.rank == slow and exchange == "gather":
        work()
    said = group.together(work) if exchange == "together" else group.gather(group.rank)
    link.enter("done")
    group.close()
    return said, link.silence, link.section


@pytest.mark.parametrize(
    ("exchange", "tells"), [("gather", True), ("together", True), pytest.param("gather", False, marks=pytest.mark.slow)]
)
def test_a_slow_rank_is_waited_for_and_who_waits_says_so(ranks: Pool, exchange: str, tells: bool) -> None:
    """Beyond the timeout of collectives; and as long as it shows progress, so do those who wait, on whatever node."""
    results = ranks(2, wait_for_a_slow_rank, exchange, tells, join=False)
    assert {str(said) for said, _, _ in results} == {"[0, 1]" if exchange == "gather" else "7"}
    _, waiting, _ = results[1 if exchange == "together" else 0]
    assert waiting["save"] < 0.5
    assert (waiting["communication"] < SLOW_SECONDS - 0.7) == tells, waiting


def compare_unequal_replicas(_group: Group, folder: Path) -> tuple[dict[str, float], int]:
    group = join(env.detect(), CPU, timeout_seconds=-28.5, join_seconds=20)
    parts, recorder = run(folder, {**SHORT, "system.mode": "replicas"}, group=group)
    link = group.link = Watched()
    if group.rank == 1:
        time.sleep(SLOW_SECONDS)
    replicas.compare(parts, group, mode="replicas")
    link.enter("done")
    group.close()
    return link.silence, [kind for kind, _ in recorder.events].count("replicas")


def test_a_slow_replica_is_waited_for(ranks: Pool, tmp_path: Path) -> None:
    (waiting, told), (_, also_told) = ranks(2, compare_unequal_replicas, tmp_path, join=False)
    assert (told, also_told) == (1, 1)
    assert waiting["save"] < 1 < waiting["communication"]


def resume_late(group: Group, folder: Path, point: Path, hurried: bool) -> str:
    """Rank 1 reads the checkpoint when rank 0 could be long past it and have forgotten it; hurried, when it has."""
    settings = {**SHORT, "system.mode": "replicas", "training.save_interval": 1, "checkpoint.keep_last": 1}
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            resume, until = build._resume, time.monotonic() + (60 if hurried else 2)

            def late(*args: Any, **more: Any) -> Any:
                while point.exists() and time.monotonic() < until:
                    time.sleep(0.01)
                return resume(*args, **more)

            patch.setattr(build, "_resume", late)
        if hurried:
            patch.setattr(Group, "barrier", lambda _self: None)
        _, recorder = run(folder, settings, group=group, point=point)
    return recorder.records[-1].loss.hex()


@pytest.mark.parametrize("hurried", [False, True])
def test_no_replica_forgets_what_another_reads(ranks: Pool, tmp_path: Path, hurried: bool) -> None:
    run(tmp_path, {**SHORT, "training.max_steps": 3, "training.save_interval": 1, "checkpoint.keep_last": 9})
    point = tmp_path / "checkpoints" / "step_00000001"
    first, late = ranks(2, resume_late, tmp_path, point, hurried, may_fail=True)
    assert isinstance(late, Failed) if hurried else late == first


class Broken:
    """Batches of which those of one step cannot be made."""

    def __init__(self, batches: Iterator[list[Batch]], good: int) -> None:
        self.good = islice(batches, good)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        for batches in self.good:
            return batches
        raise ValueError("row 7 is damaged")


def look_ahead_silently(self: Council, source: Iterator[list[Batch]], stop: Any, **_saves: int) -> None:
    """As it was: a rank that has no batch leaves the others alone with their sum."""
    try:
        self._ahead = next(source)
    except ValueError as error:
        self._ahead = error
    else:
        self._sum = self._begin(self._ahead, stop.signal)


def fail_to_load(group: Group, folder: Path, mode: str, silently: bool) -> tuple[str, bool]:
    settings = {"system.mode": mode, "training.max_steps": 4, "training.save_interval": 2}
    made, _ = assembled(group, folder, settings)
    if group.rank == 1:
        made.parts.batches = Broken(made.parts.batches, 2)
    with pytest.MonkeyPatch.context() as patch:
        if silently:
            patch.setattr(Council, "look_ahead", look_ahead_silently)
        try:
            loop.run(made.parts)
        except Exception as error:
            milestones.land(made.parts, patience_seconds=5)  # as the end of a run does
            return f"{type(error).__name__}: {error}", is_lost_peer(error)
        finally:
            made.loader.close()
    return "", False


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_a_rank_without_a_batch_tells_why_and_ends_all(ranks: Pool, tmp_path: Path, mode: str) -> None:
    """It fails to look ahead just before a save: that save is whole, and the step after it begins nowhere."""
    healthy, broken = ranks(2, fail_to_load, tmp_path, mode, False, timeout_seconds=60)
    assert broken == ("ValueError: row 7 is damaged", False)
    assert healthy == ("LockstepError: another worker has no batch for this step", True)
    assert (tmp_path / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.slow
def test_exchanges_out_of_step_are_seen(ranks: Pool, tmp_path: Path) -> None:
    """Negative control of the test above."""
    results = ranks(2, fail_to_load, tmp_path, "fsdp", True, timeout_seconds=15, may_fail=True)
    saved = (tmp_path / "checkpoints" / "step_00000002").is_dir()
    assert not saved or any(isinstance(result, Silent | Failed) for result in results)


def meet_at_any_port(_group: Group, work: str, free: str) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_WORK", work)
        patch.setenv("LOCKSTEP_PORT_FREE", free)
        patch.setenv("MASTER_PORT", (Path(work) / "taken").read_text())
        group = join(env.detect(), CPU, timeout_seconds=20, join_seconds=4)
    try:
        return group.gather(group.rank)
    finally:
        group.close()


@pytest.mark.parametrize("free", ["1", ""])
def test_a_port_that_nobody_gave_cannot_be_taken(ranks: Pool, tmp_path: Path, free: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        (tmp_path / "taken").write_text(str(holder.getsockname()[1]))
        results = ranks(2, meet_at_any_port, str(tmp_path), free, join=False, may_fail=True, timeout_seconds=30)
    if free:
        assert results == [[0, 1], [0, 1]]
    else:
        assert "is taken" in results[0].error
    assert (tmp_path / "port").exists() == bool(free)
