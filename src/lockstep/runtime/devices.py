"""The GPUs of this machine, asked without loading torch here: NVML, then nvidia-smi, then (AMD) torch in a child."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.runtime.options import SystemOptions

QUERY = "index,uuid,name,memory.total,memory.free,utilization.gpu"
SHORT_QUERY = "index,utilization.gpu"  # the documented one: what every nvidia-smi answers
NO_GPU = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that mean the CPU; the last is SLURM's
ASK_SECONDS = 30  # a driver that is waking up is slow, one that is broken never answers
MIB = 1 << 20
AMD_DRIVER = Path("/dev/kfd")
LIST_BY_TORCH = """
import json, torch
cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps([[number, card.name, card.total_memory] for number, card in enumerate(cards)]))
"""


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
    """The GPUs this process may use: all of them, or those of CUDA_VISIBLE_DEVICES (AMD: or HIP_) in its order."""
    return _restrict(_all_gpus(), env.get("CUDA_VISIBLE_DEVICES", env.get("HIP_VISIBLE_DEVICES", "all")))


def check_asked(system: SystemOptions) -> None:
    """Refuse to train on the CPU where a GPU was asked for: by CUDA_VISIBLE_DEVICES or by system.device_id."""
    device, visible = system.device, env.get("CUDA_VISIBLE_DEVICES", "all")
    first = visible.partition(",")[0].strip()
    if device != "cpu" and visible != "all" and first not in NO_GPU and not first.startswith("MIG-"):
        gpus = _all_gpus()
        if gpus and not _restrict(gpus, visible):
            numbers = f"GPUs {gpus[0].index}-{gpus[-1].index}" if len(gpus) > 1 else f"GPU {gpus[0].index}"
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={visible[:80]} names none of the {numbers}",
                hint=f"CUDA_VISIBLE_DEVICES={gpus[0].index}, or --device cpu",
            )
    if system.device_id > 0 and (device == "cpu" or (device == "auto" and not visible_gpus())):
        raise ConfigError(
            f"{system.device_id} needs a GPU, and this run has none", where="system.device_id", hint="leave it out"
        )


def _all_gpus() -> list[Gpu]:
    gpus = _ask_nvml()
    if gpus is None and shutil.which("nvidia-smi"):
        gpus = _ask_nvidia_smi()
    if not gpus and AMD_DRIVER.exists():
        gpus = _ask_torch()
    return gpus or []


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
    return _query(QUERY) or _query(SHORT_QUERY)


def _query(fields: str) -> list[Gpu]:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    names = fields.split(",")
    found = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names) and row[0].isdigit()]
    return [
        Gpu(
            index=int(cells["index"]),
            uuid=cells.get("uuid", ""),
            name=cells.get("name", "GPU"),
            memory_bytes=_number(cells.get("memory.total", "")) * MIB,
            free_bytes=_number(cells.get("memory.free", "")) * MIB,
            utilisation=_number(cells["utilization.gpu"]),
        )
        for cells in found
    ]


def _ask_torch() -> list[Gpu]:
    """What torch sees, asked in a child process so that this one never touches a GPU; [] where it cannot say."""
    environment = env.without("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    command = [sys.executable, "-c", LIST_BY_TORCH]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
        return [Gpu(number, f"AMD-{number}", name, size, size, 0) for number, name, size in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return []


def _number(cell: str) -> int:
    """A count, or 0 where nvidia-smi says nothing or [N/A]."""
    return int(float(cell)) if cell.replace(".", "", 1).isdigit() else 0
