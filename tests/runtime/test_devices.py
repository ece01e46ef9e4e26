"""Which GPUs a run gets, and who holds them: asked of a fake nvidia-smi and a fake NVML."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import ConfigError, ExitCode
from lockstep.runtime import devices
from tests.fake_smi import gpu, plant


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 5 is idlest, GPU 6 has most free memory."""
    busy = [90, 80, 70, 60, 50, 5, 40, 30]
    free = [1, 2, 3, 4, 5, 6, 70_000, 8]
    rows = [gpu(at, utilization__gpu=busy[at], memory__free=free[at]) for at in range(8)]
    plant(tmp_path / "bin", monkeypatch, rows)


@pytest.mark.parametrize("count", [1, 4, 8, 10])
def test_detection_agrees_with_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    plant(tmp_path / "bin", monkeypatch, [gpu(at) for at in range(count)])
    assert devices.choose("all", cpu=False) == list(range(count))
    assert devices.choose(str(count), cpu=False) == list(range(count))
    with pytest.raises(ConfigError, match="too many"):
        devices.choose(str(count + 1), cpu=False)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("asked", "chosen"),
    [("all", list(range(8))), ("3", [0, 1, 2]), ("0,2", [0, 2]), ("5, 1", [5, 1]), ("3,", [3]), (" 0, ", [0]),
     ("auto", [5]), ("auto:memory", [6])],
)  # fmt: skip
def test_what_can_be_asked(asked: str, chosen: list[int]) -> None:
    assert devices.choose(asked, cpu=False) == chosen


@pytest.mark.usefixtures("eight")
def test_the_variable_restricts_and_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2,GPU-0001")
    assert devices.choose("all", cpu=False) == [6, 2, 1]
    assert devices.choose("2", cpu=False) == [6, 2]
    assert devices.choose("auto", cpu=False) == [6]
    assert devices.choose("2,6", cpu=False) == [2, 6]
    with pytest.raises(ConfigError, match="no GPU 5") as caught:
        devices.choose("5,", cpu=False)
    assert "there are 3: GPU 6, 2, 1" in caught.value.hint


