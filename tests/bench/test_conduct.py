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
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.bench import busy, drive, scaling
from lockstep.bench.scaling import Point, command_words, counts, point
from lockstep.config.load import load
from lockstep.engine import micro_batch
from lockstep.errors import ConfigError, LockstepError, Stopped
from lockstep.launch import link
from lockstep.runtime import devices, hardware, signals
from lockstep.runtime.memory_limits import Bounds
from tests.conftest import Outcome

Run = Callable[..., Outcome]
CPU = ("--device", "cpu", "--anyway")


@pytest.mark.parametrize("family", ["llama", "mlm", "llada", "ad"])
def test_a_bench_of_every_family(lockstep: Run, tmp_path: Path, family: str) -> None:
    file = tmp_path / "figures.json"
    result = lockstep("bench", family, "tiny", *CPU, "--steps", "4", "--json", str(file))
    assert result.code == 0, result.text
    tree = json.loads(file.read_text())
    assert tree["family"] == family
    assert tree["steps"] == 4
    assert {"date", "versions", "settings", "device", "load"} <= tree.keys()
    assert tree["mfu_palm"] is tree["mfu_causal"] is None
    assert 0 < tree["of_measured_peak"] < 1
    assert tree["tokens_per_second"] == pytest.approx(tree["tokens_per_step"] / tree["step_ms"] * 1e3)
    assert f"{tree['tokens_per_second']:,.0f}" in result.out
    found = tree["anatomy"]
    assert sum(found["parts_ms"].values()) == pytest.approx(found["wall_ms"])
    assert 0.3 * found["wall_ms"] < found["sum_of_parts_ms"] <= found["wall_ms"]
    assert all(found["parts_ms"][part] > 0 for part in ("matrix products", "attention", "optimizer and clipping"))
    assert found["parts_ms"]["other"] < 0.05 * found["wall_ms"], found["unnamed_ms"]
    assert not list(tmp_path.glob("runs*"))


