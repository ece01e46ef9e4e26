"""The one door to the environment: who started me and where do I stand, which device label, which secrets."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
import zlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import ConfigError

SECRET_NAME = re.compile(r"(_TOKEN|_KEY|_SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_ID)?$|^AWS_|_PROXY$", re.IGNORECASE)
SAVED_NAMES = (  # allow-list: what env.json may hold
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG", "DATASET_CACHE_DIR", "HF_HOME", "HF_HUB_OFFLINE", "LANG", "TERM", "NO_COLOR",
    "SLURM_JOB_ID",
)  # fmt: skip
SHORTEST_SECRET = 6  # hiding every `x` would hide nothing but the text
LARGEST_STEP = 0xFFFF_FFF0  # SLURM numbers the batch script, the interactive shell and their like from here on
PORTS = range(20_000, 60_000)  # where SLURM jobs meet
REFUSED_PLUGINS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
DEVICE = "LOCKSTEP_DEVICE"  # of a process that was given a GPU: it uses it or says why not
UNTIL = "LOCKSTEP_UNTIL"  # STEPS:RUN, of a worker that makes steps again for a proof: after so many it is done
UNSAVED = "LOCKSTEP_UNSAVED"  # RUN, of a worker that only measures: it keeps no checkpoint
_hidden: set[str] = set()


@dataclass(frozen=True)
class Env:
    """The place of this process in the run. tag is "GPU3", or "" where no label is known."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0
    nodes: int = 1
    tag: str = ""
    launcher: str = "none"  # none | lockstep | torchrun | accelerate | slurm


def detect(environ: Mapping[str, str] | None = None) -> Env:
    """Ask the environment: our launcher, torchrun or accelerate by RANK, an srun step by SLURM_*, else one process."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ:
        return _by_rank(environ)
    if is_slurm_task(environ) and _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1) > 1:
        return _by_slurm(environ)
    if environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("WORLD_SIZE is set, and RANK is not", where="environment", hint="unset WORLD_SIZE")
    label = gpu_label(environ)
    launcher = "accelerate" if "ACCELERATE_DYNAMO_BACKEND" in environ else "none"
    return Env(tag=f"GPU{label}" if label else "", launcher=launcher)


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this: a batch script's own shell has SLURM_PROCID too, and no step of its own."""
    if "SLURM_PROCID" not in environ:
        return False
    if "SLURM_STEP_ID" not in environ:
        place = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")
        return "SLURM_TASK_PID" not in environ and any(name in environ for name in place)
    return _number(environ, "SLURM_STEP_ID") < LARGEST_STEP


def node_place(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """(node, nodes) where srun started one task on each of several nodes: room for one launcher per node."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ or not is_slurm_task(environ):
        return None
    place = _by_slurm(environ)
    return (place.node, place.nodes) if place.world == place.nodes > 1 else None


def _by_rank(environ: Mapping[str, str]) -> Env:
    if "WORLD_SIZE" not in environ:
        raise ConfigError("RANK is set, and WORLD_SIZE is not", where="environment", hint="unset RANK")
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    # a pod per rank (Kubernetes) has no LOCAL_RANK: it is alone on its node
    local_world = _number(environ, "LOCAL_WORLD_SIZE", least=1, default=world if "LOCAL_RANK" in environ else 1)
    local_rank = _number(environ, "LOCAL_RANK", default=0)
    nodes = _number(environ, "GROUP_WORLD_SIZE", least=1, default=-(-world // local_world))
    node = _number(environ, "GROUP_RANK", default=rank // local_world)
    _below("RANK", rank, "WORLD_SIZE", world)
    _below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world)
    _below("GROUP_RANK", node, "the number of nodes", nodes)
    if local_world > world:
        what = f"LOCAL_WORLD_SIZE={local_world} is above WORLD_SIZE={world}"
        raise ConfigError(what, where="environment", hint="unset LOCAL_WORLD_SIZE, where it was left over")
    if world > 1 and "MASTER_ADDR" not in environ:
        raise ConfigError("RANK is set, and MASTER_ADDR is not", where="environment", hint="start with torchrun")
    launcher = "torchrun"
    if "LOCKSTEP_WORK" in environ:
        launcher = "lockstep"
    elif "ACCELERATE_DYNAMO_BACKEND" in environ:
        launcher = "accelerate"
    place = Env(rank, world, local_rank, local_world, node=node, nodes=nodes, launcher=launcher)
    return _labelled(place, environ, ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def _by_slurm(environ: Mapping[str, str]) -> Env:
    rank = _number(environ, "SLURM_PROCID")
    world = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", least=1)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1, default=1)
    node, local_rank = _number(environ, "SLURM_NODEID", default=0), _number(environ, "SLURM_LOCALID", default=rank)
    _below("SLURM_PROCID", rank, "SLURM_NTASKS", world)
    _below("SLURM_NODEID", node, "SLURM_NNODES", nodes)
    _below("SLURM_LOCALID", local_rank, "SLURM_NTASKS", world)
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    local_world = tasks[node] if node < len(tasks) else -(-world // nodes)
    place = Env(rank, world, local_rank, local_world, node=node, nodes=nodes, launcher="slurm")
    return _labelled(place, environ, ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def _labelled(place: Env, environ: Mapping[str, str], lists: tuple[str, ...]) -> Env:
    """The label of one worker of several: GPU_RANK, else its own id of the visible ones, else its local rank."""
    if place.world == 1:
        label = gpu_label(environ)
    else:
        label = environ.get("GPU_RANK", "").strip()
        for name in lists:
            ids = environ.get(name, "").split(",")
            if not label.isdigit() and (len(ids) == 1 or place.local_rank < len(ids)):
                label = ids[place.local_rank if len(ids) > 1 else 0].strip()
        label = str(int(label)) if label.isdigit() else str(place.local_rank)
    return replace(place, tag=f"GPU{label}" if label else "")


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's "2(x3),1" is [2, 2, 2, 1]."""
    found: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(tasks)] * int(times or 1)
    return found


