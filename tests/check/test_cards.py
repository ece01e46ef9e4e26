"""Cards: who they are by NVML and by nvidia-smi, how they do by the latter; one that is held is refused by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lockstep.check import cards
from lockstep.errors import LockstepError
from tests import fake_smi

GIB = 1 << 30


class FakeNvml:
    """As much of pynvml as is asked for: two cards, the second a desktop card that answers little."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

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
    told |= {"ecc.errors.corrected.volatile.total": 4, "remapped_rows.pending": "Yes", "remapped_rows.failure": "No"}
    told |= {"clocks_event_reasons_counters.sw_thermal_slowdown": 2_500_000}
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
    assert facts[first.uuid]["thermal_seconds"] == 2.5
    assert (facts[first.uuid]["remap_pending"], facts[first.uuid]["remap_failed"]) == (True, False)
    assert facts[second.uuid] == {"utilisation": 0}
    assert cards.ask(["GPU-gone"]) == {"GPU-gone": {}}
    assert cards.ask([]) == {}


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
