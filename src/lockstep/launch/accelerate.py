"""accelerate started for the user: its command line under our supervisor, with every question answered."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.launch.children import Proc
from lockstep.launch.torchrun import Meeting, agent


def plan(
    module: Sequence[str], gpus: Sequence[int], *, cpu: bool, environ: Mapping[str, str], work: Path, meeting: Meeting
) -> list[Proc]:
    """One agent that holds all local workers. module: what follows `python -m`, such as lockstep train llama."""
    world = len(gpus) * meeting.nodes
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={world}"]
    command += [f"--num_machines={meeting.nodes}", "--mixed_precision=no", "--dynamo_backend=no"]  # `no` is no wish
    if world > 1:  # on the CPU too: `--cpu` starts one process whatever number it is told
        command += ["--multi_gpu", "--gpu_ids=all", f"--main_process_port={meeting.port}"]
    if meeting.nodes > 1:
        command += [f"--machine_rank={meeting.node}", f"--main_process_ip={meeting.address}"]
    return [agent((*command, "-m", *module), gpus, cpu=cpu, environ=environ, work=work)]
