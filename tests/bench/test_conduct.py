"""`lockstep bench` from the command line: tables, JSON, refusals; and real launches of one and two workers."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.bench import conduct
from lockstep.bench.conduct import counts
from lockstep.bench.show import as_json, p95, table
from lockstep.errors import ConfigError
from lockstep.launch import link
from lockstep.runtime import devices
from tests.bench.test_short_run import made
from tests.conftest import Outcome

Run = Callable[..., Outcome]
CPU = ("--device", "cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations and workers that would have been measured; none is."""
    asked: list[Any] = []

    def run(config: Any, *, workers: str, **_: Any) -> Any:
        asked.append((config, workers))
        return made(workers=int(workers.strip(",")))

    monkeypatch.setattr(conduct, "run", run)
    return asked


@pytest.mark.parametrize("family", ["llama", "mlm", "llada", "ad"])
def test_a_bench_of_every_family(lockstep: Run, in_dir: Path, family: str) -> None:
    """A real run each: what it tells, and where a step of it goes."""
    file = in_dir / "figures.json"
    result = lockstep("bench", family, "tiny", *CPU, "--steps", "4", "--json", str(file))
    assert result.code == 0, result.text
    tree = json.loads(file.read_text())
    assert tree["family"] == family
    assert {"date", "versions", "settings", "device", "load", "busy"} <= tree.keys()
    (found,) = tree["workers"]
    assert tree["steps"] == 4
    assert found["mfu"] is None
    assert found["tokens_per_second"] == pytest.approx(found["tokens_per_step"] / found["step_ms"] * 1e3)
    assert f"{found['tokens_per_second']:,.0f}" in result.out
    parts, whole = found["parts_ms"], found["traced_step_ms"]
    assert 0.3 * whole < sum(parts.values()) <= whole
    assert all(parts[part] > 0 for part in ("matrix products", "attention", "optimizer and clipping"))
    assert parts["other"] < 0.05 * whole, found["unnamed_ms"]
    assert [path.name for path in in_dir.iterdir()] == ["figures.json"]


def test_padding_is_no_token(lockstep: Run, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ("--steps", "2", "data.documents=padded", "--batch-size", "32", "--json", str(file))
    assert lockstep("bench", "mlm", "tiny", *CPU, *words).code == 0
    assert json.loads(file.read_text())["workers"][0]["tokens_per_step"] == pytest.approx(32 * 64 * 0.25, rel=0.5)


def test_the_table_and_the_json_say_the_same() -> None:
    one, two = made([0.4, 0.5, 0.6], mfu=0.663, tokens=32768), made([0.5], workers=2)
    two = replace(two, parts_seconds={"attention": 0.3, "other": 0.1}, unnamed_seconds={"odd": 0.1})
    text, tree = "\n".join(table([one, two], on_gpu=True)), json.loads(json.dumps(as_json([one, two])))
    for shown in ("65,536", "66.3 %", "500.00", "600.00", "2.00 GiB estimated", "a step of 2 workers",
                  "other: 100.000 ms odd"):  # fmt: skip
        assert shown in text
    assert re.search(r"gaps +100.000 +20.0\n  step +500.000 +100.0", text)
    first, second = tree["workers"]
    assert (first["tokens_per_second"], first["mfu"], first["step_ms_p95"]) == (65536, 0.663, 600.0)
    assert (second["workers"], second["efficiency"], tree["estimated_memory_bytes"]) == (2, 1.0, 2 << 30)


def test_the_95th_of_a_hundred() -> None:
    assert p95(list(range(1, 101))) == 95
    assert p95([3.0]) == 3.0


def test_float8_is_planned_only_for_a_gpu(lockstep: Run) -> None:
    words = ("train", "llama", "tiny", "--precision", "fp8", "--dry-run")
    refused = lockstep(*words, "--device", "cpu")
    assert refused.code == 2
    assert "multiplies float8 numbers" in refused.err
    planned = lockstep(*words, "--device", "cuda")
    assert planned.code == 0
    assert "(fp8, GPU)" in planned.out


def test_a_busy_machine_is_a_warning_line(
    lockstep: Run, measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 1.0, 1.0))
    reason = "the load average is 1000.0 on 8 cores"
    for words in (("bench", "llama", "tiny"), ("bench", "scaling", "llama", "tiny")):
        result = lockstep(*words, *CPU, "--json", str(tmp_path / "f.json"))
        assert result.code == 0, result.text
        assert f"WARNING: this machine is busy: {reason}\n" in result.out
        assert json.loads((tmp_path / "f.json").read_text())["busy"] == [reason]
    assert len(measured) == 1 + 3
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.0, 0.0))
    assert "busy" not in lockstep("bench", "llama", "tiny", *CPU).out


