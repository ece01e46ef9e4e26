"""The command lines of foreign launchers, as text; what their summaries tell; going back to SLURM's queue."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lockstep.launch import accelerate, slurm, torchrun
from lockstep.launch.torchrun import Meeting
from lockstep.runtime.env import Env

MODULE = ("lockstep", "train", "llama", "tiny")
NODES = Meeting(node=1, nodes=2, address="10.0.0.1", port=29501)
ENVIRON = {"PATH": "/bin", "RANK": "7", "MASTER_PORT": "1", "NCCL_DEBUG": "INFO"}
SUMMARY = """Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {second} (pid: 4414)  (SIGKILL)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {first} (pid: 4413)
"""


def test_torchrun() -> None:
    (one,) = torchrun.plan(MODULE, [0, 2], cpu=False, environ=ENVIRON, work=Path("/w"), meeting=Meeting())
    start = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2")
    assert one.command == (*start, "--standalone", "-m", *MODULE)
    assert (one.slots, one.environ["LOCKSTEP_WORK"]) == ((0, 1), "/w")
    assert (one.environ["CUDA_VISIBLE_DEVICES"], one.environ["NCCL_DEBUG"]) == ("0,2", "INFO")
    assert not {"RANK", "MASTER_PORT"} & set(one.environ), "the agent says who each worker is"
    (port,) = torchrun.plan(MODULE, [0], cpu=True, environ={}, work=Path("/w"), meeting=Meeting(port=12356))
    assert "--master_port=12356" in port.command
    assert "CUDA_VISIBLE_DEVICES" not in port.environ
    (node,) = torchrun.plan(MODULE, [0, 1], cpu=True, environ={}, work=Path("/w"), meeting=NODES)
    assert node.command[4:8] == ("--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29501")


def test_accelerate() -> None:
    (one,) = accelerate.plan(MODULE, [0, 1], cpu=True, environ=ENVIRON, work=Path("/w"), meeting=Meeting())
    assert one.command[:3] == (sys.executable, "-m", "accelerate.commands.launch")
    assert {"--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"} <= set(one.command)
    assert one.command[-5:] == ("-m", *MODULE)
    (node,) = accelerate.plan(MODULE, [0, 1], cpu=True, environ={}, work=Path("/w"), meeting=NODES)
    wanted = {"--num_processes=4", "--num_machines=2", "--machine_rank=1", "--main_process_ip=10.0.0.1"}
    assert wanted | {"--main_process_port=29501"} <= set(node.command)
    (alone,) = accelerate.plan(MODULE, [0], cpu=True, environ={}, work=Path("/w"), meeting=Meeting())
    assert "--multi_gpu" not in alone.command


@pytest.mark.parametrize(
    ("first", "second", "code"), [(7, -15, 7), (1, -9, 137), (-11, 1, 139), (1, -15, 1), (-15, 1, 143), (1, 1, 1)]
)
def test_the_agents_summary(first: int, second: int, code: int) -> None:
    assert torchrun.exit_code_of(SUMMARY.format(first=first, second=second)) == code
    assert torchrun.exit_code_of("Root Cause (first observed failure): none") is None


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for SLURM's scontrol that writes down how it was called."""
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "scontrol $*" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setattr(slurm, "_requeued", set())
    return tmp_path / "calls"


def test_one_process_requeues_once(recorded: Path) -> None:
    assert slurm.requeue_once(Env(rank=1, world=2, node=1, nodes=2, launcher="slurm")) is None, "not node 0"
    assert slurm.requeue_once(Env(world=2, launcher="lockstep")) is None, "its launcher does"
    assert slurm.requeue_once(Env(), 143) is None, "scancel"
    assert not recorded.exists()
    assert [slurm.requeue_once(Env()) for _ in range(3)] == ["SLURM job 42 is back in the queue", None, None]
    assert recorded.read_text() == "scontrol requeue 42\n"


def test_without_slurm_nothing_is_requeued(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm.requeue_once(Env()) is None
    assert not recorded.exists()


def test_a_refused_requeue_is_said(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recorded.parent / "scontrol").write_text("#!/bin/sh\necho Job is not requeueable >&2\nexit 1\n")
    assert slurm.requeue_once(Env()) == "cannot requeue SLURM job 42: Job is not requeueable"
    monkeypatch.setattr(slurm, "_requeued", set())
    monkeypatch.setenv("PATH", "/nowhere")
    said = slurm.requeue_once(Env())
    assert said is not None
    assert said.startswith("cannot requeue SLURM job 42")
