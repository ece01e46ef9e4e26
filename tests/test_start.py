"""Who trains: this process, our workers, or another launcher; and with what. No worker is started here."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep import start as starting
from lockstep.config.load import Loaded, load
from lockstep.errors import ConfigError, ExitCode
from lockstep.launch import slurm
from lockstep.launch import supervise as supervising
from lockstep.launch.supervise import Outcome, Proc, Watch
from lockstep.runtime import env
from tests.conftest import Outcome as Said
from tests.fake_smi import gpu, plant

Cli = Callable[..., Said]
TINY = ("train", "llama", "tiny", "--device", "cpu")


@dataclass
class Seen:
    """What the supervisor was asked for."""

    procs: Sequence[Proc] = ()
    watch: Watch = field(default_factory=Watch)
    inline: list[Loaded] = field(default_factory=list)
    outcome: Outcome = field(default_factory=lambda: Outcome(0))

    @property
    def variables(self) -> list[dict[str, str]]:
        return [dict(proc.environ) for proc in self.procs]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Nothing is started: what would be is remembered. The dataset counts as prepared."""
    found = Seen()

    def supervise(procs: Sequence[Proc], watch: Watch, work: Path, say: Any) -> Outcome:
        assert work.is_dir()
        assert work.stat().st_mode & 0o777 == 0o700
        found.procs, found.watch = procs, watch
        say("supervised")
        return found.outcome

    def train(loaded: Loaded, _: starting.Start) -> int:
        found.inline.append(loaded)
        return 0

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "GPU_RANK", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(supervising, "supervise", supervise)
    monkeypatch.setattr(starting, "_train", train)
    monkeypatch.setattr("lockstep.engine.prepare.is_prepared", lambda _: True)
    return found


def test_one_worker_needs_no_launcher(lockstep: Cli, seen: Seen) -> None:
    assert lockstep(*TINY).code == 0
    assert lockstep(*TINY, "--gpus", "1").code == 0
    assert len(seen.inline) == 2
    assert not seen.procs
    assert lockstep(*TINY, "--launch", "workers").code == 0
    assert len(seen.procs) == 1


def test_settings_reach_the_workers(lockstep: Cli, seen: Seen) -> None:
    """system.gpus, system.mode, system.hang_seconds, system.slow_factor, report.log_all_ranks."""
    words = ("--gpus", "0,2", "--mode", "replicas", "system.hang_seconds=7", "system.slow_factor=1.5")
    assert lockstep(*TINY, *words).code == 0
    assert [proc.tag for proc in seen.procs] == ["GPU0", "GPU2"]
    assert seen.watch.hang_seconds == 7
    assert seen.watch.slow_factor == 1.5
    assert seen.watch.show == "first"
    for rank, variables in enumerate(seen.variables):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "2"
        assert "CUDA_VISIBLE_DEVICES" not in variables, "CPU workers"
    assert seen.procs[0].command[1:] == ("-m", "lockstep", *TINY, *words), "the same command line"
    assert lockstep(*TINY, *words, "--log-all-ranks", "--log-prefix", "colon").code == 0
    assert seen.watch.show == "all"
    assert seen.watch.prefix == "colon"


def test_every_gpu_by_default(lockstep: Cli, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "bin", monkeypatch, [gpu(index) for index in range(4)])
    assert lockstep("train", "llama", "tiny").code == 0
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in seen.variables] == ["0", "1", "2", "3"]
    assert [variables["HIP_VISIBLE_DEVICES"] for variables in seen.variables] == ["0", "1", "2", "3"]
    assert {variables["CUDA_DEVICE_ORDER"] for variables in seen.variables} == {"PCI_BUS_ID"}
    assert lockstep("train", "llama", "tiny", "--mode", "replicas", "--gpus", "1,1").code == 0
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in seen.variables] == ["1", "1"]
    assert [proc.tag for proc in seen.procs] == ["GPU0", "GPU1"], "told apart by their own numbers"
    assert lockstep("train", "llama", "tiny", "--gpus", "1,1").code == 2
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPU_RANK"):
        monkeypatch.setenv(name, "0")  # whatever is set meanwhile is taken back
        monkeypatch.delenv(name)
    assert lockstep("train", "llama", "tiny", "system.device_id=2").code == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert len(seen.inline) == 1


