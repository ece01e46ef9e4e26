"""How a run is started: in this process, by workers of our own, or by another launcher. Torch-free at import."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.arguments import without
from lockstep.errors import ConfigError, ExitCode, Stopped
from lockstep.guard import mention, say
from lockstep.runtime import devices, env
from lockstep.runtime.grid import check_canonical, grid

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.contracts import Sink
    from lockstep.launch.supervise import Outcome, Proc, Watch
    from lockstep.launch.torchrun import Meeting

logger = logging.getLogger(__name__)

ROLE = "LOCKSTEP_ROLE"  # of a child that runs our own command line: `prepare` the dataset and end
TOKEN_WORDS = ("--hf-token", "--data.hf-token", "hf-token", "data.hf-token")  # the last two as assignments
LOOPBACK = "127.0.0.1"
NEVER_SECONDS = 1e9


@dataclass(frozen=True)
class Start:
    """A command line that trains, and how its workers are to be started."""

    module: tuple[str, ...]  # what a worker runs, after `python -m`: lockstep, or a documented script, and its words
    how: str = "auto"
    nodes: int | None = None
    node: int | None = None
    address: str | None = None
    port: int | None = None
    restarts: int = 0  # how often a run may be started again after a crash or a hang
    single: bool = False  # a documented script of one process
    log_folder: Path | None = None  # of the documented launcher logs: gpu_<id>.log
    transcript: Path | None = None  # a file for all that is shown; of runs by workers of our own
    told: Callable[..., None] = field(default=mention)
    opening: Callable[[Loaded], list[str]] | None = None  # lines of the first worker before it trains
    listeners: Callable[[Loaded], list[Sink]] | None = None  # who else hears of its steps

    @staticmethod
    def of(module: Sequence[str], argv: Sequence[str], asked: Namespace) -> Start:
        """The start that a parsed command line asks for."""
        words = (*module, *without(argv, *TOKEN_WORDS))
        place = (asked.nodes, asked.node_rank, asked.master_addr, asked.master_port)
        return Start(words, asked.launch, *place, restarts=asked.restarts)


def is_child() -> bool:
    """Whether this process was started to do a part: by us or by another launcher."""
    return bool(env.get(ROLE)) or (env.detect().launcher != "none" and env.node_place() is None)


def start(loaded: Loaded, asked: Start) -> int:
    """Train; the exit code."""
    if env.get(ROLE) == "prepare":
        return _prepare_as_child(loaded)
    try:
        code = _start(loaded, asked)
    except Stopped as stopped:
        _requeue(asked, int(stopped.exit_code))
        raise
    _requeue(asked, code)
    return code


def _start(loaded: Loaded, asked: Start) -> int:
    from lockstep.runtime import signals

    if is_child():
        return _train_as_child(loaded, asked)
    with signals.listening():  # until training or the supervisor listens itself
        return _launch(loaded, asked)


def _launch(loaded: Loaded, asked: Start) -> int:
    cpu = on_cpu(loaded)
    gpus, node, nodes = checked(loaded, asked, cpu=cpu)
    if len(gpus) == 1 and nodes == 1 and asked.how == "auto" and not asked.restarts:
        if not cpu:
            env.show_only(gpus[0])
        return _train(loaded, asked)
    return _supervise(loaded, asked, gpus=gpus, on_cpu=cpu, place=(node, nodes))


def checked(loaded: Loaded, asked: Start, *, cpu: bool) -> tuple[list[int], int, int]:
    """(its GPUs that take part, which machine this is, how many there are); refuses what cannot be started."""
    gpus = _chosen(loaded, asked, on_cpu=cpu)
    node, nodes = _nodes(asked)
    if loaded.config.system.mode == "hsdp" and (len(gpus) > 1 or nodes > 1):
        grid("hsdp", world=len(gpus) * nodes, nodes=nodes)  # refuses what cannot be divided, before anything starts
    if (config := loaded.config).system.canonical:  # a run that goes on works its micro-batches out anew
        count = None if config.checkpoint.resume else config.training.grad_accum_nums
        check_canonical(world=len(gpus) * nodes, micro_batches=count)
    return gpus, node, nodes


def _train_as_child(loaded: Loaded, asked: Start) -> int:
    """A worker's part."""
    if asked.restarts and env.detect().rank == 0 and not env.launcher_pid():
        asked.told("[WARNING] --restarts is for our own launcher: torchrun has --max-restarts, SLURM its requeue")
    return _train(loaded, asked)


def _train(loaded: Loaded, asked: Start) -> int:
    """In this process."""
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    from lockstep.engine.train import start_log, train

    if env.detect().rank == 0 and asked.opening and (lines := asked.opening(loaded)):
        start_log(loaded, None)
        logger.info("%s", "\n".join(lines))
    return int(train(loaded, *([asked.listeners(loaded)] if asked.listeners else [])).exit_code)


