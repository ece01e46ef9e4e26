"""The GPUs of this machine, asked without torch: NVML, then nvidia-smi, then none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LockstepError
from lockstep.runtime import env

QUERY = "index,uuid,name,memory.total,memory.free,utilization.gpu"
ASK_SECONDS = 30  # a driver that is waking up is slow, one that is broken never answers
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi numbers it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    utilisation: int  # percent; 0 where the card does not say


def visible_gpus() -> list[Gpu]:
    """The GPUs this process may use: all of them, or those of CUDA_VISIBLE_DEVICES in its order."""
    gpus = _ask_nvml()
    if gpus is None:
        gpus = _ask_nvidia_smi() if shutil.which("nvidia-smi") else []
    return _restrict(gpus, env.get("CUDA_VISIBLE_DEVICES", "all"))


def idlest_gpu() -> int:
    """The number of the GPU nvidia-smi calls least busy; ties go to the most free memory, then the lowest number."""
    if not shutil.which("nvidia-smi"):
        raise LockstepError(
            "cannot choose a GPU: nvidia-smi is not on PATH", hint="install the NVIDIA driver, or train_gpu.sh NUMBER"
        )
    gpus = _restrict(_ask_nvidia_smi(), env.get("CUDA_VISIBLE_DEVICES", "all"))
    if not gpus:
        raise LockstepError("cannot choose a GPU: nvidia-smi lists none that is visible", hint="run nvidia-smi")
    return min(gpus, key=lambda gpu: (gpu.utilisation, -gpu.free_bytes, gpu.index)).index


def _restrict(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """As CUDA reads the variable: numbers or (shortened) UUIDs, up to the first one that is not there."""
    if visible == "all":
        return list(gpus)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        named = [
            gpu for gpu in gpus if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen.append(named[0])
    return chosen


def _ask_nvml() -> list[Gpu] | None:
    """What the driver's own library says; None where there is no library or no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return [_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        utilisation = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:  # not supported under MIG and on some cards
        utilisation = 0
    return Gpu(
        index=index,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        utilisation=utilisation,
    )


def _ask_nvidia_smi() -> list[Gpu]:
    """What the command says; [] where it cannot reach a driver."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [
        Gpu(int(row[0]), row[1], row[2], _number(row[3]) * MIB, _number(row[4]) * MIB, _number(row[5]))
        for row in rows
        if len(row) == len(QUERY.split(",")) and row[0].isdigit()
    ]


def _number(cell: str) -> int:
    """A count, or 0 where nvidia-smi says [N/A]."""
    return int(float(cell)) if cell.replace(".", "", 1).isdigit() else 0
