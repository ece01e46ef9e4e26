"""The ranks of a run as one: joining, deciding together, summing; and a lost peer told from an own error."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lockstep import errors
from lockstep.errors import ConfigError, ExitCode, LockstepError
from lockstep.runtime import env as environment
from lockstep.runtime.env import Env

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")
JOIN_SECONDS = 60.0  # beyond the arrival of the last one that did
MARGIN_SECONDS = 30.0  # the watchdog, which can name who is stuck, speaks before a collective gives up
SLICE_SECONDS = 1.0  # of a long wait: in between, signals are heard
CLOSE_SECONDS = 5.0
LOST = (  # how gloo, NCCL and the store say that somebody is gone or silent
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "socket timeout", "timed out", "timeout", "connection was likely closed", "failed to recv", "failed to send",
    "recvvalue failed", "sendbytes failed", "recvbytes failed", "gloo/transport", "no route to host",
    "network is unreachable", "ncclremoteerror", "ncclsystemerror", "remote process exited", "communicator was aborted",
)  # fmt: skip
OF_GROUP = ("gloo", "nccl", "tcpstore", "c10d", "socket", "processgroup")


class Sum:
    """A sum over ranks that is on its way."""

    def __init__(self, values: torch.Tensor, work: Work | None) -> None:
        self.values, self.work = values, work

    def wait(self) -> list[int]:
        if self.work is not None:
            self.work.wait()
        return self.values.tolist()


class Group:
    """All ranks of a run. Without arguments: one process on its own, which has no process group at all."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        *,
        store: Store | None = None,
        control: ProcessGroup | None = None,
    ) -> None:
        self.rank, self.world = rank, world
        self._store, self._control = store, control
        self._told = 0

    def together(self, action: Callable[[], T]) -> T:
        """Rank 0 does it and all have the (JSON) value. Its error is raised on all, elsewhere with `.secondary`.

        Rank 0 may take its time (prepare data): the others wait as long as it lives.
        """
        if self._store is None:
            return action()
        self._told += 1
        key = f"together/{self._told}"
        if self.rank == 0:
            try:
                value = action()
            except Exception as error:
                self._store.set(key, json.dumps({"error": _as_json(error)}))
                raise
            self._store.set(key, json.dumps({"value": value}))
            return value
        _wait_for(self._store, key)
        said = json.loads(self._store.get(key))
        if "error" in said:
            raise _from_json(said["error"])
        return said["value"]

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, on every rank."""
        if self._control is None:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([content.numel()]), group=self._control)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: content.numel()] = content
        contents = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(contents, padded, group=self._control)
        return [
            json.loads(bytes(each[: int(size)].tolist()).decode()) for each, size in zip(contents, sizes, strict=True)
        ]

    def barrier(self) -> None:
        """Nobody goes on before all are here."""
        if self._control is not None:
            dist.barrier(group=self._control)

    def sum_(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Replace the tensor by its SUM over ranks, where it is; async_op: once the returned work is done."""
        return dist.all_reduce(tensor, async_op=async_op) if self.world > 1 else None

    def control_sum(self, values: list[int]) -> Sum:
        """Begin to sum whole numbers, beside whatever the devices do."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._control is None:
            return Sum(tensor, None)
        return Sum(tensor, dist.all_reduce(tensor, group=self._control, async_op=True))

    def close(self) -> None:
        """Leave, whether the others still live or not."""
        if self._control is None:
            return
        self._control = None
        leaving = threading.Thread(target=_leave, name="leave-group", daemon=True)
        leaving.start()
        leaving.join(CLOSE_SECONDS)  # NCCL may wait for a dead peer for ever


def _leave() -> None:
    try:
        dist.destroy_process_group()
    except Exception as error:
        logger.debug("Leaving the process group: %s", error)


def join(env: Env, device: torch.device, *, timeout_seconds: float, join_seconds: float = JOIN_SECONDS) -> Group:
    """Meet the other ranks. Waits for them as long as they keep coming, then says who is missing."""
    if env.world == 1:
        return Group()
    address, port = environment.rendezvous(env)
    _use_interface_towards(address, port)
    store = _open_store(env, address, port, join_seconds)
    _meet(store, env, f"{address}:{port}", join_seconds)
    timeout = timedelta(seconds=timeout_seconds + MARGIN_SECONDS)
    on_cuda = environment.get("LOCKSTEP_CUDA_BACKEND", "nccl")  # gloo: ranks that share one GPU, which NCCL refuses
    backend = f"cpu:gloo,cuda:{on_cuda}" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise LockstepError(
            f"rank {env.rank} of {env.world} cannot join the others: {str(error).splitlines()[0][:200]}",
            where=f"{address}:{port}",
            hint="all nodes must reach each other; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface",
        ) from error
    assert isinstance(control, dist.ProcessGroup)
    return Group(env.rank, env.world, store=PrefixStore("lockstep", store), control=control)


def _open_store(env: Env, address: str, port: int, join_seconds: float) -> Store:
    """Rank 0 listens, unless torchrun's agent does; the others connect."""
    agent_listens = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = env.rank == 0 and not agent_listens
    place = f"{address}:{port}"
    try:
        store = _within(
            join_seconds + CLOSE_SECONDS,
            lambda: TCPStore(
                address,
                port,
                world_size=None,
                is_master=listens,
                timeout=timedelta(seconds=join_seconds),
                wait_for_workers=False,
            ),
        )
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_listens else "0"
        return PrefixStore(f"attempt/{attempt}", store)
    except (RuntimeError, ValueError) as error:
        if listens and ("EADDRINUSE" in str(error) or "already in use" in str(error)):
            raise ConfigError(
                f"port {port} is taken{_holder(port)}", where=place, hint="another --master-port, or none: a free one"
            ) from error
        says = "cannot listen" if listens else f"cannot be reached within {join_seconds:g} s"
        raise LockstepError(
            f"{says}: {str(error).splitlines()[0][:200]}",
            where=place,
            hint="--master-addr and --master-port must name the first node, and no firewall stand between",
        ) from error


