"""torchrun started for the user: its command line under our supervisor, and its workers' exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ExitCode
from lockstep.launch.children import Proc

PLACES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GPU_RANK",
)


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a job find each other. port 0: any free one (one node only)."""

    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def plan(
    module: Sequence[str], gpus: Sequence[int], *, cpu: bool, environ: Mapping[str, str], work: Path, meeting: Meeting
) -> list[Proc]:
    """One agent that holds all local workers. module: what follows `python -m`, such as lockstep train llama."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={len(gpus)}"]
    if meeting.nodes == 1 and not meeting.port:
        command.append("--standalone")
    else:  # torch's static rendezvous: nodes keep the numbers they were given
        command += [f"--nnodes={meeting.nodes}", f"--node_rank={meeting.node}"]
        command += [f"--master_addr={meeting.address}", f"--master_port={meeting.port}"]
    return [agent((*command, "-m", *module), gpus, cpu=cpu, environ=environ, work=work)]


def agent(command: Sequence[str], gpus: Sequence[int], *, cpu: bool, environ: Mapping[str, str], work: Path) -> Proc:
    """A foreign launcher as one process of ours; by LOCKSTEP_WORK its workers attach to our supervisor."""
    variables = {name: value for name, value in environ.items() if name not in PLACES}
    variables |= {"LOCKSTEP_WORK": str(work), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not cpu:
        visible = ",".join(map(str, gpus))
        variables |= {"CUDA_VISIBLE_DEVICES": visible, "HIP_VISIBLE_DEVICES": visible}
    return Proc("", tuple(range(len(gpus))), tuple(command), variables, is_agent=True)


def exit_code_of(agent_output_tail: str) -> int | None:
    """The code of the worker that failed first, from the agent's closing summary; 128+n for signal n.

    The agent looks ten times a second and may take a consequence for the cause: a peer's loss is a plain 1, and the
    agent's own clearing up is a SIGTERM. Any other code comes first.
    """
    _, found, cause = agent_output_tail.rpartition("Root Cause (first observed failure):")
    pattern = r"exitcode\s*:\s*(-?\d+)\s*\(pid"
    codes = [*re.findall(pattern, cause if found else ""), *re.findall(pattern, agent_output_tail)]
    shell_codes = [128 - int(code) if int(code) < 0 else int(code) for code in codes]
    telling = [code for code in shell_codes if code not in (ExitCode.FAILED, ExitCode.TERMINATED)]
    return next(iter(telling or shell_codes), None)
