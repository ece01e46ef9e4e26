"""The device of a worker: honoured or refused, and the figures the banner gives about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.errors import ConfigError, ExitCode
from lockstep.runtime import hardware
from lockstep.runtime.hardware import peak_flops, pick_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with as many GPUs as a test says."""
    state = SimpleNamespace(gpus=2, name="NVIDIA H200", current=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: state.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: state.gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(state, "current", device))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: state.name)
    return state


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_the_id_picks_among_the_visible(machine: SimpleNamespace, asked: str) -> None:
    assert pick_device(asked, 1) == torch.device("cuda", 1)
    assert machine.current == torch.device("cuda", 1)


def test_the_cpu_when_asked_for_or_alone(machine: SimpleNamespace) -> None:
    assert pick_device("cpu", 0) == CPU
    machine.gpus = 0
    assert pick_device("auto", 0) == CPU
    assert machine.current is None


def test_refusals(machine: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"system\.device_id: 2 is not there, 2 visible") as caught:
        pick_device("cuda", 2)
    assert "below 2" in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE
    machine.gpus = 0
    with pytest.raises(ConfigError, match=r"system\.device: cuda was asked for") as caught:
        pick_device("cuda", 0)
    assert "--device cpu" in caught.value.hint


def test_a_gpu_that_was_given_is_used_or_refused(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built for the CPU does not silently train there where the launcher has found a GPU."""
    machine.gpus = 0
    assert pick_device("auto", 0).type == "cpu"
    monkeypatch.setenv("LOCKSTEP_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="cuda was asked for"):
        pick_device("auto", 0)
    assert pick_device("cpu", 0).type == "cpu"


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA GB200", 2.5e15), ("NVIDIA B200", 2.25e15), ("NVIDIA H100 PCIe", 756e12),
     ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A10G", 70e12), ("NVIDIA A10", 125e12), ("NVIDIA L4", 121e12),
     ("NVIDIA L40S", 362e12), ("Tesla T4", 65e12), ("AMD Instinct MI300X", 1307e12), ("A card of next year", None)],
)  # fmt: skip
def test_peaks_by_name(machine: SimpleNamespace, name: str, peak: float | None) -> None:
    machine.name = name
    assert peak_flops(GPU, "bf16") == peak


def test_no_peak_where_none_is_honest(machine: SimpleNamespace) -> None:
    machine.name = "NVIDIA H200"
    assert peak_flops(GPU, "fp8") == peak_flops(GPU, "bf16"), "as peers count"
    assert peak_flops(GPU, "fp32") is None
    assert peak_flops(CPU, "bf16") is None


def test_the_cpu_in_words_and_bytes() -> None:
    assert hardware.device_name(CPU).startswith(f"CPU ({torch.get_num_threads()} thread")
    assert 50e6 < hardware.peak_memory_bytes(CPU) < 1e12, "bytes, whatever unit the system counts in"
    assert hardware.total_memory_bytes(CPU) is None
