"""The ranks of a run as one: joining, deciding together, summing; and a lost peer told from an own error."""

from __future__ import annotations

import _thread
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

from lockstep import errors, rundir
from lockstep.errors import ConfigError, ExitCode, LockstepError
from lockstep.runtime import env as environment
from lockstep.runtime.env import Env
from lockstep.runtime.marks import Marks, NoMarks, Told

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")
JOIN_SECONDS = 60.0  # beyond the arrival of the last one that did
MARGIN_SECONDS = 30.0  # the watchdog, which can name who is stuck, speaks before a collective gives up
SLICE_SECONDS = 1.0  # of a long wait: in between, signals are heard
POLL_SECONDS = 0.02  # the longest nap while waiting for an exchange on the host
PULSE = "pulse"  # what ranks that make the others wait count up
EVER = timedelta(days=365)  # who waits on the host waits as long as the others live; a watchdog judges who is stuck
PORT_FILE = "port"  # in the work folder: where rank 0 listens, if it was to choose
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
        self.link: Marks = NoMarks()  # who is to know that this rank only waits
        self._store, self._control = store, control
        self._told = self._sides = 0

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
        self._wait(self._store, lambda nap: _has(self._store, key, nap))
        said = json.loads(self._store.get(key))
        if "error" in said:
            raise _from_json(said["error"])
        return said["value"]

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, on every rank; waits as long as the others live."""
        if self._control is None:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        self._finish(dist.all_gather(sizes, torch.tensor([content.numel()]), group=self._control, async_op=True))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: content.numel()] = content
        contents = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        self._finish(dist.all_gather(contents, padded, group=self._control, async_op=True))
        return [
            json.loads(bytes(each[: int(size)].tolist()).decode()) for each, size in zip(contents, sizes, strict=True)
        ]

    def spread(self, content: bytes, size: int) -> bytes:
        """So many bytes of rank 0, on every rank."""
        if self._control is None:
            return content
        buffer = torch.frombuffer(bytearray(content or bytes(size)), dtype=torch.uint8)
        self._finish(dist.broadcast(buffer, 0, group=self._control, async_op=True))
        return buffer.numpy().tobytes()

    def barrier(self) -> None:
        """Nobody goes on before all are here; waits as long as the others live."""
        self.gather(None)

    def told(self, link: Marks) -> Marks:
        """Marks that the others hear of too: for work that makes them wait, on other nodes as well."""
        store = self._store
        return link if store is None else Told(link, lambda: store.add(PULSE, 1))

    def _finish(self, work: Work | None) -> None:
        assert work is not None
        self._wait(self._store, lambda nap: _is_done(work, nap))
        work.wait()  # raises what went wrong

    def _wait(self, store: Store | None, done: Callable[[float], bool]) -> None:
        """Until `done(seconds to wait at most)`. This rank's section is then `communication`, if it has begun to train;
        and it shows progress as long as those it waits for do.
        """
        section = getattr(self.link, "section", "start")
        waiting = section if section in ("start", "prepare") else "communication"
        heard, looked = None, time.monotonic()
        self.link.enter(waiting)
        while not done(SLICE_SECONDS):
            if store is not None and time.monotonic() - looked > SLICE_SECONDS:
                looked, pulse = time.monotonic(), store.add(PULSE, 0)
                if heard is not None and pulse != heard:
                    self.link.enter(waiting)
                heard = pulse
        self.link.enter(section)

    def sum_(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Replace the tensor by its SUM over ranks, where it is; async_op: once the returned work is done."""
        return dist.all_reduce(tensor, async_op=async_op) if self.world > 1 else None

    def deal(self, out: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Give each rank its share of a flat tensor; `out`: this rank's share of everyone's, in the order of ranks."""
        return dist.all_to_all_single(out, tensor, async_op=async_op)

    def collect(self, out: torch.Tensor, share: torch.Tensor, async_op: bool = False) -> Work | None:
        """Every rank's share, in the order of ranks."""
        known: Any = dist
        gather = known.all_gather_single if hasattr(known, "all_gather_single") else known.all_gather_into_tensor
        return gather(out, share, async_op=async_op)  # the second name before torch 2.13

    def control_sum(self, values: list[int]) -> Sum:
        """Begin to sum whole numbers, beside whatever the devices do."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._control is None:
            return Sum(tensor, None)
        return Sum(tensor, dist.all_reduce(tensor, group=self._control, async_op=True))

    def beside(self) -> Group:
        """The same ranks for another thread, which no exchange of this one holds up. All ranks must call it."""
        if self._control is None or self._store is None:
            return Group(self.rank, self.world)
        self._sides += 1
        control = dist.new_group(backend="gloo", timeout=EVER)
        assert isinstance(control, dist.ProcessGroup)
        own: Any = self._store  # which serves one caller at a time: the other thread has a connection of its own
        store = PrefixStore(f"beside/{self._sides}", own.clone())
        return Group(self.rank, self.world, store=store, control=control)

    def close(self) -> None:
        """Leave, whether the others still live or not."""
        if self._control is None:
            return
        self._control = None
        left = threading.Lock()
        left.acquire()
        with contextlib.suppress(RuntimeError):  # no thread to be had: the exchange ends with this process
            # not by threading: out of memory its new thread dies before it has begun, which `start` waits for
            _thread.start_new_thread(_leave, (left,))
            left.acquire(timeout=CLOSE_SECONDS)  # NCCL may wait for a dead peer for ever


def _leave(left: threading.Lock) -> None:
    try:
        dist.destroy_process_group()
    except Exception as error:
        logger.debug("Leaving the process group: %s", error)
    finally:
        left.release()


def join(env: Env, device: torch.device, *, timeout_seconds: float, join_seconds: float = JOIN_SECONDS) -> Group:
    """Meet the other ranks. Waits for them as long as they keep coming, then says who is missing."""
    if env.world == 1:
        return Group()
    address, port = environment.rendezvous(env)
    _use_interface_towards(address, port)
    agreed = _port_file(env)
    if agreed:
        port = _read_port(agreed, join_seconds) if env.rank else 0
    store = _open_store(env, address, port, join_seconds)
    _meet(store, env, f"{address}:{port}" if port else address, join_seconds)
    timeout = timedelta(seconds=timeout_seconds + MARGIN_SECONDS)
    on_cuda = environment.get("LOCKSTEP_CUDA_BACKEND", "nccl")  # gloo: ranks that share one GPU, which NCCL refuses
    backend = f"cpu:gloo,cuda:{on_cuda}" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=EVER)
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
        if port == 0 and (agreed := _port_file(env)):
            rundir.write_bytes(agreed, str(store.port).encode())
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_listens else "0"
        return PrefixStore(f"attempt/{attempt}", store)
    except (RuntimeError, ValueError) as error:
        if listens and ("EADDRINUSE" in str(error) or "already in use" in str(error)):
            raise ConfigError(
                f"port {port} is taken{environment.holder(port)}",
                where=place,
                hint="another --master-port, or none: a free one",
            ) from error
        says = "cannot listen" if listens else f"cannot be reached within {join_seconds:g} s"
        raise LockstepError(
            f"{says}: {str(error).splitlines()[0][:200]}",
            where=place,
            hint="--master-addr and --master-port must name the first node, and no firewall stand between",
        ) from error


def _port_file(env: Env) -> Path | None:
    """Where rank 0 tells its port, if our launcher leaves the choice to it: one found earlier may be taken by then."""
    work, free = environment.get("LOCKSTEP_WORK"), environment.get("LOCKSTEP_PORT_FREE") == "1"
    agent_listens = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Path(work) / PORT_FILE if work and free and env.nodes == 1 and not agent_listens else None


def _read_port(path: Path, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise LockstepError(f"rank 0 did not begin to listen within {seconds:g} s", where=str(path))
        time.sleep(POLL_SECONDS)
    return int(path.read_text(encoding="utf-8"))


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


def _has(store: Store | None, key: str, seconds: float) -> bool:
    assert store is not None
    with contextlib.suppress(dist.DistStoreError):  # not yet; a store that is gone is another error
        store.wait([key], timedelta(seconds=seconds))
        return True
    return False


def _is_done(work: Work, seconds: float) -> bool:
    """In short naps, in between which signals are heard."""
    deadline, nap = time.monotonic() + seconds, 1e-4
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, POLL_SECONDS)
    return True


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
        if isinstance(seen, RuntimeError):
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
