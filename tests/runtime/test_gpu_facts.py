"""The facts of a worker's GPU: from NVML or nvidia-smi, never in the way of training."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.runtime import gpu_facts
from lockstep.runtime.gpu_facts import Facts, Sampler
from tests.fake_smi import gpu, plant


class FakeNvml:
    """As much of pynvml as the sampler asks for; what it cannot answer raises."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *silent: str) -> None:
        self.silent, self.open, self.asked = silent, 0, []

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: f"card {index}",
            "nvmlDeviceGetHandleByUUID": lambda uuid: f"card {uuid}",
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=20 << 30),
            "nvmlDeviceGetTemperature": lambda *_: 61,
            "nvmlDeviceGetPowerUsage": lambda _: 412_500,
        }
        self.asked.append(name)
        if name not in answers:
            raise AttributeError(name)
        if any(word in name for word in self.silent):
            raise self.NVMLError
        return answers[name]


def wait_for(sampler: Sampler) -> Facts | None:
    end = time.monotonic() + 30
    while (facts := sampler.latest()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return facts


@pytest.mark.parametrize("card", [3, "GPU-1234"])
def test_nvml_answers(monkeypatch: pytest.MonkeyPatch, card: int | str) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    sampler = Sampler(card, period=0.02)
    assert wait_for(sampler) == Facts(97, 20 << 30, 61, 412.5)
    sampler.close()
    assert library.open == 0
    assert "gpu-facts" not in [thread.name for thread in threading.enumerate()]


def test_a_card_that_answers_only_some_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("Utilization", "Power"))
    sampler = Sampler(0, period=0.02)
    assert wait_for(sampler) == Facts(None, 20 << 30, 61, None)
    sampler.close()


def test_memory_is_counted_as_nvidia_smi_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(FakeNvml):
        nvmlMemory_v2 = 2

        def nvmlDeviceGetMemoryInfo(self, _: str, version: int = 1) -> SimpleNamespace:
            return SimpleNamespace(used=(2 if version == 2 else 3) << 30)

    monkeypatch.setitem(sys.modules, "pynvml", Newer())
    sampler = Sampler(0, period=0.02)
    facts = wait_for(sampler)
    sampler.close()
    assert facts
    assert facts.gpu_memory_used_bytes == 2 << 30


def test_nvidia_smi_answers_where_nvml_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = gpu(2, utilization__gpu=55, memory__used=1024, temperature__gpu=70, power__draw="[N/A]")
    plant(tmp_path / "bin", monkeypatch, [gpu(0), row])
    sampler = Sampler(2, tmp_path / "gpu.jsonl", period=1.0)
    assert wait_for(sampler) == Facts(55, 1 << 30, 70, None)
    sampler.close()
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines[0]["gpu_temperature_c"] == 70
    assert gpu_facts.last_written(tmp_path / "gpu.jsonl", within_seconds=60) == lines[-1]
    assert gpu_facts.last_written(tmp_path / "gpu.jsonl", within_seconds=-1) is None
    (tmp_path / "gpu.jsonl").write_text('{"time": 1')
    assert gpu_facts.last_written(tmp_path / "gpu.jsonl", within_seconds=1e12) is None


def test_the_cpu_has_no_facts_and_no_thread() -> None:
    before = threading.active_count()
    sampler = Sampler(None)
    assert threading.active_count() == before
    assert sampler.latest() is None
    sampler.close()


def test_nobody_to_ask_ends_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "bin", monkeypatch, [])
    sampler = Sampler(0, period=0.01)
    assert sampler._thread is not None
    sampler._thread.join(timeout=20)
    assert not sampler._thread.is_alive(), "three failures are enough"
    assert sampler.latest() is None


def test_whatever_breaks_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Facts:
        raise RuntimeError("a driver of another world")

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(gpu_facts, "_by_nvml", broken)
    sampler = Sampler(0, period=0.01)
    assert sampler._thread is not None
    sampler._thread.join(timeout=10)
    assert sampler.latest() is None
    sampler.close()


def test_a_driver_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(gpu_facts, "_by_nvml", lambda *_: release.wait(30) and None)
    sampler = Sampler(0, period=0.01)
    began = time.monotonic()
    assert sampler.latest() is None
    sampler.close()
    assert time.monotonic() - began < 5
    release.set()


def test_old_answers_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    sampler = Sampler(0, period=0.05)
    assert wait_for(sampler)
    sampler.close()
    time.sleep(gpu_facts.STALE_PERIODS * 0.05 + 0.05)
    assert sampler.latest() is None


def test_a_full_disk_costs_only_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    sampler = Sampler(0, Path("/dev/full"), period=0.02)
    assert wait_for(sampler)
    first, end = sampler._answer, time.monotonic() + 30
    while sampler._answer is first and time.monotonic() < end:
        time.sleep(0.01)
    assert sampler._answer is not first, "it goes on"
    sampler.close()
