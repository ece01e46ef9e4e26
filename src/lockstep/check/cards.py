"""The cards of a check: who they are, that nobody else is on them, and how they do, as the driver says. Torch-free."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.check.records import Card
from lockstep.errors import LockstepError
from lockstep.runtime import devices

IDENTITY = "index,uuid,serial,name,driver_version"
SHORT_IDENTITY = "index,uuid,name,driver_version"  # what the oldest nvidia-smi answers
FACTS = {  # field of nvidia-smi -> our word
    "temperature.gpu": "temperature_c",
    "power.draw": "power_watts",
    "enforced.power.limit": "power_limit_watts",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "utilization.gpu": "utilisation",
}
ERRORS = {
    "ecc.errors.corrected.volatile.total": "ecc_corrected",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
}
HELD_DOWN = {  # for how long the clocks were, ever since the driver was loaded; it counts microseconds
    "clocks_event_reasons_counters.sw_thermal_slowdown": "thermal_seconds",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "hw_thermal_seconds",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "power_brake_seconds",
    "clocks_event_reasons_counters.sw_power_cap": "power_cap_seconds",
}
ROWS = {
    "remapped_rows.uncorrectable": "remapped_rows",
    "remapped_rows.correctable": "remapped_rows_corrected",
    "remapped_rows.pending": "remap_pending",
    "remapped_rows.failure": "remap_failed",
}
QUESTIONS = (("gpu", FACTS), ("gpu", ERRORS), ("gpu", HELD_DOWN), ("remapped-rows", ROWS))
ANSWER_SECONDS = 10.0  # for each question: a driver that hangs must not hold up the check
CPU_INFO = Path("/proc/cpuinfo")


def workers(labels: Sequence[int], *, node: int = 0) -> list[Card]:
    """CPU workers, which stand for cards."""
    host, model = socket.gethostname(), _cpu_model()
    return [Card(index=label, slot=slot, node=node, host=host, model=model) for slot, label in enumerate(labels)]


def gpus(indices: Sequence[int], *, node: int = 0) -> list[Card]:
    """The GPUs of these numbers, in the order of the slots that drive them."""
    host, known = socket.gethostname(), _identities()
    return [
        Card(index=index, slot=slot, node=node, host=host, **known.get(index, {"uuid": f"GPU {index}", "model": "GPU"}))
        for slot, index in enumerate(indices)
    ]


def refuse_held(indices: Sequence[int]) -> None:
    """A GPU that somebody computes on is not checked: its memory and its time are not ours."""
    notices = devices.busy_notices(sorted(set(indices)))
    if notices:
        free = [
            gpu.index for gpu in devices.visible_gpus() if gpu.index not in indices and not devices.holders(gpu.index)
        ]
        others = f"--gpus {','.join(map(str, free))}{',' if len(free) == 1 else ''}, or " if free else ""
        more = f" (and {len(notices) - 1} more)" if len(notices) > 1 else ""
        raise LockstepError(f"{notices[0]}{more}", where="lockstep check", hint=f"{others}wait until it is free")


def capability(indices: Sequence[int]) -> tuple[int, int] | None:
    """The lowest compute capability among them; None where nobody says."""
    found: list[tuple[int, int]] = []
    with devices.nvml() as library:
        if library is not None:
            with contextlib.suppress(library.NVMLError):
                handles = [library.nvmlDeviceGetHandleByIndex(index) for index in sorted(set(indices))]
                told = [library.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
                found = [(int(major), int(minor)) for major, minor in told]
    if not found:
        rows = devices.ask_smi("gpu", "index,compute_cap")
        cells = [row["compute_cap"].partition(".") for row in rows if row["index"] in {str(each) for each in indices}]
        found = [(int(major), int(minor)) for major, _, minor in cells if major.isdigit() and minor.isdigit()]
    return min(found, default=None)


def memory_bytes(indices: Sequence[int]) -> int:
    """What each replica may use: the free memory of the smallest card, divided among those that share one."""
    free = {gpu.index: gpu.free_bytes for gpu in devices.all_gpus()}
    return min(free.get(index, 0) // indices.count(index) for index in indices)


def ask(uuids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How these cards do now: UUID -> facts. What a card or the tool does not say is left out.

    In several questions: a tool that does not know one of the fields answers none.
    """
    found: dict[str, dict[str, Any]] = {uuid: {} for uuid in uuids}
    for what, words in QUESTIONS if found else ():
        for row in devices.ask_smi(what, ",".join(("gpu_uuid", *words)), seconds=ANSWER_SECONDS):
            told = {word: value for field, word in words.items() if (value := _value(word, row[field])) is not None}
            found.get(row["gpu_uuid"], {}).update(told)
    return found


def _identities() -> dict[int, dict[str, str]]:
    with devices.nvml() as library:
        if library is not None:
            with contextlib.suppress(library.NVMLError):
                count = library.nvmlDeviceGetCount()
                return {index: _identity(library, index) for index in range(count)}
    rows = devices.ask_smi("gpu", IDENTITY) or devices.ask_smi("gpu", SHORT_IDENTITY)
    return {
        int(row["index"]): {
            "uuid": row["uuid"],
            "serial": _said(row.get("serial", "")),
            "model": row["name"],
            "driver": row["driver_version"],
        }
        for row in rows
        if row["index"].isdigit()
    }


def _identity(library: Any, index: int) -> dict[str, str]:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    try:
        serial = str(library.nvmlDeviceGetSerial(handle))
    except library.NVMLError:  # cards for the desk have none
        serial = ""
    return {
        "uuid": str(library.nvmlDeviceGetUUID(handle)),
        "serial": serial,
        "model": str(library.nvmlDeviceGetName(handle)),
        "driver": str(library.nvmlSystemGetDriverVersion()),
    }


def _value(word: str, cell: str) -> float | bool | None:
    """What a cell says; None for nvidia-smi's [N/A]."""
    if cell in ("Yes", "No"):
        return cell == "Yes"
    if not cell.replace(".", "", 1).isdecimal():
        return None
    if word.endswith("_seconds"):
        return float(cell) / 1e6
    return float(cell) if "." in cell else int(cell)


def _said(cell: str) -> str:
    return "" if cell.startswith("[") or cell in ("N/A", "0") else cell


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Processor", "CPU part") and value.strip():
                return value.strip()
    return "CPU"
