"""lockstep doctor: each check meets the fault it is for, says what to do, and tells no secret."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lockstep import doctor, home
from lockstep.doctor import Check
from lockstep.runtime import collective, devices
from lockstep.runtime.collective import Trial
from tests.fake_smi import gpu, plant

WELL = Trial("gloo", torch="2.13.0+cpu", agreed=True, seconds=1.0)
CANARY = "hf_canary_doctor_0123456789"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, in_dir: Path) -> Path:
    """A machine without GPUs, where torch and the collective are well without being asked; an empty folder."""
    monkeypatch.setattr(collective, "attempt", lambda backend: Trial(backend, torch="2.13.0+cpu", agreed=True))
    monkeypatch.setattr(devices, "visible_gpus", list)
    monkeypatch.delenv("DATASET_CACHE_DIR", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(in_dir / "hub"))
    return in_dir


def bad(check: Check, state: str, *words: str) -> None:
    """It is in that state, says these words, and has a remedy."""
    assert check.state == state
    assert check.remedy
    for word in words:
        assert word in f"{check.found} {check.remedy}"


# ------------------------------------------------------------------------------------------------ the whole


@pytest.mark.ranks
def test_a_healthy_machine(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test here with a real torch: two processes that really add up."""
    monkeypatch.setattr(devices, "visible_gpus", list)
    monkeypatch.setattr(doctor, "shared_memory", lambda _: Check("shared memory", "ok", "enough"))
    text, code = doctor.doctor()
    assert code == 0, text
    assert "gloo all-reduce" in text
    assert "2 processes agree" in text
    assert list(in_dir.iterdir()) == [], "looking leaves nothing behind"


def test_one_line_a_check_and_a_code(quick: Path) -> None:
    text, code = doctor.doctor()
    *lines, empty, summary = text.splitlines()
    assert code == 0
    assert empty == ""
    assert len(lines) >= 12
    assert all(line.startswith(("ok    ", "warn  ")) for line in lines)
    assert summary.startswith("0 failed")


def test_json(quick: Path) -> None:
    (quick / "runs").write_text("a file in the way", encoding="utf-8")
    text, code = doctor.doctor(json=True)
    record = json.loads(text)
    assert code == 1
    assert record["ok"] is False
    failed = [check for check in record["checks"] if check["state"] == "FAIL"]
    assert [check["name"] for check in failed] == ["output folder"]
    assert failed[0]["remedy"].startswith("--out DIR")
    assert {"name", "state", "found", "remedy"} == set(failed[0])