def test_a_gpu_that_somebody_else_uses_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    for pid, reasons in ((os.getpid(), []), (os.getpid() + 1, [f"GPU 0 is in use: pid {os.getpid() + 1}"])):
        holder = devices.Holder(pid, "python train.py", 5 << 30)
        monkeypatch.setattr(devices, "holders", lambda _, holder=holder: [holder])
        found = conduct.busy_reasons([0])
        assert [reason[: len(start)] for reason, start in zip(found, reasons, strict=True)] == reasons


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bench",), 2, "FAMILY"),
        (("bench", "llama", "tiny", "--steps", "0"), 2, "expected a whole number from 1 to 1,000,000, got '0'"),
        (("bench", "scaling", "llama", "tiny", "--steps", "2000000000"), 2, "from 1 to 1,000,000"),
        (("bench", "scalin", "llama", "tiny"), 2, "no command 'bench scalin'\n  try: did you mean 'bench scaling'?"),
        (("bench", "train", "tiny"), 2, "unknown family 'train'"),
        (("bench", "--sampling", "llama"), 2, "no such flag of lockstep bench"),
        (("bench", "lama", "tiny"), 2, "unknown family 'lama'\n  try: did you mean 'llama'?"),
        (("bench", "llama", "tiny", "--json", "/no/such/folder/f.json"), 73, "a folder that is not there"),
        (("bench", "llama", "tiny", "--json", "-"), 73, "the sign for a stream"),
        (("bench", "llama", "tiny", "--json", "x" * 300), 73, "File name too long"),
        (("bench", "llama", "tiny", "--json", "~no-such-user/f.json"), 2, "--json: '~no-such-user/f.json' is no path"),
        (("bench", "llama", "tiny", "--anyway"), 2, "was removed: a busy machine is a warning line"),
        (("bench", "llama", "tiny", "--gpus", "2"), 2, "system.gpus: --workers says how many"),
        (("bench", "scaling", "llama", "tiny", "--gpus", "2"), 2, "system.gpus: --workers says how many"),
        (("bench", "llama", "no_preset"), 2, "no preset or file"),
        (("bench", "llama", "tiny", "--device", "cuda"), 2, "no GPU can be used here"),
        (("bench", "llama", "tiny", "model.vocab_size=5"), 2, "the model has room for 5"),
        (("bench", "scaling", "llama", "tiny", "--workers", "1,two"), 2, "expected numbers of workers"),
        (("bench", "scaling", "llama", "tiny", "--workers", "0"), 2, "expected numbers of workers"),
        (("bench", "scaling", "llama", "tiny", "--workers="), 2, "expected numbers of workers"),
    ],
)
def test_refusals(lockstep: Run, words: tuple[str, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # also where there is a GPU
    device = () if "cuda" in words else ("--device", "cpu")
    result = lockstep(*words, *(device if len(words) > 1 else ()))
    assert result.code == code, result.text
    assert said in result.err


def test_too_many_workers_for_the_gpus(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    card = devices.Gpu(0, "GPU-0", "NVIDIA H200", 141 << 30, 140 << 30, 0)
    monkeypatch.setattr(devices, "check_asked", lambda _: None)
    for there, hint in (
        ([], "  try: --device cpu --gpus 1\n"),
        ([card] * 2, "  try: --workers 1,2, or --device cpu\n"),
    ):
        monkeypatch.setattr(devices, "visible_gpus", lambda there=there: there)
        result = lockstep("bench", "scaling", "llama", "tiny", "--device", "cuda", "--workers", "1,3")
        assert (result.code, hint in result.err) == (2, True), result.err


@pytest.mark.usefixtures("measured")
def test_figures_go_where_a_link_leads_and_into_what_is_no_file(lockstep: Run, tmp_path: Path) -> None:
    """A device that was named is still one afterwards, and a reader of a pipe gets the figures."""
    words = ("bench", "llama", "tiny", *CPU, "--json")
    (tmp_path / "link").symlink_to(tmp_path / "far.json")
    assert lockstep(*words, str(tmp_path / "link")).code == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "far.json").read_text())["steps"] == 1
    os.mkfifo(tmp_path / "pipe")
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert lockstep(*words, str(tmp_path / "pipe")).code == 0
    reader.join(60)
    assert json.loads(read[0])["steps"] == 1
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_disk_of_temporary_files_is_no_fault_of_ours(lockstep: Run) -> None:
    """The kernel's own refusal: no file of this process may be longer than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        result = lockstep("bench", "llama", "tiny", *CPU, "--steps", "1", "--batch-size", "64")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert result.code == 74, result.text
    assert "making rows failed: File too large" in result.err
    assert "TMPDIR" in result.err


def test_one_of_several_workers_measures_nothing(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(link, "attach", lambda _place: link.Link())  # else this process had a guardian from now on
    result = lockstep("bench", "llama", "tiny", *CPU)
    assert result.code == 2
    assert "starts its own workers, and this is one of several" in result.err


def test_a_dry_run_measures_nothing(lockstep: Run) -> None:
    result = lockstep("bench", "llama", "tiny", *CPU, "--dry-run")
    assert result.code == 0
    assert "training.batch_size" in result.out
    assert "tokens/s" not in result.out


# ------------------------------------------------------------------------------------------------ scaling


def test_one_worker_is_always_among_them() -> None:
    assert counts("4,2") == [1, 2, 4]
    assert counts("1, 2") == [1, 2]
    with pytest.raises(ConfigError):
        counts("")


def test_which_device_is_measured(lockstep: Run, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU workers of the CPU; several of them have a thread each, one alone has all."""
    cards = [devices.Gpu(number, f"GPU-{number}", "H200", 141 << 30, 140 << 30, 0) for number in (4, 5)]
    line = "No GPUs detected: the CPU is measured\n"
    for visible, words, device, workers in (
        ([], ("bench", "llama", "tiny"), "cpu", ["1"]),
        ([], ("bench", "scaling", "llama", "tiny", "--workers", "1,2"), "cpu", ["1", "2"]),
        (cards, ("bench", "llama", "tiny"), "auto", ["4,"]),
        (cards, ("bench", "llama", "tiny", "--system.device-id", "1"), "auto", ["5,"]),
        (cards, ("bench", "scaling", "llama", "tiny", "--workers", "2"), "auto", ["1", "2"]),
        (cards, ("bench", "llama", "tiny", *CPU), "cpu", ["1"]),
    ):
        monkeypatch.setattr(devices, "visible_gpus", lambda visible=visible: visible)
        monkeypatch.setattr(devices, "holders", lambda _: [])
        measured.clear()
        result = lockstep(*words)
        assert (result.code, line in result.out) == (0, not visible), result.text
        assert [asked for _, asked in measured] == workers
        assert {config.system.device for config, _ in measured} == {device}
        threads = 1 if device == "cpu" and len(workers) > 1 else made_threads(measured)
        assert {config.system.threads for config, _ in measured} == {threads}


def made_threads(measured: list[Any]) -> object:
    return type(measured[0][0].system)().threads


def shown(text: str) -> dict[int, float]:
    rows = re.findall(r"^ +(\d+) .* ([\d.]+) %$", text, re.MULTILINE)
    return {int(workers): float(efficiency) for workers, efficiency in rows}


def run_scaling(lockstep: Run, tmp_path: Path, workers: str) -> None:
    file = tmp_path / "scaling.json"
    result = lockstep(
        "bench", "scaling", "llama", "tiny", *CPU, "--workers", workers, "--steps", "6", "--json", str(file)
    )
    assert result.code == 0, result.text
    figures = json.loads(file.read_text())
    assert figures["versions"]["torch"] == torch.__version__
    found = figures["workers"]
    wanted = [int(count) for count in workers.split(",")]
    assert [each["workers"] for each in found] == wanted
    assert list(shown(result.out)) == wanted
    assert shown(result.out)[1] == 100.0
    first = found[0]["samples_per_second"]
    for each in found:
        assert each["efficiency"] == pytest.approx(each["samples_per_second"] / each["workers"] / first)
        assert each["tokens_per_second"] == pytest.approx(64 * each["samples_per_second"])
        assert each["step_ms"] == pytest.approx(1e3 * 4 * each["workers"] / each["samples_per_second"])


@pytest.mark.ranks
def test_scaling_by_real_launches(lockstep: Run, tmp_path: Path) -> None:
    run_scaling(lockstep, tmp_path, "1,2")


@pytest.mark.ranks
@pytest.mark.slow
def test_scaling_to_four_workers(lockstep: Run, tmp_path: Path) -> None:
    """Contract item 169."""
    run_scaling(lockstep, tmp_path, "1,2,4")


def wait_until(happened: Callable[[], object], what: str, seconds: float = 200.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_is_asked_to_end_leaves_nobody_behind(tmp_path: Path, number: int, code: int) -> None:
    """To the bench alone, as `kill` and batch systems do it; a run that it has started hears of it."""
    command = [sys.executable, "-m", "lockstep", "bench", "scaling", "llama", "tiny", *CPU, "--workers=1,2"]
    process = subprocess.Popen(
        [*command, "--steps=100000"], env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: list(tmp_path.glob("lockstep-bench-*/run-1/events.jsonl")), "the run has begun")
        started = children(process.pid)
        assert started
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, said
    assert "Traceback" not in said
    wait_until(lambda: not any(map(psutil.pid_exists, started)), "all have ended")
    assert not list(tmp_path.glob("lockstep-bench-*"))
