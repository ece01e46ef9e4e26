"""A few processes with torch imported, started once for all tests, that run a function together as ranks of a group."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests import disk

SIZE = 8  # as many as any test asks for are started, most ask for 4 at most
AFTER_FAILURE_SECONDS = 3.0  # the others may fail too: their words help


@dataclass(frozen=True)
class Died:
    """What a rank that is gone returned."""

    code: int


@dataclass(frozen=True)
class Failed:
    """What a rank that raised returned."""

    error: str
    trace: str


@dataclass(frozen=True)
class Silent:
    """A rank that did not answer in time."""


class RankFailed(AssertionError):
    """A rank failed; the message holds its traceback."""


@dataclass
class Member:
    process: subprocess.Popen[bytes]
    line: Connection


class Pool:
    """`pool(3, function, *args)` runs `function(group, *args)` on 3 ranks and gives their results in order.

    The function is one of a module (it travels by name). A rank that raises or dies fails the test, unless
    `may_fail` is set: then its result is a Failed or a Died.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.members = folder, list[Member]()
        self.used_up: set[int] = set()  # ranks of this call that did not come out of their group
        self.environ: dict[str, str] = {}

    def __call__(
        self,
        count: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 120.0,
        may_fail: bool = False,
        join: bool = True,
    ) -> list[Any]:
        self._fill(count)
        port = free_port()
        environ = {**self.environ, "DATASET_CACHE_DIR": os.environ.get("DATASET_CACHE_DIR", "")}
        if fault := os.environ.get("LOCKSTEP_FAULT"):
            environ["LOCKSTEP_FAULT"] = fault
        for rank, member in enumerate(self.members[:count]):
            place = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            local = {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "GPU_RANK": str(rank)}
            member.line.send((function, args, {**environ, **place, **local}, join))
        results = self._collect(count, timeout_seconds)
        in_order = [results.get(rank, Silent()) for rank in range(count)]
        gone = {rank for rank, result in enumerate(in_order) if isinstance(result, Died | Silent)}
        self._drop(sorted(gone | self.used_up))
        self.used_up.clear()
        if not may_fail and any(isinstance(result, Died | Failed | Silent) for result in in_order):
            raise RankFailed("\n".join(f"rank {rank}: {_words(result)}" for rank, result in enumerate(in_order)))
        return in_order

    def _collect(self, count: int, timeout_seconds: float) -> dict[int, Any]:
        waiting = {member.line: rank for rank, member in enumerate(self.members[:count])}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for line in wait(list(waiting), timeout=left):
                assert isinstance(line, Connection)
                rank = waiting.pop(line)
                try:
                    results[rank], left = line.recv()
                    if not left:
                        self.used_up.add(rank)
                except EOFError:
                    results[rank] = Died(self.members[rank].process.wait())
                if isinstance(results[rank], Failed):
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_SECONDS)
        return results

    def _fill(self, count: int) -> None:
        assert count <= SIZE, f"the pool has {SIZE} ranks"
        missing = count - len(self.members)
        if missing <= 0:
            return
        address = str(self.folder / f"pool-{secrets.token_hex(4)}")
        key = secrets.token_bytes(16)
        with Listener(address, family="AF_UNIX", authkey=key) as listener:
            command = [sys.executable, "-c", "from tests.ranks.pool import serve; serve()", address]
            quiet = {**os.environ, "OMP_NUM_THREADS": "1", "POOL_KEY": key.hex()}
            root = Path(__file__).parents[2]
            processes = [subprocess.Popen(command, env=quiet, cwd=root) for _ in range(missing)]
            lines = [listener.accept() for _ in processes]
        by_pid = {process.pid: process for process in processes}
        self.members += [Member(by_pid[line.recv()], line) for line in lines]

    def _drop(self, places: list[int]) -> None:
        """End some; the next call starts new ones."""
        for member in [self.members[place] for place in places]:
            member.line.close()
            member.process.kill()
            member.process.wait()
            self.members.remove(member)

    def close(self) -> None:
        self._drop(list(range(len(self.members))))


_shared: list[Pool] = []


def shared(folder: Path) -> Pool:
    """The one pool of this test session, whichever folder's tests ask first."""
    if not _shared:
        _shared.append(Pool(folder))
    return _shared[0]


def _words(result: Any) -> str:
    if isinstance(result, Failed):
        return result.trace
    return str(result) if isinstance(result, Died | Silent) else "ok"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve() -> None:
    """A member of the pool: run what is sent until the line is cut."""
    import warnings

    import torch

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    disk.spare_if_told()
    line = Client(sys.argv[1], family="AF_UNIX", authkey=bytes.fromhex(os.environ.pop("POOL_KEY")))
    line.send(os.getpid())
    while True:
        try:
            function, args, environ, join = line.recv()
        except EOFError:
            return
        result = _run(function, args, environ, join)
        line.send((result, not torch.distributed.is_initialized()))  # it cannot join another group before it left


def _run(function: Callable[..., Any], args: tuple[Any, ...], environ: dict[str, str], join: bool) -> Any:
    import torch

    from lockstep.runtime import env
    from lockstep.runtime.group import Group
    from lockstep.runtime.group import join as join_group

    os.environ.pop("LOCKSTEP_FAULT", None)
    os.environ.update(environ)
    group = Group()
    try:
        if join:
            group = join_group(env.detect(), torch.device("cpu"), timeout_seconds=30.0, join_seconds=30.0)
        return function(group, *args)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
    finally:
        group.close()
