"""Cards: who they are and how they do, by NVML and by nvidia-smi; one that somebody holds is refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.check import cards, observe
from lockstep.check.records import Card
from lockstep.errors import LockstepError
from tests import fake_smi

GIB = 1 << 30


class FakeNvml:
    """As much of pynvml as is asked for: two cards, the second a desktop card that answers little."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_CLOCK_SM, NVML_VOLATILE_ECC = 0, 1, 1, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.waiting = [SimpleNamespace(device=0, eventData=79)]
        self.registered: list[int] = []

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid == "GPU-gone":
            raise self.NVMLError("GPU is lost")
        return int(uuid[-1])

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, _: int) -> str:
        return "NVIDIA H200"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def _server_only(self, handle: int) -> None:
        if handle == 1:
            raise self.NVMLError("Not Supported")

    def nvmlDeviceGetSerial(self, handle: int) -> str:
        self._server_only(handle)
        return "1650523123456"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0) if handle == 0 else (8, 6)

    def nvmlDeviceGetTemperature(self, _handle: int, _sensor: int) -> int:
        return 61

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, _which: int) -> int:
        self._server_only(handle)
        return 87

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:
        return 650_500

    def nvmlDeviceGetEnforcedPowerLimit(self, _: int) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, _handle: int, _which: int) -> int:
        return 1755

    def nvmlDeviceGetMaxClockInfo(self, _handle: int, _which: int) -> int:
        return 1980

    def nvmlDeviceGetUtilizationRates(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: int) -> int:
        return 0x45  # idle, power cap, hw thermal

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, _counter: int) -> int:
        self._server_only(handle)
        return 3 + kind

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        self._server_only(handle)
        return (1, 2, 1, 0)

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, _types: int, _events: object) -> None:
        self._server_only(handle)
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, _events: object, _milliseconds: int) -> SimpleNamespace:
        if not self.waiting:
            raise self.NVMLError("Timeout")
        return self.waiting.pop()

    def nvmlEventSetFree(self, _events: object) -> None: ...


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # pyright: ignore[reportArgumentType] - it answers as the module
    return fake


@pytest.mark.usefixtures("fake_nvml")
def test_identity_by_nvml() -> None:
    first, second = cards.gpus([0, 1])
    assert (first.uuid, first.serial, first.model, first.driver) == ("GPU-0", "1650523123456", "NVIDIA H200", "570.1")
    assert (second.uuid, second.serial) == ("GPU-1", ""), "it does not say, and that is no error"
    assert [card.slot for card in (first, second)] == [0, 1]
    assert cards.capability([0, 1]) == (8, 6), "what the least of them can"
    assert cards.capability([0]) == (9, 0)


def test_identity_and_facts_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"serial": "123", "compute_cap": "9.0", "temperature.gpu": 55, "power.draw": "312.5", "clocks.sm": 1200}
    told |= {"ecc.errors.corrected.volatile.total": 4, "clocks_throttle_reasons.active": "0x0000000000000020"}
    fake_smi.plant(tmp_path, monkeypatch, [fake_smi.gpu(0) | told, fake_smi.gpu(1)])
    first, second = cards.gpus([0, 1])
    assert (first.uuid, first.serial, first.driver) == ("GPU-0000", "123", "999.1")
    assert second.serial == ""
    assert cards.capability([0]) == (9, 0)
    facts = cards.ask([first.uuid, second.uuid])
    assert facts[first.uuid]["temperature_c"] == 55
    assert facts[first.uuid]["power_watts"] == 312.5
    assert facts[first.uuid]["ecc_corrected"] == 4
    assert "ecc_uncorrected" not in facts[first.uuid], "[N/A] is no count"
    assert facts[first.uuid]["throttle"] == ["thermal"]
    assert "temperature_c" not in facts[second.uuid]


