"""AMD cards: no NVML and no nvidia-smi, torch in a child process says what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.runtime import devices

FAKE = 'print(\'[[0, "AMD Instinct MI300X", 206141652992], [1, "AMD Instinct MI300X", 206141652992]]\')'


@pytest.fixture
def amd_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's file is there, and the child prints what torch would."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(devices, "AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(devices, "LIST_BY_TORCH", FAKE)
    monkeypatch.setattr(devices, "_ask_nvml", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("amd_host")
def test_cards_are_found_and_restricted_by_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu.name for gpu in devices.visible_gpus()] == ["AMD Instinct MI300X"] * 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in devices.visible_gpus()] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.index for gpu in devices.visible_gpus()] == [0]
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.visible_gpus() == []


@pytest.mark.usefixtures("amd_host")
@pytest.mark.parametrize("child", ["raise SystemExit(3)", "print('{')", "print('[[1]]')"])
def test_a_child_that_cannot_say_means_no_gpu(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LIST_BY_TORCH", child)
    assert devices.visible_gpus() == []


@pytest.mark.usefixtures("amd_host")
def test_without_the_driver_nobody_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "AMD_DRIVER", tmp_path / "nothing")
    monkeypatch.setattr(devices, "_ask_torch", lambda: pytest.fail("a child was started"))
    assert devices.visible_gpus() == []
