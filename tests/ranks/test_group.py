"""The group: who joins, what is decided together, and what a lost peer looks like."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError
from lockstep.runtime import env
from lockstep.runtime.env import Env
from lockstep.runtime.group import Group, is_lost_peer, join
from tests.ranks.pool import Died, Pool, free_port

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
OPERATIONS = {
    "sum": lambda group: group.sum_(torch.ones(3)),
    "async sum": lambda group: group.sum_(torch.ones(3), async_op=True).wait(),
    "barrier": lambda group: group.barrier(),
    "gather": lambda group: group.gather({"rank": group.rank}),
    "control": lambda group: group.control_sum([1, 2]).wait(),
    "together": lambda group: group.together(lambda: 1),
}


def everything(group: Group) -> dict[str, Any]:
    tensor = torch.full((4,), float(group.rank + 1))
    group.sum_(tensor)
    begun = group.control_sum([group.rank, 1])
    group.barrier()
    return {
        "together": group.together(lambda: {"from": os.getpid(), "text": "ü"}),
        "gathered": group.gather({"rank": group.rank, "text": "é" * (1 + 50 * group.rank)}),
        "sum": tensor.tolist(),
        "control": begun.wait(),
    }


def test_all_ranks_hear_and_sum_the_same(ranks: Pool) -> None:
    first, *others = ranks(3, everything)
    assert first["sum"] == [6.0] * 4
    assert first["control"] == [3, 3]
    assert [each["rank"] for each in first["gathered"]] == [0, 1, 2]
    assert first["gathered"][2]["text"] == "é" * 101
    assert all(other == first for other in others)


def fail_together(group: Group, ours: bool) -> tuple[str, str, int, bool]:
    def action() -> None:
        raise DataError("bad bytes", where="file", hint="look") if ours else ValueError("what?")

    try:
        group.together(action)
    except Exception as error:
        code = int(error.exit_code) if isinstance(error, LockstepError) else 1
        return type(error).__name__, str(error), code, is_lost_peer(error)
    raise AssertionError("nobody told")


def test_an_error_of_rank_0_is_raised_on_all(ranks: Pool) -> None:
    first, *others = ranks(3, fail_together, True)
    assert first == ("DataError", "file: bad bytes\n  try: look", int(ExitCode.DATA), False)
    assert others == [(*first[:3], True)] * 2
    first, *others = ranks(2, fail_together, False)
    assert first[0] == "ValueError"
    assert others[0] == ("LockstepError", "rank 0 failed: ValueError: what?", 1, True)


def test_alone_there_is_no_process_group() -> None:
    group = join(Env(), CPU, timeout_seconds=1)
    assert (group.rank, group.world, dist.is_initialized()) == (0, 1, False)
    assert group.together(lambda: 7) == 7
    assert group.gather({"a": 1}) == [{"a": 1}]
    assert group.control_sum([3, 4]).wait() == [3, 4]
    group.barrier()
    group.close()


@dataclass(frozen=True)
class Seen:
    """What a survivor saw."""

    lost: bool
    words: str
    seconds: float
    close_seconds: float


def outcome(group: Group, operation: str) -> Seen | None:
    """What a rank hears of an exchange that cannot end, and how long it takes to leave."""
    before = time.monotonic()
    try:
        OPERATIONS[operation](group)
    except Exception as error:
        seen = time.monotonic()
        group.close()
        return Seen(is_lost_peer(error), f"{type(error).__name__}: {error}", seen - before, time.monotonic() - seen)
    return None


def lose(group: Group, operation: str, victim: int) -> Seen | None:
    """The victim is killed while the others wait for it."""
    if group.rank == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(group, operation)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("operation", "victim"),
    [
        ("sum", 1),
        pytest.param("async sum", 0, marks=SLOW),
        pytest.param("barrier", 1, marks=SLOW),
        pytest.param("gather", 0, marks=SLOW),
        pytest.param("control", 1, marks=SLOW),
        ("together", 0),
    ],
)
def test_a_killed_peer_is_recognised_at_once(ranks: Pool, operation: str, victim: int) -> None:
    results = ranks(2, lose, operation, victim, may_fail=True)
    assert results[victim] == Died(-signal.SIGKILL)
    seen = results[1 - victim]
    assert seen.lost, seen.words
    assert seen.seconds < 10
    assert seen.close_seconds < 6


def wait_in_vain(_group: Group, operation: str) -> Seen | None:
    """Rank 1 sleeps longer than the group's patience."""
    group = join(env.detect(), CPU, timeout_seconds=-28.5, join_seconds=20)  # 1.5 s
    if group.rank == 1:
        time.sleep(3)
        group.close()
        return None
    return outcome(group, operation)