@pytest.mark.usefixtures("fake_nvml")
def test_facts_by_nvml() -> None:
    facts = cards.ask(["GPU-0", "GPU-1", "GPU-gone"])
    assert facts["GPU-0"] == {
        "temperature_c": 61, "slowdown_c": 87, "power_watts": 650.5, "power_limit_watts": 700.0, "sm_clock_mhz": 1755,
        "max_sm_clock_mhz": 1980, "utilisation": 97, "throttle": ["power_cap", "hw_thermal"], "ecc_corrected": 3,
        "ecc_uncorrected": 4, "remapped_rows": 2, "remapped_rows_corrected": 1, "remap_pending": True,
        "remap_failed": False,
    }  # fmt: skip
    assert not {"slowdown_c", "ecc_corrected", "remapped_rows"} & set(facts["GPU-1"])
    assert facts["GPU-gone"] == {"error": "GPU is lost"}


def test_xid_errors_are_taken(fake_nvml: FakeNvml) -> None:
    with observe._errors_of(["GPU-0", "GPU-1"]) as errors:
        assert fake_nvml.registered == [0], "the other cannot tell"
        assert errors() == {"GPU-0": [79]}
        assert errors() == {"GPU-0": [79]}, "asked again, no event is new"


def test_a_held_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [fake_smi.gpu(index) for index in range(3)]
    fake_smi.plant(tmp_path, monkeypatch, rows, apps={1: [{"pid": os.getpid(), "used_memory": 1024}]})
    cards.refuse_held([0, 2])
    with pytest.raises(LockstepError) as refused:
        cards.refuse_held([0, 1])
    assert f"GPU 1 is in use: pid {os.getpid()} (" in str(refused.value)
    assert "holds 1.0 GiB" in str(refused.value)
    assert "--gpus 2," in refused.value.hint


def test_memory_is_divided_among_those_who_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [fake_smi.gpu(0, memory__free=80 * 1024), fake_smi.gpu(1, memory__free=60 * 1024)]
    fake_smi.plant(tmp_path, monkeypatch, rows)
    assert cards.memory_bytes([0, 1]) == 60 * GIB
    assert cards.memory_bytes([0, 0]) == 40 * GIB


def test_cpu_workers() -> None:
    first, second = cards.workers([0, 3], node=1)
    assert (first.name, second.name, second.slot, second.node) == ("worker 0", "worker 3", 1, 1)
    assert first.model
    assert first.host


def test_the_observer_tells_before_between_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi.plant(tmp_path, monkeypatch, [fake_smi.gpu(0) | {"temperature.gpu": 50}, fake_smi.gpu(1)])
    blocked = "import sys; sys.modules['pynvml'] = None; from lockstep.check.observe import main; main(sys.argv[1:])"
    file = tmp_path / "cards.jsonl"
    with subprocess.Popen([sys.executable, "-c", blocked, str(file), "0.05", "GPU-0000", "GPU-0001"]) as observer:
        deadline = time.monotonic() + 30
        while not (file.exists() and '"between"' in file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        observer.send_signal(signal.SIGTERM)
        assert observer.wait(30) == 0
    told = observe.read(file, Card(index=0, slot=0, uuid="GPU-0000"))
    assert told["before"]["temperature_c"] == told["after"]["temperature_c"] == 50
    assert [sample["temperature_c"] for sample in told["samples"]]
    assert told["before"]["time"] < told["after"]["time"]
    assert "when" not in told["after"]
    assert "temperature_c" not in observe.read(file, Card(index=1, slot=1, uuid="GPU-0001"))["after"]
    assert observe.read(file, Card(index=2, slot=2, uuid="GPU-0002")) == {"before": {}, "after": {}, "samples": ()}


def test_an_observer_that_was_killed_leaves_its_last_sample(tmp_path: Path) -> None:
    file = tmp_path / "cards.jsonl"
    lines = [
        {"uuid": "GPU-0", "when": when, "time": time} for time, when in enumerate(("before", "between", "between"))
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"uuid": "GPU-0", "wh')
    told = observe.read(file, Card(index=0, slot=0, uuid="GPU-0"))
    assert (told["before"]["time"], told["after"]["time"], len(told["samples"])) == (0, 2, 2)
