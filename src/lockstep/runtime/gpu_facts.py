"""How a worker's own GPU is doing: a thread asks the driver now and then, training reads the last answer."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.runtime import devices

PERIOD_SECONDS = 5.0
SMI_SECONDS = 20.0  # a busy driver answers late
STALE_PERIODS = 6  # a driver that stopped answering says nothing about now
GIVE_UP_AFTER = 3  # failures in a row
SMI_FIELDS = "utilization.gpu,memory.used,temperature.gpu,power.draw"


@dataclass(frozen=True)
class Facts:
    """One answer of the driver; None where the card does not say. The names are those of a step record."""

    gpu_utilisation: int | None  # percent
    gpu_memory_used_bytes: int | None  # by every process on the card
    gpu_temperature_c: int | None
    gpu_power_watts: float | None = None


Ask = Callable[[], Facts | None]


class Sampler:
    """Asks every few seconds, in a daemon thread, about one GPU: nvidia-smi's number or a UUID; None is the CPU.

    With a file each answer is also appended to it as a line of JSON, for whoever looks at the run from outside.
    Nothing that goes wrong here reaches training: the facts are then missing.
    """

    def __init__(self, gpu: int | str | None, file: Path | None = None, *, period: float = PERIOD_SECONDS) -> None:
        self._gpu, self._file, self._period = gpu, file, period
        self._answer: tuple[float, Facts] | None = None  # replaced as a whole: readers need no lock
        self._busy = (0, 0)  # percent summed up, answers; replaced as a whole too
        self._most_bytes = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if gpu is not None:
            self._thread = threading.Thread(target=self._watch, name="gpu-facts", daemon=True)
            self._thread.start()

    def latest(self) -> Facts | None:
        """The last answer, or None where there is none or it is old. Never waits."""
        answer = self._answer
        if answer is None or time.monotonic() - answer[0] > STALE_PERIODS * self._period:
            return None
        return answer[1]

    def mean_utilisation(self) -> float | None:
        """Percent, over all answers so far; None where there is none."""
        total, answers = self._busy
        return total / answers if answers else None

    def peak_memory_bytes(self) -> int:
        """The most that was in use on the card whenever it was asked; 0 where nobody said."""
        return self._most_bytes

    def close(self) -> None:
        """Stop asking. A thread that the driver holds up is left behind."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        assert self._gpu is not None
        with contextlib.suppress(Exception), _asking(self._gpu) as ask:  # facts are a comfort, training is the point
            failures = 0
            while failures < GIVE_UP_AFTER and not self._closed.is_set():
                facts = ask()
                failures = 0 if facts else failures + 1
                if facts:
                    self._answer = (time.monotonic(), facts)
                    self._add_up(facts)
                    self._write(facts)
                self._closed.wait(self._period)

    def _add_up(self, facts: Facts) -> None:
        if facts.gpu_utilisation is not None:
            self._busy = (self._busy[0] + facts.gpu_utilisation, self._busy[1] + 1)
        self._most_bytes = max(self._most_bytes, facts.gpu_memory_used_bytes or 0)

    def _write(self, facts: Facts) -> None:
        if self._file is None:
            return
        line = json.dumps({"time": round(time.time(), 3), **asdict(facts)}, separators=(",", ":"))
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:  # the disk is full
            file.write(line + "\n")


@contextlib.contextmanager
def _asking(gpu: int | str) -> Generator[Ask]:
    """A function that asks about a GPU: through NVML, or where that says nothing through nvidia-smi."""
    with devices.nvml() as library:
        handle = _handle(library, gpu)
        if handle is None:
            yield lambda: _by_smi(gpu)
        else:
            yield lambda: _by_nvml(library, handle)


def _handle(library: Any, gpu: int | str) -> Any:
    if library is None:
        return None
    try:
        if isinstance(gpu, int):
            return library.nvmlDeviceGetHandleByIndex(gpu)
        return library.nvmlDeviceGetHandleByUUID(gpu)
    except library.NVMLError:
        return None


def _by_nvml(library: Any, handle: Any) -> Facts | None:
    def tell(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except library.NVMLError:  # not every card answers every question
            return None

    power = tell(lambda: library.nvmlDeviceGetPowerUsage(handle))
    facts = Facts(
        gpu_utilisation=tell(lambda: int(library.nvmlDeviceGetUtilizationRates(handle).gpu)),
        gpu_memory_used_bytes=tell(lambda: int(_memory(library, handle).used)),
        gpu_temperature_c=tell(lambda: int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))),
        gpu_power_watts=None if power is None else power / 1000,
    )
    return facts if any(value is not None for value in asdict(facts).values()) else None


def _memory(library: Any, handle: Any) -> Any:
    """As nvidia-smi counts: the older form of this call adds what the driver keeps for itself."""
    try:
        return library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
    except (AttributeError, TypeError, library.NVMLError):  # an older library, or an older driver
        return library.nvmlDeviceGetMemoryInfo(handle)


def _by_smi(gpu: int | str) -> Facts | None:
    rows = devices.ask_smi("gpu", SMI_FIELDS, f"--id={gpu}", seconds=SMI_SECONDS)
    if not rows:
        return None
    numbers = {name: _real(cell) for name, cell in rows[0].items()}
    memory = numbers["memory.used"]
    return Facts(
        gpu_utilisation=_whole(numbers["utilization.gpu"]),
        gpu_memory_used_bytes=None if memory is None else int(memory * devices.MIB),
        gpu_temperature_c=_whole(numbers["temperature.gpu"]),
        gpu_power_watts=numbers["power.draw"],
    )


def _real(cell: str) -> float | None:
    """A number, or None for nvidia-smi's [N/A]."""
    return float(cell) if cell.replace(".", "", 1).isdecimal() else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def last_written(file: Path, *, within_seconds: float) -> dict[str, Any] | None:
    """The newest line a sampler has written, if it is that young."""
    try:
        with file.open("rb") as lines:
            lines.seek(0, 2)
            lines.seek(max(0, lines.tell() - 1024))
            line = lines.read().rstrip(b"\n").rpartition(b"\n")[2]
        facts: dict[str, Any] = json.loads(line)
        return facts if time.time() - float(facts["time"]) <= within_seconds else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