def _number(environ: Mapping[str, str], *names: str, least: int = 0, default: int | None = None) -> int:
    """The first of these variables that is set, as a whole number."""
    name = next((name for name in names if name in environ), names[0])
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\s*\d{1,10}\s*", text) or int(text) < least:
        got = "is not set" if text is None else f"is {text!r}"
        hint = (
            "start with torchrun, srun or lockstep train" if text is None else f"unset {name}, where it was left over"
        )
        raise ConfigError(f"{name} {got}; it must be a whole number from {least}", where="environment", hint=hint)
    return int(text)


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        what = f"{name}={value} must be below {limit_name}={limit}"
        raise ConfigError(what, where="environment", hint=f"unset {name}, where it was left over")


def device_index(env: Env, visible_count: int) -> int:
    """Which CUDA device a worker of a foreign launcher uses: its own where it sees one, else by its local rank."""
    if visible_count <= 1:
        return 0
    if env.local_rank >= visible_count:
        raise ConfigError(
            f"local rank {env.local_rank} has no GPU: {visible_count} are visible", hint="start fewer workers per node"
        )
    return env.local_rank


def rendezvous(env: Env, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Address and port of rank 0's store: as given, else SLURM's first node and a port made from job and step."""
    environ = os.environ if environ is None else environ
    address = environ.get("MASTER_ADDR", "")
    if not address:
        address = _first_slurm_address(environ) if env.nodes > 1 else "127.0.0.1"
    if "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT", least=1)
        _below("MASTER_PORT", port, "the number of ports", 65_536)
        return address, port
    if "SLURM_PROCID" in environ:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        key = " ".join(environ.get(name, "0") for name in names)
        return address, PORTS[zlib.crc32(key.encode()) % len(PORTS)]
    raise ConfigError("MASTER_PORT is not set", where="environment", hint="start with torchrun, srun or lockstep train")


def _first_slurm_address(environ: Mapping[str, str]) -> str:
    """The address of the step's first node, as SLURM itself reaches it."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        first = _ask("scontrol", "show", "hostnames", hosts).split()[0]
        found = re.search(r"NodeAddr=(\S+)", _ask("scontrol", "show", "node", first))
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        reason = f"cannot ask SLURM for the address of the first of {hosts or '(no node list)'}: {error}"
        raise ConfigError(reason, hint="export MASTER_ADDR=<address of the first node>") from error
    return found[1] if found else first


def _ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def given_port() -> int | None:
    """MASTER_PORT, where it is set; one that makes no sense is refused."""
    if not os.environ.get("MASTER_PORT"):
        return None
    port = _number(os.environ, "MASTER_PORT", least=1)
    _below("MASTER_PORT", port, "the number of ports", 65_536)
    return port


def check_host(name: str) -> None:
    """Refuse a host that nobody knows."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"no such host: {name[:200]!r}", where="--master-addr", hint="its address in numbers"
        ) from error


def is_here(name: str) -> bool:
    """Whether this is an address of this machine: one can listen there."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.bind(place)
    except (OSError, UnicodeError):
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]


def check_port(port: int, host: str = "") -> None:
    """Refuse a port that cannot be listened on, and name who holds it where /proc shows it."""
    if not 0 < port < 65_536:
        raise ConfigError(f"port {port} does not exist", hint="choose one from 1024 to 65535")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's remains do not count
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} cannot be used: {error.strerror}", hint="choose another port"
                ) from error
            raise ConfigError(
                f"port {port} is taken{holder(port)}", hint=f"another port ({free_port()} is free), or none"
            ) from error