def test_ties_go_to_memory_then_to_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [gpu(0, memory__free=10), gpu(1, memory__free=30), gpu(2, memory__free=30)]
    plant(tmp_path / "bin", monkeypatch, rows)
    assert devices.choose("auto", cpu=False) == [1]
    assert devices.choose("auto:memory", cpu=False) == [1]


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("asked", "says", "hint"),
    [
        ("0", "a count, and 0 are too few", "--gpus 0, (with the comma) for GPU 0"),
        ("9", "a count, and 9 are too many: there are 8", "--gpus all"),
        ("1,9", "no GPU 9", "GPU 0, 1, 2, 3, 4, 5, 6, 7"),
        ("1,1", "1 is named twice", "each once"),
        ("1,,2", "'' is not understood", "numbers with commas"),
        (",", "'' is not understood", "numbers with commas"),
        ("first", "'first' is not understood", "all, auto, auto:memory, a count"),
        ("-1", "'-1' is not understood", "there are 8"),
        ("1.5", "'1.5' is not understood", "there are 8"),
        ("²", "'²' is not understood", "there are 8"),
        ("9" * 50, "is not understood", "there are 8"),
        ("auto:speed", "'auto:speed' is not understood", "auto:memory"),
        ("0;rm -rf", "is not understood", "there are 8"),
    ],
)
def test_what_cannot_be(asked: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        devices.choose(asked, cpu=False)
    assert says in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--device cpu" in caught.value.hint


@pytest.mark.usefixtures("eight")
def test_replicas_may_share_a_gpu() -> None:
    assert devices.choose("1,1,2", cpu=False, repeats=True) == [1, 1, 2]
    with pytest.raises(ConfigError, match="named twice"):
        devices.choose("1,1", cpu=True, repeats=True)


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ("0,2", "0,2"), ("4", "4"), ("all", ""), ("auto", ""), ("auto:memory", ""),
        ("0", "1"), ("0,0", "2"), ("0-3", "4"), ("1 2", "2"), ("0,x", "1"), ("99999", "1024"), ("3-0", "1"),
    ],
)  # fmt: skip
def test_no_gpu_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, instead: str
) -> None:
    plant(tmp_path / "bin", monkeypatch, [])
    monkeypatch.setattr(devices, "AMD_DRIVER", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no GPU can be used here") as caught:
        devices.choose(asked, cpu=False)
    assert caught.value.hint == (f"--device cpu --gpus {instead}" if instead else "--device cpu")
    assert devices.choose(instead or asked, cpu=True), "it can be pasted"
    assert caught.value.where == ("" if asked == "all" else f"--gpus {asked}"), "what was typed"


@pytest.mark.parametrize(
    ("asked", "labels"), [("4", [0, 1, 2, 3]), ("0,2", [0, 2]), ("7,", [7]), ("all", [0]), ("auto", [0])]
)
def test_workers_of_the_cpu(monkeypatch: pytest.MonkeyPatch, asked: str, labels: list[int]) -> None:
    monkeypatch.setattr(devices, "all_gpus", lambda: pytest.fail("nobody asks for GPUs"))
    assert devices.choose(asked, cpu=True) == labels


@pytest.mark.parametrize("asked", ["0", "1025", "1,1", "0,5000", "x"])
def test_too_few_too_many_of_the_cpu(asked: str) -> None:
    with pytest.raises(ConfigError) as caught:
        devices.choose(asked, cpu=True)
    assert "--device cpu" not in caught.value.hint


# ------------------------------------------------------------------------------------------------ holders


@contextlib.contextmanager
def sleeping(script: Path, *words: str) -> Iterator[int]:
    """The pid of `python SCRIPT WORDS`, which has begun."""
    script.write_text("import time; print(flush=True); time.sleep(60)", encoding="utf-8")
    child = subprocess.Popen([sys.executable, str(script), *words], stdout=subprocess.PIPE)
    try:
        assert child.stdout
        child.stdout.readline()
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def test_who_holds_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sleeping(tmp_path / "train.py", "--hf-token", "hf_canary_of_a_stranger") as stranger:
        check_holders(tmp_path, monkeypatch, stranger)


def check_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int) -> None:
    apps = {1: [{"pid": stranger, "used_memory": 20_582}, {"pid": 999_999_999, "used_memory": "[N/A]"}]}
    plant(tmp_path / "bin", monkeypatch, [gpu(0), gpu(1)], apps=apps)
    first, second = devices.holders(1)
    assert (first.pid, first.memory_bytes) == (stranger, 20_582 << 20)
    assert first.command.endswith("train.py")
    assert (second.pid, second.command) == (999_999_999, "")
    notices = devices.busy_notices([0, 1])
    assert notices == [
        f"GPU 1 is in use: pid {stranger} ({first.command}) holds 20.1 GiB, pid 999999999 holds some memory"
    ]
    assert "canary" not in notices[0]
    assert devices.holders(0) == []


def test_many_holders_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = {0: [{"pid": 999_999_900 + at, "used_memory": 1024} for at in range(5)]}
    plant(tmp_path / "bin", monkeypatch, [gpu(0)], apps=apps)
    (notice,) = devices.busy_notices([0])
    assert notice.count("holds 1.0 GiB") == 3
    assert notice.endswith(" and 2 more")


class FakeNvml:
    """As much of pynvml as holders ask for."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, supported: bool = True) -> None:
        self.supported, self.open = supported, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if not self.supported:
            raise self.NVMLError
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None), SimpleNamespace(pid=1, usedGpuMemory=3 << 30)]


def test_nvml_is_asked_first_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert [(holder.pid, holder.memory_bytes) for holder in devices.holders(0)] == [(1, 3 << 30), (os.getpid(), 0)]
    assert library.open == 0


def test_a_card_that_does_not_say_is_asked_by_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "bin", monkeypatch, [gpu(0)], apps={0: [{"pid": 77, "used_memory": 5}]})
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(supported=False))
    assert [holder.pid for holder in devices.holders(0)] == [77]


def test_the_name_of_a_process_is_harmless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_TOKEN", "canary-in-a-path")
    with sleeping(tmp_path / "canary-in-a-path\x1b[31m.py") as pid:
        assert devices.command_of(pid).endswith("***?[31m.py")
    assert devices.command_of(os.getpid()), "and an ordinary one has a name"
