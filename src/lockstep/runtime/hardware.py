"""The device a worker computes on: picked once, with its name, memory and peak."""

from __future__ import annotations

import gc
import re

import psutil
import torch

from lockstep.errors import ConfigError
from lockstep.runtime import env, memory_limits

# Dense bf16/fp16 peak in FLOP/s by a word of the card's name: what vendors' data sheets give, the first match counts.
PEAK_FLOPS = (
    ("GB200", 2.5e15), ("B200", 2.25e15), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("GH200", 989e12),
    ("A100", 312e12), ("L40S", 362e12), ("A10G", 70e12), ("A10", 125e12), ("L4", 121e12), ("RTX 4090", 165e12),
    ("RTX 3090", 71e12), ("V100", 125e12), ("T4", 65e12), ("MI300X", 1307e12), ("MI250", 181e12),
)  # fmt: skip


def pick_device(asked: str, device_id: int) -> torch.device:
    """The device for `auto | cuda | cpu`; a GPU that was asked for and is not there is refused."""
    if asked == "auto" and env.get(env.DEVICE) == "cuda":  # the launcher has found this GPU and given it to us
        asked = "cuda"
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available() and not (torch.version.cuda or torch.version.hip):
        raise ConfigError(
            f"system.device: cuda was asked for, but torch {torch.__version__} is built for the CPU only",
            hint="--device cpu, or install a CUDA build of torch",
        )
    if not torch.cuda.is_available():
        raise ConfigError("system.device: cuda was asked for, but this machine shows no GPU", hint="--device cpu")
    count = torch.cuda.device_count()
    if device_id >= count:
        raise ConfigError(
            f"system.device_id: {device_id} is not there, {count} visible",
            hint=f"a number below {count}, or --device cpu",
        )
    device = torch.device("cuda", device_id)
    torch.cuda.set_device(device)
    return device


def own_index(place: env.Env, asked: int) -> int:
    """Among the visible devices: the one asked for, or this worker's own."""
    shared = place.world > 1 and torch.cuda.is_available()
    return env.device_index(place, torch.cuda.device_count()) if shared else asked


def device_name(device: torch.device) -> str:
    """The card's name, or how many cores do the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({threads_text()})"


def threads_text() -> str:
    """How many threads compute."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s that MFU is measured against (of fp8 that of bf16, as peers do); None where none is known."""
    if device.type != "cuda" or precision not in ("bf16", "fp16", "fp8"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_FLOPS if re.search(rf"\b{word}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return memory_limits.resident_peak_bytes()


def let_go(device: torch.device) -> None:
    """Give back what trials have left, and forget their peak."""
    gc.collect()  # an error may hold what it stood in
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def free_memory_bytes(device: torch.device) -> int:
    """What can still be had: of the card, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def total_memory_bytes(device: torch.device) -> int | None:
    """What the card has; None on the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def memory_bounds(device: torch.device) -> memory_limits.Bounds:
    """The bounds that a shortage on this device has met."""
    if device.type != "cuda":
        return memory_limits.of_machine(peak_memory_bytes(device))
    limit = torch.cuda.get_device_properties(device).total_memory
    taken = limit - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    return memory_limits.Bounds(peak_memory_bytes(device), limit, "the card has", taken=max(0, taken))