def test_a_silent_peer_is_recognised_when_time_is_up(ranks: Pool) -> None:
    seen = ranks(2, wait_in_vain, "sum", join=False)[0]
    assert seen.lost, seen.words
    assert 1 < seen.seconds < 10


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("DataLoader timed out after 30 seconds"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        RuntimeError("cannot restore the state: connection refused"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("collate: connection of rows timed out"),
        OSError(104, "Connection reset by peer"),
        TimeoutError("timed out"),
        LockstepError("gloo: connection closed by peer"),
        KeyboardInterrupt(),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_a_lost_peer(error: BaseException) -> None:
    assert not is_lost_peer(error)


@pytest.mark.parametrize(
    "words",
    [
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600000 ms",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_the_words_of_nccl_are_known(words: str) -> None:
    assert is_lost_peer(RuntimeError(words))
    wrapped = ValueError("while training")
    wrapped.__cause__ = RuntimeError(words)
    assert is_lost_peer(wrapped)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port that MASTER_PORT names."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return port


def test_a_taken_port_is_named_with_its_holder(meeting: int) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", meeting))
        holder.listen()
        with pytest.raises(ConfigError, match=rf"port {meeting} is taken by .*{os.getpid()}") as caught:
            join(Env(rank=0, world=2, local_world=2), CPU, timeout_seconds=5, join_seconds=5)
    assert caught.value.exit_code == ExitCode.USAGE
    assert not dist.is_initialized()


def test_nobody_at_the_address_is_said_in_time(meeting: int) -> None:
    before = time.monotonic()
    with pytest.raises(LockstepError, match=f"127.0.0.1:{meeting}: cannot be reached within 1 s"):
        join(Env(rank=1, world=2, local_world=2), CPU, timeout_seconds=5, join_seconds=1)
    assert time.monotonic() - before < 10


def test_a_stranger_at_the_address_does_not_hold_us_for_ever(meeting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.group.CLOSE_SECONDS", 1.0)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", meeting))
        stranger.listen()
        before = time.monotonic()
        with pytest.raises(LockstepError, match=f"127.0.0.1:{meeting}"):
            join(Env(rank=1, world=2, local_world=2), CPU, timeout_seconds=5, join_seconds=1)
        assert time.monotonic() - before < 10


def test_who_does_not_come_is_named(meeting: int) -> None:
    with pytest.raises(LockstepError, match="rank 1, 2 of 3 did not come within 1 s"):
        join(Env(rank=0, world=3, local_world=3), CPU, timeout_seconds=5, join_seconds=1)


@pytest.mark.parametrize("how", ["dies before it has begun", "cannot be had"])
def test_out_of_memory_nobody_waits_for_the_thread_that_leaves(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`threading.Thread.start` would, for ever: its new thread is to say that it runs, and has no memory for that."""

    def no_thread(*_: object) -> int:
        if how == "cannot be had":
            raise RuntimeError("can't start new thread")
        return 0

    monkeypatch.setattr("_thread.start_new_thread", no_thread)
    monkeypatch.setattr("threading._start_new_thread", no_thread)
    monkeypatch.setattr("lockstep.runtime.group.CLOSE_SECONDS", 0.05)
    control: Any = object()
    group = Group(0, 2, control=control)
    group.close()
    assert group._control is None