def _prepare_as_child(loaded: Loaded) -> int:
    from lockstep.preparing import prepare_data
    from lockstep.report.logs import setup_logging

    setup_logging(level=loaded.config.debug.log_level)
    return prepare_data(loaded)


def on_cpu(loaded: Loaded) -> bool:
    """Whether the CPU does the work. GPUs that were asked for by name are never replaced by it."""
    device = loaded.config.system.device
    if device == "auto" and "system.gpus" in _given(loaded):
        return False
    return device == "cpu" or (device == "auto" and not devices.visible_gpus())


def _given(loaded: Loaded) -> set[str]:
    """The settings that the user has made, in a file or on the command line."""
    return {key for key, origin in loaded.origins.items() if origin.layer in ("file", "flag")}


def _chosen(loaded: Loaded, asked: Start, *, on_cpu: bool) -> list[int]:
    """The GPUs of this machine that take part; a script of one process takes the first unless it was told more."""
    system, given = loaded.config.system, _given(loaded)
    if "system.gpus" not in given and (asked.single or "system.device_id" in given):
        visible = [gpu.index for gpu in devices.visible_gpus()] if not on_cpu else [int(env.gpu_label() or 0)]
        if system.device_id < len(visible):
            return [visible[system.device_id]]
    if on_cpu and "system.gpus" not in given:
        return [int(env.gpu_label() or 0)]  # one worker; it may have been given a label
    return devices.choose(system.gpus, cpu=on_cpu, repeats=system.mode == "replicas")


def _nodes(asked: Start) -> tuple[int, int]:
    """(which machine this is, how many there are): as asked, else as SLURM says, else the only one."""
    found = env.node_place()
    node, nodes = asked.node, asked.nodes
    if node and nodes is None and not found:
        raise ConfigError(f"{node}, but of how many machines?", where="--node-rank", hint="--nodes N")
    if found and nodes is None:
        return found
    if (nodes or 1) == 1:
        return 0, 1
    assert nodes is not None
    if node is None:
        raise ConfigError("which of the machines is this?", where="--node-rank", hint=f"0 to {nodes - 1}")
    if node >= nodes:
        raise ConfigError(f"{node} of {nodes} machines", where="--node-rank", hint=f"0 to {nodes - 1}")
    if not asked.address and not env.get("MASTER_ADDR"):
        raise ConfigError("where is the first machine?", where="--master-addr", hint="--master-addr HOST")
    return node, nodes


def _supervise(loaded: Loaded, asked: Start, *, gpus: Sequence[int], on_cpu: bool, place: tuple[int, int]) -> int:
    from lockstep.config.load import as_asked
    from lockstep.engine import settle
    from lockstep.launch.restarting import keep_running
    from lockstep.launch.supervise import Watch

    decided = settle.decide(loaded.config, as_asked(loaded))
    loaded = settle.settled(loaded, decided)
    config, (node, nodes) = loaded.config, place
    watch = Watch(
        prefix=config.report.log_prefix,
        show="all" if config.report.log_all_ranks else "first",
        log_folder=asked.log_folder,
        transcript=asked.transcript,
        hang_seconds=config.system.hang_seconds,
        slow_factor=config.system.slow_factor,
        node=node,
        nodes=nodes,
    )
    found = [] if on_cpu else [f"Detected {len(devices.visible_gpus())} GPU(s)", *devices.busy_notices(gpus)]
    for notice in (*loaded.notices, *settle.lines(decided), *found):
        asked.told(notice)

    def attempt(variables: Mapping[str, str]) -> Outcome:
        return _attempt(loaded, asked, watch, gpus, on_cpu=on_cpu, variables=variables)

    return keep_running(attempt, most=asked.restarts, node=node, say=asked.told)


def _attempt(
    loaded: Loaded, asked: Start, watch: Watch, gpus: Sequence[int], *, on_cpu: bool, variables: Mapping[str, str]
) -> Outcome:
    """One round: prepare, start the workers, and watch them to their end."""
    from lockstep.launch.supervise import supervise
    from lockstep.launch.torchrun import Meeting
    from lockstep.runtime import signals

    nodes = watch.nodes
    address, port = _rendezvous(asked, node=watch.node, nodes=nodes)
    if prepared := _prepare_first(loaded, asked):
        if prepared.exit_code != ExitCode.DONE:
            return prepared
        if prepared.stop:  # it came when all was done there, and means the training that would begin now
            raise signals.stopped_by(prepared.stop)
    own = asked.how == "torchrun" and nodes == 1 and _port(asked) is None  # torchrun then finds a port itself
    meeting = Meeting(watch.node, nodes, address, 0 if own else port)
    with _work_folder() as work:
        free = {"LOCKSTEP_PORT_FREE": "1" if nodes == 1 and _port(asked) is None else ""}  # rank 0 takes its own
        environ = {**_environment(loaded, on_cpu=on_cpu), **free, **variables}
        procs = _plan(asked, gpus, meeting, on_cpu=on_cpu, environ=environ, work=work)
        folder = asked.log_folder
        if folder and folder.is_dir() and not any(folder.iterdir()):  # what is refused leaves none; once
            asked.told(f"Log directory: {folder}")
        outcome = supervise(procs, watch, work, asked.told)
    if 0 < len(outcome.slow) < len(gpus):  # all of them in turn is a busy machine, not a slow worker
        asked.told(f"[WARNING] slower than the other workers in this run: {', '.join(outcome.slow)}")
    return outcome


