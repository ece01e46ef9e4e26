"""The cards of a check: who they are, that nobody else is on them, and how they do, as the driver says. Torch-free."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
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
COUNTS = {
    "ecc.errors.corrected.volatile.total": "ecc_corrected",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
}
ROWS = {"remapped_rows.uncorrectable": "remapped_rows", "remapped_rows.correctable": "remapped_rows_corrected"}
ROW_STATES = {"remapped_rows.pending": "remap_pending", "remapped_rows.failure": "remap_failed"}
REASONS = "clocks_throttle_reasons.active"
THROTTLE = {  # bit of the driver's mask -> our word; that a card is idle is no reason worth a word
    0x02: "clocks_set",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}
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
    """How these cards do now: UUID -> facts. What a card does not say is left out."""
    with devices.nvml() as library:
        if library is not None:
            return {uuid: _by_nvml(library, uuid) for uuid in uuids}
    return {uuid: _by_smi(uuid) for uuid in uuids}


def throttle_words(mask: int) -> list[str]:
    """Why the clocks are held down, in our words."""
    return [word for bit, word in THROTTLE.items() if mask & bit]


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


def _by_nvml(library: Any, uuid: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
    except library.NVMLError as error:  # it has fallen off the bus
        return {"error": str(error)}

    def note(word: str, question: Callable[[], Any]) -> None:
        with contextlib.suppress(library.NVMLError, AttributeError):  # not every card and library answers everything
            found[word] = question()

    ecc = library.nvmlDeviceGetTotalEccErrors
    volatile = library.NVML_VOLATILE_ECC
    note("temperature_c", lambda: int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)))
    threshold = library.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    note("slowdown_c", lambda: int(library.nvmlDeviceGetTemperatureThreshold(handle, threshold)))
    note("power_watts", lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000)
    note("power_limit_watts", lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    note("sm_clock_mhz", lambda: int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)))
    note("max_sm_clock_mhz", lambda: int(library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM)))
    note("utilisation", lambda: int(library.nvmlDeviceGetUtilizationRates(handle).gpu))
    note("throttle", lambda: throttle_words(int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))))
    note("ecc_corrected", lambda: int(ecc(handle, library.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile)))
    note("ecc_uncorrected", lambda: int(ecc(handle, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile)))
    with contextlib.suppress(library.NVMLError, AttributeError):
        corrected, uncorrected, pending, failed = library.nvmlDeviceGetRemappedRows(handle)
        found |= {"remapped_rows": int(uncorrected), "remapped_rows_corrected": int(corrected)}
        found |= {"remap_pending": bool(pending), "remap_failed": bool(failed)}
    return found


def _by_smi(uuid: str) -> dict[str, Any]:
    """In several questions: a tool that does not know one of the fields answers none."""
    chosen = f"--id={uuid}"
    found: dict[str, Any] = {}
    for names in (FACTS, COUNTS):
        for row in devices.ask_smi("gpu", ",".join(names), chosen):
            found |= {word: number for field, word in names.items() if (number := _number(row[field])) is not None}
    for row in devices.ask_smi("gpu", REASONS, chosen):
        with contextlib.suppress(ValueError):
            found["throttle"] = throttle_words(int(row[REASONS], 16))
    for row in devices.ask_smi("remapped-rows", ",".join((*ROWS, *ROW_STATES)), chosen):
        found |= {word: number for field, word in ROWS.items() if (number := _number(row[field])) is not None}
        found |= {
            word: row[field] in ("Yes", "1") for field, word in ROW_STATES.items() if row[field][:1] not in ("[", "")
        }
    return found


def _number(cell: str) -> float | int | None:
    """A number, or None for nvidia-smi's [N/A]."""
    if not cell.replace(".", "", 1).isdecimal():
        return None
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


def peak(samples: Sequence[Mapping[str, Any]], word: str) -> float | None:
    """The highest of what was seen; None where nobody said."""
    return max((float(sample[word]) for sample in samples if sample.get(word) is not None), default=None)