def holder(port: int) -> str:
    """` by process N`, as far as the system shows who listens there."""
    import psutil  # only to explain a failure

    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port:
            return f" by process {connection.pid}" if connection.pid else ""
    return ""


def launcher_wishes(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings that `accelerate launch` (its flags, its default_config.yaml) asks for, by our names."""
    environ = os.environ if environ is None else environ
    for name in REFUSED_PLUGINS:
        if _is_true(environ.get(name)):
            plugin = name.removeprefix("ACCELERATE_USE_").lower()
            hint = "accelerate launch --multi_gpu, with --mode fsdp for a sharded model"
            raise ConfigError(f"accelerate asks for {plugin}, which lockstep does not use", where=name, hint=hint)
    wishes: dict[str, str] = {}
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()  # `no` is exported unasked: no wish
    if precision not in ("no", ""):
        wishes["training.precision"] = precision
    if _is_true(environ.get("ACCELERATE_USE_CPU")):
        wishes["system.device"] = "cpu"
    if _is_true(environ.get("ACCELERATE_USE_FSDP")):
        wishes["system.mode"] = "fsdp"
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() not in ("NO", ""):
        wishes["model.compile"] = "on"
    if steps := environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        wishes["training.grad_accum_nums"] = steps
    return wishes


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in ("1", "true", "yes", "y", "t", "on")


def gpu_label(environ: Mapping[str, str] | None = None) -> str:
    """The GPU number that every line carries: GPU_RANK, else the first id of CUDA_/HIP_VISIBLE_DEVICES, else ''."""
    environ = os.environ if environ is None else environ
    for name in ("GPU_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        first = environ.get(name, "").split(",")[0].strip()
        if first.isdigit():
            return str(int(first))
    return ""


def get(name: str, default: str = "") -> str:
    """One variable."""
    return os.environ.get(name, default)


def without(*names: str) -> dict[str, str]:
    """The environment of a child that must not see these variables."""
    return {name: value for name, value in os.environ.items() if name not in names}


def child(**changes: str) -> dict[str, str]:
    """The environment of a child: ours with these variables changed."""
    return {**os.environ, **changes}


def show_only(gpu: int) -> None:
    """From here on this process sees one GPU, numbered as nvidia-smi does; before CUDA is first asked."""
    os.environ.update(CUDA_VISIBLE_DEVICES=str(gpu), HIP_VISIBLE_DEVICES=str(gpu), CUDA_DEVICE_ORDER="PCI_BUS_ID")
    os.environ.setdefault("GPU_RANK", str(gpu))
    os.environ[DEVICE] = "cuda"


def launcher_pid() -> int:
    """The launcher of ours that started this worker; 0: none."""
    text = os.environ.get("LOCKSTEP_LAUNCHER_PID", "")
    return int(text) if text.isdigit() else 0


def last_step(run: Path) -> int | None:
    """After how many steps this run is done, whatever its settings say; None if no proof limits it."""
    steps, _, named = get(UNTIL).partition(":")
    return int(steps) if steps.isdecimal() and named == str(run) else None


def saves(run: Path) -> bool:
    """Whether a run keeps checkpoints: one that only measures does not."""
    return get(UNSAVED) != str(run)


def setdefault(name: str, value: str) -> None:
    """Set a variable for this process and its children unless the user has."""
    os.environ.setdefault(name, value)


@contextlib.contextmanager
def changed(name: str, value: str) -> Generator[None]:
    """Another value for a while. While other threads are about, only of a variable that is there already.

    The C library reads the environment unlocked: a new variable may move all of it, another value moves nothing.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def hide(value: str | None) -> None:
    """A secret that came another way (a flag, a file): from now on it is treated like those of the environment."""
    if value and len(value) >= SHORTEST_SECRET:
        _hidden.add(value)


def secrets() -> tuple[str, ...]:
    """Values that must never be written anywhere: tokens, keys, passwords, proxies that hold a password."""
    found = set(_hidden)
    for name, value in os.environ.items():
        if name.upper().endswith("_PROXY"):
            found.update(re.findall(r"://([^/@\s]+)@", value))
        elif SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET:
            found.add(value)
    return tuple(sorted(found, key=len, reverse=True))


def redact(text: str, extra: tuple[str, ...] = ()) -> str:
    """The text with every secret value replaced."""
    for value in (*secrets(), *extra):
        text = text.replace(value, "***")
    return text


def saved() -> dict[str, str]:
    """The part of the environment that may be kept with a run."""
    return {name: redact(os.environ[name]) for name in SAVED_NAMES if name in os.environ}
