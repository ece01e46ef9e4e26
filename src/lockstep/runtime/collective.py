"""A trial of what workers do together: two child processes import torch and add up their numbers."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

TRIAL_SECONDS = 60.0
CHILD = """
import json, sys
from datetime import timedelta
rank, port, backend, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
import torch
import torch.distributed as dist
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0}
print(json.dumps(facts), flush=True)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=seconds))
numbers = torch.arange(10_000, dtype=torch.float64, device=device) * (rank + 1)
dist.all_reduce(numbers)
right = torch.equal(numbers, torch.arange(10_000, dtype=torch.float64, device=device) * 3)
print(json.dumps({"agreed": right}), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Trial:
    """What the children said."""

    backend: str
    torch: str = ""  # version; "" where it cannot be imported
    cuda: str = ""
    hip: str = ""
    devices: int = 0
    agreed: bool = False
    seconds: float = 0.0
    error: str = ""


def attempt(backend: str, *, timeout: float = TRIAL_SECONDS) -> Trial:
    """Let two processes add up numbers; children that take too long are ended."""
    port = _free_port()
    began = time.monotonic()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(rank), str(port), backend, str(timeout)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for rank in range(2)
    ]
    errors: list[str] = []
    said: list[dict[str, Any]] = []
    try:
        for child in children:
            try:
                out, err = child.communicate(timeout=max(0.1, began + timeout - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                out, _ = child.communicate()
                err = f"no result in {timeout:g} s"
            said.append(_words(out))
            errors += [_last_line(err)] if not said[-1].get("agreed") else []
    finally:
        for child in children:  # also when the user has had enough
            child.kill()
            child.wait()
    facts = said[0]
    return Trial(
        backend=backend,
        torch=str(facts.get("torch") or ""),
        cuda=str(facts.get("cuda") or ""),
        hip=str(facts.get("hip") or ""),
        devices=int(facts.get("devices") or 0),
        agreed=all(words.get("agreed") is True for words in said),
        seconds=time.monotonic() - began,
        error=errors[0] if errors else "",
    )


def _free_port() -> int:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return server.getsockname()[1]
    except OSError:  # the children will say why
        return 1


def _words(text: str) -> dict[str, Any]:
    """The JSON lines of a child, taken together."""
    words: dict[str, Any] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # a library may talk too
            words |= json.loads(line)
    return words


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "the sum is wrong, or a process ended without a word"