def test_no_secret_is_told(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("DATASET_CACHE_DIR", f"/proc/{CANARY}")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:1/{CANARY}")
    monkeypatch.setattr(collective, "attempt", lambda backend: Trial(backend, error=f"token {CANARY} \x1b[31m"))
    for as_json in (False, True):
        text, code = doctor.doctor(json=as_json, network=True)
        assert code == 1
        assert CANARY not in text
        assert "\x1b" not in text
    assert "set" in doctor.token().found


# ------------------------------------------------------------------------------------------------ software


def test_an_old_python() -> None:
    bad(doctor.python((3, 9, 1)), "FAIL", "3.9.1", "Python 3.11")
    assert doctor.python().state == "ok"


def test_packages_that_are_missing() -> None:
    needed, optional = doctor.packages(lambda module: module not in ("psutil", "rich", "pynvml"))
    bad(needed, "FAIL", "psutil", "-m pip install psutil")
    bad(optional, "warn", "rich (progress bar)", "pip install nvidia-ml-py rich")
    assert [check.state for check in doctor.packages()] == ["ok"]
    for package in (*doctor.NEEDED, *doctor.OPTIONAL):  # the names are those pip knows
        assert importlib.metadata.version(package)


@pytest.mark.parametrize(
    ("source", "says"),
    [("raise ImportError('libcudart.so.99 is missing')", "libcudart.so.99 is missing"), ("import os; os._exit(9)", "")],
)
def test_a_torch_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    (tmp_path / "torch.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trial = collective.attempt("gloo")
    bad(doctor.torch(trial, []), "FAIL", "cannot be imported", says, "pip install 'torch")
    bad(doctor.exchange(trial), "FAIL", "torch is missing")


def test_an_import_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(300)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trial = collective.attempt("gloo", timeout=1.0)
    bad(doctor.torch(trial, []), "FAIL", "no result in 1 s")


def test_torch_against_the_gpus() -> None:
    gpus = [devices.Gpu(at, f"GPU-{at}", "Fake", 1, 1, 0) for at in range(2)]
    bad(doctor.torch(WELL, gpus), "FAIL", "CPU only, and there are 2 GPUs")
    built = Trial("gloo", torch="2.13.0", cuda="13.0", devices=1)
    bad(doctor.torch(built, gpus), "FAIL", "sees 1 of 2 GPUs", "driver")
    bad(doctor.torch(Trial("gloo", torch="2.4.1"), []), "FAIL", "too old")
    assert doctor.torch(Trial("gloo", torch="2.13.0", hip="7.0", devices=2), gpus) == Check(
        "torch", "ok", "2.13.0, ROCm 7.0"
    )
    assert doctor.torch(WELL, []).state == "ok"


CHILDREN = {
    "a wrong sum": 'import json; print(json.dumps({"torch": "2.13.0"})); print(json.dumps({"agreed": False}))',
    "one that dies": (
        'import json, os, sys; print(json.dumps({"torch": "2.13.0", "agreed": sys.argv[1] == "0"}), flush=True)\n'
        "if sys.argv[1] == '1': sys.exit('Connection closed by peer')"
    ),
    "one that hangs": 'import time; print(\'{"torch": "2.13.0"}\', flush=True); time.sleep(60)',
}


@pytest.mark.parametrize("fault", CHILDREN)
def test_an_exchange_that_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "CHILD", CHILDREN[fault])
    trial = collective.attempt("gloo", timeout=8.0 if fault == "one that hangs" else 60.0)
    says = {"a wrong sum": "wrong", "one that dies": "Connection closed", "one that hangs": "no result in 8 s"}[fault]
    bad(doctor.exchange(trial), "FAIL", says, "/etc/hosts")
    assert doctor.torch(trial, []).state == "ok", "torch is not to blame"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_real_gloo_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_card0")
    bad(doctor.exchange(collective.attempt("gloo")), "FAIL", "no_such_card0")


# ------------------------------------------------------------------------------------------------ devices


def test_gpus_their_driver_and_who_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = {1: [{"pid": 999_999_999, "used_memory": 2048}]}
    plant(tmp_path / "bin", monkeypatch, [gpu(0), gpu(1)], apps=apps)
    gpus = devices.visible_gpus()
    assert doctor.gpu_list(gpus) == Check("devices", "ok", "2 x NVIDIA Fake (80 GiB): GPU 0, 1")
    assert doctor.driver() == Check("driver", "ok", "NVIDIA 999.1")
    bad(doctor.in_use(gpus), "warn", "GPU 1 is in use: pid 999999999 holds 2.0 GiB", "--gpus auto")
    assert doctor.in_use(gpus[:1]).state == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bad(doctor.gpu_list(devices.visible_gpus()), "warn", "hidden by CUDA_VISIBLE_DEVICES", "unset")


def test_a_driver_that_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "bin", monkeypatch, [])
    bad(doctor.gpu_list([]), "FAIL", "finds no GPU")
    bad(doctor.driver(), "warn", "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpu_list([]) == Check("devices", "ok", "no GPU: training runs on the CPU")


def test_several_gpus_also_try_nccl(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def attempt(backend: str) -> Trial:
        tried.append(backend)
        return Trial(backend, torch="2.13.0", cuda="13.0", devices=2, agreed=backend == "gloo", error="no P2P")

    monkeypatch.setattr(collective, "attempt", attempt)
    monkeypatch.setattr(devices, "visible_gpus", lambda: [devices.Gpu(at, "GPU-x", "Fake", 1, 1, 0) for at in (0, 1)])
    text, code = doctor.doctor()
    assert tried == ["gloo", "nccl"]
    assert code == 1
    (line,) = [line for line in text.splitlines() if line.startswith("FAIL")]
    assert "nccl all-reduce" in line
    assert "no P2P; try: NCCL_DEBUG=INFO" in line


# ------------------------------------------------------------------------------------------------ places


def test_a_cache_that_cannot_be_written(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.cache().state == "ok"
    (quick / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("DATASET_CACHE_DIR", str(quick / "file" / "cache"))
    bad(doctor.cache(), "FAIL", "is not a folder", "DATASET_CACHE_DIR")
    monkeypatch.setenv("DATASET_CACHE_DIR", "/proc/nothing")
    bad(doctor.cache(), "FAIL", "/proc/nothing", "cannot be written")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT ROOT: that doctor sees a read-only output folder is not shown")
def test_a_read_only_folder(quick: Path) -> None:
    folder = quick / "runs"
    folder.mkdir()
    assert doctor.output(folder).state == "ok"
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("NO MOUNT ALLOWED HERE: that doctor sees a read-only output folder is not shown")
    try:
        bad(doctor.output(folder), "FAIL", "Read-only", "--out DIR")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_little_room(tmp_path: Path) -> None:
    assert doctor.disk(tmp_path, free=20 << 30).state == "ok"
    bad(doctor.disk(tmp_path, free=5 << 30), "warn", "5.0 GiB free", "--out DIR")
    bad(doctor.disk(tmp_path / "not" / "there", free=1 << 20), "FAIL", "1 MiB free")
    assert doctor.shared_memory(tmp_path, total=8 << 30).state == "ok"
    bad(doctor.shared_memory(tmp_path, total=64 << 20), "warn", "64 MiB", "--shm-size")
    bad(doctor.shared_memory(tmp_path, total=64 << 10), "FAIL", "--shm-size")
    bad(doctor.shared_memory(tmp_path / "none"), "warn", "no ", "mount -t tmpfs")


# ------------------------------------------------------------------------------------------------ network


def test_ports_and_names() -> None:
    assert doctor.port().state == "ok"
    bad(doctor.port("203.0.113.7"), "FAIL", "203.0.113.7")
    assert doctor.host_name("localhost").found == "localhost is 127.0.0.1"
    bad(doctor.host_name("no such name.invalid"), "warn", "/etc/hosts")


def test_the_token_is_there_or_not(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.token().found.startswith("not set; only gated")
    (quick / "hub").mkdir()
    (quick / "hub" / "token").write_text(CANARY, encoding="utf-8")
    assert doctor.token().found.startswith("not set; a token is in")
    monkeypatch.setenv("HF_TOKEN", f"{CANARY}\n")
    bad(doctor.token(), "warn", "line ends")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    assert doctor.token() == Check("HF_TOKEN", "ok", "set")


@pytest.fixture
def answering() -> Iterator[tuple[str, list[int]]]:
    """A server that answers with the status a test puts into the list."""
    codes = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(codes[0])
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", codes
    server.shutdown()
    server.server_close()


@pytest.mark.network
def test_the_hub(answering: tuple[str, list[int]]) -> None:
    address, codes = answering
    for codes[0], state in ((200, "ok"), (401, "ok"), (503, "FAIL")):
        assert doctor.hub(address).state == state
    bad(doctor.hub("http://127.0.0.1:1"), "FAIL", "does not answer", "HF_HUB_OFFLINE=1")
    bad(doctor.hub("file:///etc/passwd"), "FAIL", "not an http address")


def test_the_hub_is_asked_only_on_demand(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "hub", lambda _: Check("hub", "FAIL", "asked", "x"))
    assert doctor.doctor()[1] == 0
    assert doctor.doctor(network=True)[1] == 1


def test_with_gpus_the_bare_command_points_to_their_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "lockstep check" not in home.home()
    plant(tmp_path / "bin", monkeypatch, [gpu(0), gpu(1)])
    assert "\n  lockstep check --quick\n" in home.home()