def _within(seconds: float, action: Callable[[], T]) -> T:
    """The result of an action that may never return: torch waits for ever for a stranger who listens on the port."""
    done: list[T] = []
    failed: list[Exception] = []

    def attempt() -> None:
        try:
            done.append(action())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=attempt, name="join-group", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise RuntimeError("somebody listens there who is not one of our workers")
    return done[0]


def _meet(store: Store, env: Env, place: str, join_seconds: float) -> None:
    """Wait until every rank is here; as long as some arrive, more may."""
    keys = [f"here/{rank}" for rank in range(env.world)]
    try:
        store.set(keys[env.rank], "1")
        missing, since = keys, time.monotonic()
        while missing:
            with contextlib.suppress(dist.DistStoreError):  # not all of them yet
                store.wait(missing, timedelta(seconds=SLICE_SECONDS))
            still = [key for key in missing if not store.check([key])]
            if len(still) < len(missing):
                missing, since = still, time.monotonic()
            elif time.monotonic() - since > join_seconds:
                names = ", ".join(key.removeprefix("here/") for key in missing)
                raise LockstepError(f"rank {names} of {env.world} did not come within {join_seconds:g} s", where=place)
    except RuntimeError as error:
        raise LockstepError(f"rank 0 is gone: {str(error).splitlines()[0][:200]}", where=place) from error


def _wait_for(store: Store, key: str) -> None:
    while True:
        with contextlib.suppress(dist.DistStoreError):  # not yet; a store that is gone is another error
            store.wait([key], timedelta(seconds=SLICE_SECONDS))
            return


def _as_json(error: Exception) -> dict[str, Any]:
    if isinstance(error, LockstepError):
        kind, what = type(error).__name__, error.what
        return {"kind": kind, "what": what, "where": error.where, "hint": error.hint, "code": int(error.exit_code)}
    return {"kind": "", "what": f"rank 0 failed: {type(error).__name__}: {error}", "where": "", "hint": "", "code": 1}


def _from_json(said: dict[str, Any]) -> LockstepError:
    found = getattr(errors, said["kind"], LockstepError) if said["kind"] else LockstepError
    kind = found if isinstance(found, type) and issubclass(found, LockstepError) else LockstepError
    error = kind(said["what"], where=said["where"], hint=said["hint"], exit_code=ExitCode(said["code"]))
    error.secondary = True  # rank 0 tells it to the user
    return error


def is_lost_peer(error: BaseException) -> bool:
    """Whether this only says that somebody else is gone or silent: the cause is to be looked for there."""
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "secondary", False) or isinstance(seen, dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(seen, RuntimeError) and not isinstance(seen, NotImplementedError):
            text = str(seen).lower()
            if any(word in text for word in LOST) and any(word in text for word in OF_GROUP):
                return True
        seen = seen.__cause__
    return False


def _use_interface_towards(address: str, port: int) -> None:
    """Let gloo use the interface that leads to rank 0, not the one the host's name happens to resolve to."""
    import psutil

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: only asks the routing table
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == own for each in addresses):
                environment.setdefault("GLOO_SOCKET_IFNAME", name)
                return


def _holder(port: int) -> str:
    """` by NAME (pid N)`, as far as /proc shows it."""
    inodes = {
        line.split()[9]
        for table in ("tcp", "tcp6")
        for line in _lines(Path(f"/proc/net/{table}"))[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"  # listening
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(each.readlink()) in wanted for each in (folder / "fd").iterdir()):
                return f" by {(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
