"""The one door to the environment: who am I, which device label, which secrets, which switches."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

SECRET_NAME = re.compile(r"(_TOKEN|_KEY|_SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_ID)?$|^AWS_|_PROXY$", re.IGNORECASE)
SAVED_NAMES = (  # allow-list: what env.json may hold
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG", "DATASET_CACHE_DIR", "HF_HOME", "HF_HUB_OFFLINE", "LANG", "TERM", "NO_COLOR",
    "SLURM_JOB_ID",
)  # fmt: skip
SHORTEST_SECRET = 6  # hiding every `x` would hide nothing but the text
_hidden: set[str] = set()


@dataclass(frozen=True)
class Env:
    """The place of this process in the run. tag is "GPU3", or "" where no label is known."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: int = 0
    tag: str = ""


def detect(environ: Mapping[str, str] | None = None) -> Env:
    """Ask the environment once. A single process: GPU_RANK, else the first visible device, is the label."""
    label = gpu_label(environ)
    return Env(tag=f"GPU{label}" if label else "")


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


def setdefault(name: str, value: str) -> None:
    """Set a variable for this process and its children unless the user has."""
    os.environ.setdefault(name, value)


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