def test_gpus_that_are_not_there_are_refused(lockstep: Cli, seen: Seen) -> None:
    refused = lockstep("train", "llama", "tiny", "--gpus", "2")
    assert refused.code == 2
    assert "--device cpu --gpus 2" in refused.err
    assert not seen.procs


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "2"), "--node-rank"),
        (("--nodes", "2", "--node-rank", "2"), "--node-rank"),
        (("--nodes", "2", "--node-rank", "1"), "--master-addr"),
        (("--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"), "--master-port"),
        (("--gpus", "1", "--launch", "inline"), "--launch inline: was removed"),
        (("--launch=slurm", "--nodes", "2"), "lockstep script slurm FAMILY PRESET | sbatch"),
        (("--launch", "nonsense"), "--launch"),
        (("--gpus", "2", "--master-port", "99999"), "99999"),
        (("--gpus", "2", "--master-addr", "nosuchhost.invalid"), "nosuchhost.invalid"),
        (("--node-rank", "1"), "--node-rank"),
        (("--gpus", "3", "--mode", "hsdp"), "3 workers cannot be divided"),
    ],
)
def test_what_cannot_be(lockstep: Cli, seen: Seen, words: tuple[str, ...], says: str) -> None:
    refused = lockstep(*TINY, *words)
    assert refused.code == 2, refused.text
    assert says in refused.err
    assert not seen.procs


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "3", "--canonical"), ("--nodes", "2", "--node-rank", "5"), ("--gpus", "-1"),
        ("--launch", "slurm"), ("--gpus", "3", "--mode", "hsdp"), ("--device", "auto", "--gpus", "2"),
        ("--data-path", "/nonexistent.txt"), ("data.dataset_name=auto", "--data-path", "/no.txt"),
        ("--resume", "nosuch"), ("--resume", "nosuch.pt"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_run_would(
    lockstep: Cli, in_dir: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("lockstep.runtime.devices.visible_gpus", list)
    planned, run = (lockstep(*TINY, *words, *more) for more in (["--dry-run"], []))
    assert planned.code in (ExitCode.USAGE, ExitCode.NOT_FOUND)
    assert (planned.code, planned.out) == (run.code, "")
    assert planned.err == run.err


@pytest.mark.parametrize(
    ("words", "tokens", "shards"),
    [
        (("--gpus", "2"), "512 of 2 workers", 1),
        (("--gpus", "2", "--mode", "fsdp"), "512 of 2 workers", 2),
        (("--gpus", "4", "--mode", "hsdp"), "1,024 of 4 workers", 2),
        (("--gpus", "2", "--mode", "replicas"), "256", 1),
        (("--gpus", "2", "--nodes", "2", "--node-rank", "0", "--master-addr", "h"), "1,024 of 4 workers", 1),
        (("--gpus", "2", "--nodes", "2"), "1,024 of 4 workers", 1),
        (("--nodes", "2", "--gpus", "2", "--mode", "hsdp"), "1,024 of 4 workers", 2),
        (("--gpus", "2", "--data-path", "-"), "512 of 2 workers", 1),
    ],
)
def test_a_dry_run_counts_the_workers(
    lockstep: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tokens: str, shards: int
) -> None:
    """The memory is that of the banner, which knows the workers by the environment."""
    from lockstep.config.show import _size
    from lockstep.engine import present
    from lockstep.models import shapes

    planned = lockstep(*TINY, *words, "--dry-run")
    assert f"tokens per step   {tokens}\n" in planned.out, planned.text
    mode = words[words.index("--mode") + 1] if "--mode" in words else "ddp"
    config = load("llama", preset="tiny", flags=[("mode", mode), ("precision", "fp32")]).config
    shape = shapes.resolve(config.model, context_length=config.training.context_length)
    world, machines = 2 if "256" in tokens else int(tokens.split()[2]), 2 if "--nodes" in words else 1
    place = env.Env(world=world, local_world=world // machines, nodes=machines)
    monkeypatch.setattr(env, "detect", lambda: place)
    assert present.shards(mode, place) == shards
    memory = present.memory_estimate(config, shape, compiled=False, shards=shards)
    assert f"memory per GPU    {_size(memory.total)} estimated" in planned.out


def test_histories_that_are_still_to_be_collected_can_be_planned_for(lockstep: Cli, in_dir: Path) -> None:
    (in_dir / "empty").mkdir()
    for words in ((), ("--data-path", "empty"), ("--data-path", "none yet")):
        planned = lockstep("train", "ad", "tiny", "--device", "cpu", *words, "--dry-run")
        assert planned.code == 0, planned.text
        assert "memory per GPU" in planned.out


def test_gpus_that_are_elsewhere_can_be_planned_for(lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.devices.visible_gpus", list)
    planned = lockstep("train", "llama", "tiny", "--device", "cuda", "--gpus", "8", "--dry-run")
    assert "tokens per step   2,048 of 8 workers" in planned.out
    assert "(bf16, GPU)" in planned.out


def test_many_machines(lockstep: Cli, seen: Seen) -> None:
    place = ("--nodes", "3", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500")
    assert lockstep(*TINY, "--gpus", "2", *place).code == 0
    assert [variables["RANK"] for variables in seen.variables] == ["2", "3"]
    assert {(v["WORLD_SIZE"], v["MASTER_ADDR"], v["MASTER_PORT"]) for v in seen.variables} == {
        ("6", "10.0.0.1", "29500")
    }
    assert (seen.watch.node, seen.watch.nodes) == (1, 3)


def test_a_given_port_is_used_or_refused(lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        refused = lockstep(*TINY, "--gpus", "2", "--master_port", port)
        assert refused.code == 2
        assert f"port {port} is taken by process {os.getpid()}" in refused.err
    assert lockstep(*TINY, "--gpus", "2", "--master_port", port).code == 0
    assert seen.variables[0]["MASTER_PORT"] == port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    assert lockstep(*TINY, "--gpus", "2").code == 0
    assert seen.variables[0]["MASTER_ADDR"] == "127.0.0.2"
    assert seen.variables[0]["MASTER_PORT"] != port, "a free one"


def test_an_address_of_another_machine(lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left over from another job it is told and not used; asked for, it is refused. Neither is waited for."""
    refused = lockstep(*TINY, "--gpus", "2", "--master-addr", "192.0.2.1")
    assert refused.code == 2
    assert "192.0.2.1 is not an address of this machine" in refused.err
    assert not seen.procs
    for name in ("192.0.2.1", "x" * 70):  # a name that no resolver is asked for
        monkeypatch.setenv("MASTER_ADDR", name)
        done = lockstep(*TINY, "--gpus", "2")
        assert done.code == 0, done.err
        assert f"MASTER_ADDR={name} is not this machine" in done.out
        assert seen.variables[-1]["MASTER_ADDR"] == "127.0.0.1"


def test_other_launchers_are_started_as_one_process(lockstep: Cli, seen: Seen) -> None:
    for how, word in (("torchrun", "torch.distributed.run"), ("accelerate", "accelerate.commands.launch")):
        assert lockstep(*TINY, "--gpus", "3", "--launch", how).code == 0
        (agent,) = seen.procs
        assert word in agent.command
        assert agent.slots == (0, 1, 2)


def test_nccl_writes_to_a_file_per_worker(
    lockstep: Cli, seen: Seen, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract item 121."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert lockstep(*TINY, "--gpus", "2").code == 0
    assert {v["NCCL_DEBUG"] for v in seen.variables} == {"INFO"}
    assert "NCCL_DEBUG_FILE" not in seen.variables[0]
    assert lockstep(*TINY, "--gpus", "2", "--log-dir", "logs").code == 0
    assert seen.variables[0]["NCCL_DEBUG_FILE"] == str(in_dir / "logs" / "nccl.%h.%p.log")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "mine")
    assert lockstep(*TINY, "--gpus", "2", "--log-dir", "logs").code == 0
    assert seen.variables[0]["NCCL_DEBUG_FILE"] == "mine"


def test_a_worker_trains_and_launches_nobody(lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert lockstep(*TINY, "--gpus", "2").code == 0
    assert len(seen.inline) == 1
    assert not seen.procs
    assert " of 2 workers" in lockstep(*TINY, "--dry-run").out, "those that there are"


@pytest.mark.parametrize(("code", "node", "times"), [(75, 0, 1), (75, 1, 0), (143, 0, 0), (0, 0, 0)])
def test_a_preempted_job_is_requeued_by_the_first_node(
    code: int, node: int, times: int, lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(slurm, "requeue_once", lambda _env, exit_code: asked.append(exit_code) or None)
    seen.outcome = Outcome(code)
    place = ("--nodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", "0")
    port = ("--master-port", str(starting.env.free_port()))
    assert lockstep(*TINY, *place[:-2], *port).code == code
    assert [each for each in asked if each == ExitCode.PREEMPTED] == [75] * times


def test_a_signal_before_the_workers_start_ends_the_launcher(
    lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr(starting, "_prepare_first", prepare)
    assert lockstep(*TINY, "--gpus", "2").code == ExitCode.TERMINATED
    assert not seen.procs


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_preemption_before_training_is_requeued_too(
    workers: str, lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing a dataset may take hours: a job that has to go meanwhile comes back as well."""

    def signalled(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("the signal was not heard")

    asked: list[int] = []
    monkeypatch.setattr(slurm, "requeue_once", lambda _env, exit_code: asked.append(exit_code) or None)
    monkeypatch.setattr(starting, "_prepare_first" if workers == "2" else "_train", signalled)
    assert lockstep(*TINY, "--gpus", workers).code == ExitCode.PREEMPTED
    assert asked == [75]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (0, 0)])
def test_a_signal_that_comes_when_all_is_prepared_is_heard(
    number: int, code: int, lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper that prepares is done with its work and ends well; who asks then means the run."""
    monkeypatch.setattr(starting, "_prepare_first", lambda *_: Outcome(0, stop=number))
    assert lockstep(*TINY, "--gpus", "2").code == code
    assert bool(seen.procs) == (not number)


def test_a_token_is_on_no_command_line(lockstep: Cli, seen: Seen) -> None:
    assert lockstep(*TINY, "--gpus", "2", "--hf-token", "hf_canary_value").code == 0
    for proc in seen.procs:
        assert "hf_canary_value" not in " ".join(proc.command)
        assert proc.environ["HF_TOKEN"] == "hf_canary_value"
    refused = lockstep("script", "slurm", "llama", "tiny", "--hf-token", "hf_canary_value")
    assert refused.code == 2
    assert "hf_canary_value" not in refused.text


def test_a_port_in_the_environment_that_makes_no_sense_is_refused(
    lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "junk")
    refused = lockstep(*TINY, "--gpus", "2")
    assert refused.code == 2
    assert "MASTER_PORT" in refused.err
    assert not seen.procs


def test_numbers_that_do_not_fit_together_are_told_by_their_variable(
    lockstep: Cli, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = lockstep(*TINY)
    assert refused.code == 2
    assert "RANK=5" in refused.err
    with pytest.raises(ConfigError):
        starting.is_child()
