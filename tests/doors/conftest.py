"""A clean place to run the documented scripts in: no GPU label, a fake nvidia-smi, a working directory of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.runtime.devices import Gpu
from tests.conftest import Outcome

MODEL_CHECK = Path(__file__).resolve().parents[2] / "doors" / "model_check"
FAKE_SMI = """#!{python} -SE
import sys
rows = {rows!r}
query = next(word for word in sys.argv if word.startswith("--query-gpu=")).partition("=")[2].split(",")
for row in rows:
    print(", ".join(str(row.get(name, "[N/A]")) for name in query))
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, shared_cache: Path) -> None:
    """No variable names a GPU, none that a script sets stays behind, and the dataset is built once for all tests."""
    for name in ("GPU_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that this machine has so many GPUs (no driver is asked)."""

    def pretend(count: int) -> None:
        found = [Gpu(index, f"GPU-{index}", "Fake", 80 << 30, 80 << 30, 0) for index in range(count)]
        monkeypatch.setattr("lockstep.runtime.devices.visible_gpus", lambda: found)

    return pretend


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a fake nvidia-smi first on PATH; rows are (index, utilisation, free MiB). NVML answers nothing."""

    def plant(*rows: tuple[int, object, object]) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        fields = [
            {"index": index, "uuid": f"GPU-{index:04d}", "name": "Fake", "utilization.gpu": busy,
             "memory.free": free, "memory.total": 81559}
            for index, busy, free in rows
        ]  # fmt: skip
        tool = folder / "nvidia-smi"
        tool.write_text(FAKE_SMI.format(python=sys.executable, rows=fields), encoding="utf-8")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr("lockstep.runtime.devices._ask_nvml", lambda: None)
        return folder

    return plant


@pytest.fixture
def door(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a documented script inside this process."""

    def run(script: str, *args: str) -> Outcome:
        from lockstep.compat import main
        from lockstep.report.logs import close_logging

        close_logging()
        code = main(script, list(args))
        close_logging()
        out, err = capfd.readouterr()
        return Outcome(int(code), out, err)

    return run
