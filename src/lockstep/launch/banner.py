"""The documented words of the launcher: what starts, with which device, and how each process ended."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.launch.children import Child, Proc

RULE = "=" * 60
SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_RANK")


def spaced(tag: str) -> str:
    """GPU3 as the documented lines have it: GPU 3."""
    return re.sub(r"(?<=\D)(?=\d)", " ", tag)


def opening(procs: Sequence[Proc]) -> Iterator[str]:
    yield from (RULE, f"Launching training on {workers(procs)}", RULE)


def workers(procs: Sequence[Proc]) -> str:
    """`4 GPUs`, or what stands for them."""
    word = "GPU" if any("CUDA_VISIBLE_DEVICES" in proc.environ for proc in procs) else "CPU worker"
    return f"{len(procs)} {word}{'s' if len(procs) != 1 else ''}"


def started(child: Child, log: str) -> Iterator[str]:
    """One process: what it is and where its lines go."""
    proc = child.proc
    environment = " ".join(f"{name}={proc.environ[name]}" for name in SHOWN_VARIABLES if name in proc.environ)
    yield f"[{spaced(proc.tag)}] Launching training process:"
    facts = {
        "CUDA Device": proc.environ.get("CUDA_VISIBLE_DEVICES", "none (CPU)"),
        "Environment": environment,
        "Command": shlex.join(proc.command),
        "Working dir": str(Path.cwd()),
        "Log file": log or "none",
        "Process ID": str(child.pid),
        "Status": "Started successfully",
    }
    for name, value in facts.items():
        yield f"  {name + ':':<13} {value}"


def all_started(procs: Sequence[Proc]) -> str:
    return f"{'All ' if len(procs) > 1 else ''}{workers(procs)} started. Monitoring training progress..."


def ended(
    children: Sequence[Child], failed: Child | None = None, record: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Who completed, and who failed."""
    for child in children:
        label = f"[{spaced(child.proc.tag)}]"
        if child is failed and record is not None:
            yield f"{label} Process FAILED"
            yield f"  {'PID:':<13} {child.pid}"
            yield f"  {'Exit code:':<13} {record['exit_code']}"
            yield f"  {'Error:':<13} {record['cause']}"
        elif child.code == 0:
            yield f"{label} Process completed successfully"