def test_padding_is_no_token(lockstep: Run, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ("--steps", "2", "data.documents=padded", "--batch-size", "32", "--json", str(file))
    assert lockstep("bench", "mlm", "tiny", *CPU, *words).code == 0
    assert json.loads(file.read_text())["tokens_per_step"] == pytest.approx(32 * 64 * 0.244, rel=0.5)


def test_what_a_run_measures_first_a_bench_does_too(
    lockstep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The split that fits, the recorded step: else the figures are those of another run."""
    recorded: list[bool] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(drive.graphs, "choose", lambda *_, compiles: recorded.append(compiles))
    monkeypatch.setattr(drive, "product_flops", lambda *_: 1e12)
    monkeypatch.setattr(micro_batch, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(hardware, "memory_bounds", lambda _: Bounds(0, 80 << 30, "the card has"))
    monkeypatch.setattr(hardware, "peak_memory_bytes", lambda _: 1 << 30)
    words = ("--steps", "2", "--batch-size", "auto:3", "training.grad_accum_nums=4", "--json", str(tmp_path / "f.json"))
    assert lockstep("bench", "llama", "tiny", *CPU, *words).code == 0
    tree = json.loads((tmp_path / "f.json").read_text())
    assert tree["batch"] == "12 rows x 1 x 64 (auto)"
    assert tree["rows_per_step"] == 12
    assert recorded == [True]


def test_slow_products_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without a unit for bf16 took minutes for large products, and the bench with it."""
    measured: list[int] = []

    def rate_of(rate: float) -> Callable[..., float]:
        return lambda _device, _dtype, count, *_: measured.append(count) or rate

    for rate, wanted in ((7e8, [256]), (4e10, [256, 1024])):
        measured.clear()
        monkeypatch.setattr(drive, "_product_flops", rate_of(rate))
        assert drive.product_flops(torch.device("cpu"), "bf16") == rate
        assert measured == wanted


@pytest.mark.parametrize("kind", ["fp8", "fp8-rowwise"])
def test_float8_is_planned_only_for_a_gpu(lockstep: Run, kind: str) -> None:
    words = ("train", "llama", "tiny", "--precision", kind, "--dry-run")
    refused = lockstep(*words, "--device", "cpu")
    assert refused.code == 2
    assert "multiplies float8 numbers" in refused.err
    planned = lockstep(*words, "--device", "cuda")
    assert planned.code == 0
    assert f"({kind}, GPU)" in planned.out


def test_a_busy_cpu_is_refused(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 1.0, 1.0))
    for words in (("bench", "llama", "tiny"), ("bench", "scaling", "llama", "tiny")):
        result = lockstep(*words, "--device", "cpu")
        assert result.code == 1
        assert "this machine is busy: the load average is 1000.0" in result.err
        assert "--anyway" in result.err
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert busy.check_quiet([], anyway=False) == []


def test_a_busy_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    holder = devices.Holder(os.getpid(), "python train.py", 5 << 30)
    monkeypatch.setattr(devices, "holders", lambda _: [holder])
    assert busy.check_quiet([0], anyway=False) == []  # that is ourselves
    other = devices.Holder(os.getpid() + 1, "python train.py", 5 << 30)
    monkeypatch.setattr(devices, "holders", lambda _: [other])
    with pytest.raises(LockstepError, match="GPU 0 is in use: pid"):
        busy.check_quiet([0], anyway=False)
    assert len(busy.check_quiet([0], anyway=True)) == 1


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
        (("bench", "llama", "tiny", "--gpus", "2"), 2, "system.gpus: a bench is of one device"),
        (("bench", "llama", "tiny", "--mode", "fsdp"), 2, "system.mode: a bench is of one device"),
        (("bench", "scaling", "llama", "tiny", "--gpus", "2"), 2, "system.gpus: --workers says how many"),
        (("bench", "llama", "no_preset"), 2, "no preset or file"),
        (("bench", "llama", "tiny", "--device", "cuda"), 2, "cuda was asked for"),
        (("bench", "llama", "tiny", "model.vocab_size=5"), 2, "5 ids leave none"),
        (("bench", "scaling", "llama", "tiny", "--workers", "1,two"), 2, "expected numbers of workers"),
        (("bench", "scaling", "llama", "tiny", "--workers", "0"), 2, "expected numbers of workers"),
        (("bench", "scaling", "llama", "tiny", "--workers="), 2, "expected numbers of workers"),
    ],
)
def test_refusals(lockstep: Run, words: tuple[str, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # also where there is a GPU
    device = () if "cuda" in words else ("--device", "cpu")
    result = lockstep(*words, *(device if len(words) > 1 else ()), *(["--anyway"] if len(words) > 1 else []))
    assert result.code == code, result.text
    assert said in result.err


def test_too_many_workers_for_the_gpus(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    card = devices.Gpu(0, "GPU-0", "NVIDIA H200", 141 << 30, 140 << 30, 0)
    monkeypatch.setattr(devices, "check_asked", lambda _: None)
    for there, hint in (([], "  try: --device cpu\n"), ([card] * 2, "  try: --workers 1,2, or --device cpu\n")):
        monkeypatch.setattr(devices, "visible_gpus", lambda there=there: there)
        result = lockstep("bench", "scaling", "llama", "tiny", "--device", "cuda", "--workers", "1,3")
        assert (result.code, hint in result.err) == (2, True), result.err


def test_figures_go_where_a_link_leads_and_into_what_is_no_file(lockstep: Run, tmp_path: Path) -> None:
    """A device that was named is still one afterwards, and a reader of a pipe gets the figures."""
    words = ("bench", "llama", "tiny", *CPU, "--steps", "1", "--json")
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
    assert "one of several workers" in result.err


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


def test_efficiency_by_hand() -> None:
    """Twice the workers at the same step time is 100 %; warm-up steps count for nothing."""
    slow = [{"seconds": 9.0, "tokens": 64}] * scaling.WARM_UP
    one = point([*slow, *[{"seconds": 0.5, "tokens": 64}] * 3], workers=1, samples=4)
    two = point([*slow, *[{"seconds": 0.5, "tokens": 128}] * 3], workers=2, samples=8)
    late = point([*slow, *[{"seconds": 1.0, "tokens": 128}] * 3], workers=2, samples=8)
    assert one.samples_per_second == 8.0
    assert two.tokens_per_second == 256
    assert two.efficiency(one) == 1.0
    assert late.efficiency(one) == 0.5
    with pytest.raises(LockstepError, match="told of 5 steps"):
        point(slow, workers=1, samples=4)


def test_a_token_is_not_passed_on(tmp_path: Path) -> None:
    config = load("llama", preset="tiny").config
    settings = [("hf-token", "hf_secret"), ("data.hf_token", "hf_secret"), ("seed", "7"), ("deterministic", None)]
    words = command_words(["llama", "tiny"], config, settings, folder=tmp_path, cpu=True)
    assert "hf_secret" not in " ".join(words.all)
    assert words.all[-2:] == ["--seed=7", "--deterministic"]
    assert "--system.threads=1" in words.all
    assert "--system.threads=1" not in command_words([], config, [], folder=tmp_path, cpu=False).all


def test_without_a_gpu_workers_of_the_cpu_are_measured(lockstep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(words: scaling.Words, *_: Any, workers: int, **__: Any) -> Point:
        started.append(words.all)
        return Point(workers, 1.0, 4 * workers, 64.0)

    monkeypatch.setattr(scaling, "run", run)
    monkeypatch.setattr(devices, "visible_gpus", list)
    line = "No GPUs detected: workers of the CPU are measured\n"
    for flags in ([], ["--device", "auto"], ["--device", "cpu"]):
        result = lockstep("bench", "scaling", "llama", "tiny", "--workers", "1,2", "--anyway", *flags)
        assert (result.code, line in result.out) == (0, "cpu" not in flags), result.text
    assert {words[-1] for words in started} == {"--device=cpu"}
    assert len(started) == 6


def test_a_run_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("llama", preset="tiny").config
    words = command_words(["llama", "nothing"], config, [("seed", "a b")], folder=tmp_path, cpu=True)
    with pytest.raises(LockstepError, match=r"2 workers ended with code 2:(.|\n)*no preset or file") as caught:
        scaling.run(words, config, workers=2, steps=1, folder=tmp_path)
    assert caught.value.hint == "lockstep train llama nothing --gpus=2 '--seed=a b'"
    assert caught.value.exit_code == 2
    full = f"{tmp_path}/cache: building the cache failed: No space left on device"
    answers = (137, f"first\n{full}\n[GPU0]   log: {tmp_path}/workers-2/output.txt\n\nlast")
    with monkeypatch.context() as patch:
        patch.setattr(scaling, "_ended", lambda _: answers)
        with pytest.raises(LockstepError, match="No space left") as caught:
            scaling.run(words, config, workers=2, steps=1, folder=tmp_path)
    assert caught.value.what.splitlines()[1:] == [f"    {line}" for line in (
        "first", full.replace(str(tmp_path), f"{tmp_path.parent}/..."), "", "last")]  # fmt: skip
    assert caught.value.exit_code == 1
    monkeypatch.setattr(sys, "executable", "/bin/true")  # a control: a run that tells nothing is no figure
    with pytest.raises((LockstepError, OSError)):
        scaling.run(words, config, workers=1, steps=1, folder=tmp_path)


def shown(text: str) -> dict[int, float]:
    rows = re.findall(r"^ +(\d+) +([\d,.]+) +([\d,]+) +([\d.]+) %$", text, re.MULTILINE)
    return {int(workers): float(efficiency) for workers, _, _, efficiency in rows}


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
        wait_until(lambda: list(tmp_path.glob("lockstep-bench-*/workers-1/events.jsonl")), "the run has begun")
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


def test_a_signal_is_heard_while_a_run_talks() -> None:
    """It talks without a pause, so that hardly any signal comes while its reader waits."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    until = time.monotonic() + 20
    talking = f"import time\nwhile time.monotonic() < {until}: print('x' * 4000)"
    with signals.listening():
        timer.start()
        with pytest.raises(Stopped):
            scaling._ended([sys.executable, "-c", talking])
    assert time.monotonic() < until - 5


def test_points_know_their_share() -> None:
    assert Point(4, 1.0, 8, 64.0).as_json(Point(1, 1.0, 4, 32.0))["efficiency"] == 0.5
