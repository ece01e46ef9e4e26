"""Who started this process and where it stands: every launcher's variables, and those that contradict each other."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, ExitCode
from lockstep.runtime import env
from lockstep.runtime.env import Env

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
ACCELERATE = TORCHRUN | {"ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_MIXED_PRECISION": "no"}
BATCH = {  # what a batch script's own shell sees in SLURM 22.05
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2", "SLURM_TASK_PID": "30237", "SLURM_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
STEP = BATCH | {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "n[1-3]",
}  # fmt: skip
ONE_EACH = BATCH | {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Env(5, 8, 1, 4, 1, 2, "GPU1", "torchrun")),
        (ACCELERATE, Env(5, 8, 1, 4, 1, 2, "GPU1", "accelerate")),
        (TORCHRUN | {"LOCKSTEP_WORK": "/tmp/w", "GPU_RANK": "6"}, Env(5, 8, 1, 4, 1, 2, "GPU6", "lockstep")),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "2,3,6,7"}, Env(5, 8, 1, 4, 1, 2, "GPU3", "torchrun")),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "07"}, Env(5, 8, 1, 4, 1, 2, "GPU7", "torchrun")),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "GPU-8f2a,GPU-91bc"}, Env(5, 8, 1, 4, 1, 2, "GPU1", "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Env(launcher="torchrun")),
        ({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}, Env(2, 3, 0, 1, 2, 3, "GPU0", "torchrun")),
        ({"ACCELERATE_DYNAMO_BACKEND": "NO"}, Env(launcher="accelerate")),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "a"}, Env()),
        (BATCH, Env()),
        (BATCH | {"SLURM_STEP_ID": "4294967290"}, Env()),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, Env()),
        (BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Env()),
        (STEP, Env(3, 5, 1, 2, 1, 3, "GPU1", "slurm")),
        (STEP | {"SLURM_STEP_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0"}, Env(3, 5, 1, 2, 1, 3, "GPU5", "slurm")),
        (STEP | {"WORLD_SIZE": "5"}, Env(3, 5, 1, 2, 1, 3, "GPU1", "slurm")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n1"}, Env(1, 2, 1, 2, 0, 1, "GPU1", "slurm")),
    ],
)
def test_the_place_of_a_process(variables: dict[str, str], place: Env) -> None:
    assert env.detect(variables) == place


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"RANK": "8"}, "RANK=8"),
        ({"RANK": "abc"}, "RANK is 'abc'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE is 'eight'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK=2"),
        ({"GROUP_RANK": "1.5"}, "GROUP_RANK is '1.5'"),
    ],
)
def test_contradictions_are_named(changes: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        env.detect(TORCHRUN | changes)
    assert name in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (STEP | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5"),
        (STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        (STEP | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_half_a_place_is_refused(variables: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        env.detect(variables)


@pytest.mark.parametrize(
    ("variables", "place"),
    [(ONE_EACH, (1, 2)), (STEP, None), (BATCH, None), ({}, None), (ONE_EACH | {"RANK": "1"}, None)],
)
def test_room_for_one_launcher_per_node(variables: dict[str, str], place: tuple[int, int] | None) -> None:
    assert env.node_place(variables) == place


def test_the_device_of_a_foreign_worker() -> None:
    place = Env(rank=5, world=8, local_rank=1, local_world=4)
    assert [env.device_index(place, visible) for visible in (0, 1, 2, 8)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="local rank 3 has no GPU: 2 are visible"):
        env.device_index(Env(local_rank=3, local_world=4, world=4), 2)


def fake_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "scontrol"
    program.write_text(
        '#!/bin/sh\n[ "$2" = hostnames ] && echo n1 && echo n2 || echo "  NodeAddr=10.1.2.3 NodeHostName=x"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_where_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.rendezvous(env.detect(TORCHRUN), TORCHRUN) == ("10.0.0.1", 29500)
    fake_scontrol(tmp_path, monkeypatch)
    address, port = env.rendezvous(env.detect(STEP), STEP)
    assert (address, port in env.PORTS) == ("10.1.2.3", True)
    assert env.rendezvous(env.detect(STEP), STEP) == (address, port), "every task finds the same place"
    other = STEP | {"SLURM_STEP_ID": "1"}
    assert env.rendezvous(env.detect(other), other)[1] != port, "two steps of one job do not meet"
    assert env.rendezvous(env.detect(STEP), STEP | {"MASTER_ADDR": "h", "MASTER_PORT": "5"}) == ("h", 5)
    one_node = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n1"}
    assert env.rendezvous(env.detect(one_node), one_node)[0] == "127.0.0.1"


def test_a_place_that_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        env.rendezvous(env.detect(STEP), STEP)
    for port, name in ((None, "MASTER_PORT is not set"), ("x", "MASTER_PORT"), ("70000", "MASTER_PORT=70000")):
        variables = {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}
        with pytest.raises(ConfigError, match=name):
            env.rendezvous(env.detect(TORCHRUN), variables if port is None else variables | {"MASTER_PORT": port})


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            env.check_port(port)
        assert f"port {port} is taken by process {os.getpid()}" in str(caught.value)
        assert caught.value.exit_code == ExitCode.USAGE
    env.check_port(port)
    env.check_port(env.free_port())
    with pytest.raises(ConfigError, match="port 70000"):
        env.check_port(70_000)


def test_what_accelerate_asks_for() -> None:
    assert env.launcher_wishes(ACCELERATE) == {}
    wishes = env.launcher_wishes(ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert wishes == {"training.precision": "fp16"}
    asked = {"USE_CPU": "True", "USE_FSDP": "true", "DYNAMO_BACKEND": "INDUCTOR", "GRADIENT_ACCUMULATION_STEPS": "3"}
    wishes = env.launcher_wishes({f"ACCELERATE_{name}": value for name, value in asked.items()})
    settings = {"system.device": "cpu", "system.mode": "fsdp", "model.compile": "on", "training.grad_accum_nums": "3"}
    assert wishes == settings
    with pytest.raises(ConfigError, match="deepspeed"):
        env.launcher_wishes({"ACCELERATE_USE_DEEPSPEED": "true"})