def _rendezvous(asked: Start, *, node: int, nodes: int) -> tuple[str, int]:
    """Where the workers meet. A port that was given is used or refused, else a free one is taken."""
    given = _port(asked)
    address = asked.address or env.get("MASTER_ADDR")
    if asked.address or (address and nodes > 1):
        env.check_host(address)
    if nodes > 1:
        if not address:
            address, port = env.rendezvous(env.detect())
            return address, given or port
        if given is None:
            raise ConfigError("many machines need one port they all know", where="--master-port", hint="29500")
        if node == 0:
            env.check_port(given)
        return address, given
    if address and not env.is_here(address):
        if asked.address:
            what = f"{address} is not an address of this machine, and no other takes part"
            raise ConfigError(what, where="--master-addr", hint="--nodes N --node-rank R for several machines")
        asked.told(f"[WARNING] MASTER_ADDR={address} is not this machine, and no other takes part: {LOOPBACK} is used")
        address = LOOPBACK
    if given is None:
        return address or LOOPBACK, env.free_port(LOOPBACK)
    env.check_port(given)
    return address or LOOPBACK, given


def _port(asked: Start) -> int | None:
    """The port that was given, on the command line or in the environment."""
    return asked.port or env.given_port()


def _environment(loaded: Loaded, *, on_cpu: bool = True) -> dict[str, str]:
    """Of every worker. With NCCL_DEBUG and a log folder, NCCL writes there, a file per worker."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # we say ourselves who is missing
    from lockstep.engine import settle
    from lockstep.runtime import hub

    changes = {name: env.get(name) or value for name, value in quiet.items()} | settle.for_workers(loaded)
    if not on_cpu:
        changes[env.DEVICE] = "cuda"
    if token := loaded.config.data.hf_token:  # not on a command line, which every user of the machine can read
        changes["HF_TOKEN"] = hub.token_of(token) or ""
    folder = loaded.config.system.log_dir
    if folder and env.get("NCCL_DEBUG") and not env.get("NCCL_DEBUG_FILE"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        changes["NCCL_DEBUG_FILE"] = str(Path(folder).absolute() / "nccl.%h.%p.log")
    return env.child(**changes)


def _plan(
    asked: Start,
    gpus: Sequence[int],
    meeting: Meeting,
    *,
    on_cpu: bool,
    environ: Mapping[str, str],
    work: Path,
) -> list[Proc]:
    from lockstep.launch import accelerate, torchrun, workers

    makers = {"torchrun": torchrun.plan, "accelerate": accelerate.plan}
    make = makers.get(asked.how, workers.plan)
    return make(asked.module, gpus, cpu=on_cpu, environ=environ, work=work, meeting=meeting)


@contextlib.contextmanager
def _work_folder() -> Generator[Path]:
    """Where a launcher and its workers meet; the supervisor's own helper removes it should this process be killed."""
    work = Path(tempfile.mkdtemp(prefix="lockstep-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _prepare_first(loaded: Loaded, asked: Start) -> Outcome | None:
    """Prepare the dataset before any worker starts; None: it is in the cache already."""
    from lockstep.engine.prepare import is_prepared

    if is_prepared(loaded.config):
        return None
    from lockstep.launch.supervise import Proc, Watch, supervise

    asked.told("Preparing dataset...")
    command = (sys.executable, "-m", *asked.module)
    child = Proc(tag="", slots=(0,), command=command, environ={**_environment(loaded), ROLE: "prepare"})
    watch = Watch(show="all", hang_seconds=NEVER_SECONDS, transcript=asked.transcript)
    with _work_folder() as work:
        return supervise([child], watch, work, asked.told)


def _requeue(asked: Start, exit_code: int) -> None:
    """A job that was asked to make room goes back to the queue; the first machine's launcher says so for all."""
    if exit_code != ExitCode.PREEMPTED or asked.node:
        return
    from lockstep.launch.slurm import requeue_once

    if said := requeue_once(env.detect(), exit_code):
        say(said)
