"""The plan of this node's workers: the same command line, in environments that say who each one is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.launch.children import Proc
from lockstep.launch.torchrun import Meeting

__all__ = ["Meeting", "plan"]

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def plan(
    module: Sequence[str], gpus: Sequence[int], *, cpu: bool, environ: Mapping[str, str], work: Path, meeting: Meeting
) -> list[Proc]:
    """One process per GPU, each seeing its own only; on the CPU `gpus` are labels. module: what follows `python -m`."""
    count = len(gpus)
    shared = dict(environ) | {
        "WORLD_SIZE": str(count * meeting.nodes),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(meeting.node),
        "GROUP_WORLD_SIZE": str(meeting.nodes),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "LOCKSTEP_WORK": str(work),
        "LOCKSTEP_LABELLED": "1",  # the launcher puts the label before every line
        "PYTHONUNBUFFERED": "1",  # a line that was printed is seen, whatever happens next
    }
    if cpu and count * meeting.nodes > 1:  # one alone computes with the threads it would have without us
        shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    else:
        shared["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbers as nvidia-smi has them
    for name in DEVICE_VARIABLES:
        shared.pop(name, None)
    procs: list[Proc] = []
    shares = len(set(gpus)) < count
    for local_rank, gpu in enumerate(gpus):
        label = local_rank if shares else gpu  # workers that share a GPU are told apart by their own number
        own = {
            "RANK": str(meeting.node * count + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GPU_RANK": str(label),
            **({} if cpu else dict.fromkeys(DEVICE_VARIABLES, str(gpu))),
        }
        procs.append(Proc(f"GPU{label}", (local_rank,), (sys.executable, "-m", *module), shared | own))
    return procs
