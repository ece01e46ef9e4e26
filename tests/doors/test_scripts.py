"""The shell scripts and the interpreters that run them (contract items 45-48, 70, 157, 172, 176)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import compat
from lockstep.report.logs import close_logging
from lockstep.runtime import devices
from lockstep.runtime.devices import idlest_gpu, visible_gpus
from tests.conftest import Outcome
from tests.doors.conftest import MODEL_CHECK
from tests.doors.test_model_check import TAIL
from tests.doors.windows import make

ROOT = MODEL_CHECK.parents[1]
TELL_TALE = f"""#!/bin/sh
case "$1" in
    -c | -m) exec {sys.executable} "$@" ;;
    *) echo "CVD=$CUDA_VISIBLE_DEVICES RANK=$GPU_RANK" "$@" ;;
esac
"""
Smi = Callable[..., Path]


@pytest.fixture
def python3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A python3 first on PATH that tells how a script was started instead of starting it."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "python3").write_text(TELL_TALE, encoding="utf-8")
    (folder / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def bash(*command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a shell of its own."""
    return subprocess.run(
        ["bash", *command], capture_output=True, text=True, cwd=cwd, env=os.environ | variables, timeout=120
    )


def test_train_gpu_sets_both_variables_and_passes_the_rest(python3: Path) -> None:
    script = str(MODEL_CHECK / "train_gpu.sh")
    answer = bash(script, "3", "--debug", "--name", "two words")
    assert answer.stdout.strip() == f"CVD=3 RANK=3 {MODEL_CHECK}/pretrain_main.py --debug --name two words", (
        answer.stderr
    )
    assert bash(script).stdout.startswith("CVD=0 RANK=0 ")
    assert bash(script, "0,2").stdout.startswith("CVD=0,2 RANK=0,2 ")


@pytest.mark.parametrize("word", ["three", "my_config.json", "0;", "1,", "model.num_layers=2", ""])
def test_train_gpu_refuses_what_is_no_number(python3: Path, word: str) -> None:
    answer = bash(str(MODEL_CHECK / "train_gpu.sh"), word, "--debug")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"got '{word}', expected the number of a GPU first" in answer.stderr


def test_train_auto_gpu_takes_the_idlest(python3: Path, smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi((0, 90, 1000), (5, 3, 1000), (7, " 44", 70000))
    answer = bash(str(MODEL_CHECK / "train_auto_gpu.sh"), "--debug")
    assert answer.stdout.splitlines() == [
        "Using GPU 5 (lowest utilization)",
        f"CVD=5 RANK=5 {MODEL_CHECK}/pretrain_main.py --debug",
    ], answer.stderr


ONLY_DOCUMENTED = """#!/bin/sh
[ "$*" = "--query-gpu=index,utilization.gpu --format=csv,noheader,nounits" ] || exit 6
printf '0, 91\\n4, 7\\n5, 12\\n'
"""


def test_train_auto_gpu_with_an_nvidia_smi_that_knows_the_documented_query_only(python3: Path) -> None:
    (python3 / "nvidia-smi").write_text(ONLY_DOCUMENTED, encoding="utf-8")
    (python3 / "nvidia-smi").chmod(0o755)
    answer = bash(str(MODEL_CHECK / "train_auto_gpu.sh"))
    assert answer.stdout.splitlines()[0] == "Using GPU 4 (lowest utilization)", answer.stderr
    assert answer.stdout.splitlines()[1].startswith("CVD=4 RANK=4 ")


def test_train_auto_gpu_without_nvidia_smi(python3: Path) -> None:
    for tool in ("bash", "sh", "dirname", "readlink", "cat"):
        (python3 / tool).symlink_to(str(shutil.which(tool)))
    answer = bash(str(MODEL_CHECK / "train_auto_gpu.sh"), PATH=str(python3))
    assert answer.returncode == 1
    assert "nvidia-smi is not on PATH" in answer.stderr
    assert "Using GPU" not in answer.stdout


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(0, 90, 1), (1, 10, 1), (2, 20, 1)], 1),
        ([(0, 0, 100), (1, 0, 300), (2, 0, 200)], 1),  # a tie: the most free memory
        ([(2, 0, 100), (0, 0, 100), (1, 0, 100)], 0),  # a full tie: the lowest number
        ([(0, "9", 1), (1, "10", 1)], 0),  # as numbers, not as text
        ([(0, "   50", 1), (10, " 5 ", 1)], 10),
        ([(0, "[N/A]", 1), (1, 1, 1)], 0),
    ],
)
def test_the_idlest_gpu(smi: Smi, rows: list[tuple[int, object, object]], best: int) -> None:
    smi(*rows)
    assert idlest_gpu() == best


@pytest.mark.parametrize("count", [0, 1, 4, 8, 10])
@pytest.mark.parametrize(("visible", "expected"), [(None, None), ("", 0), ("0", 1), ("-1", 0), ("0,99,1", 1)])
def test_visible_gpus(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, expected: int | None
) -> None:
    smi(*((index, index, 1000) for index in range(count)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = visible_gpus()
    assert len(found) == (count if expected is None else min(expected, count))
    assert [gpu.index for gpu in found] == list(range(len(found)))


def test_visible_gpus_by_uuid_in_the_given_order(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi((0, 0, 1), (1, 0, 1), (2, 0, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0002,GPU-0000")
    assert [gpu.index for gpu in visible_gpus()] == [2, 0]
    assert visible_gpus()[0].free_bytes == 1 << 20


def test_every_script_finds_its_folder(tmp_path: Path) -> None:
    """Also by a link, and where CDPATH is exported: `cd` then prints where it went, into what is taken for a path.

    A stand-in for Python says what it was asked, and its own name where setup/environment.py would say which to use."""
    stand_in = '#!/bin/sh\ncase "$1" in */setup/environment.py) [ -f "$1" ] && echo "$0" ;; *) echo "$@" ;; esac\n'
    for name in ("python3.13", "python3"):
        (tmp_path / name).write_text(stand_in, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    scripts = [ROOT / ".ci" / "run", *ROOT.glob("*.sh"), *ROOT.glob("doors/*/[!p]*.sh")]  # python.sh is sourced by them
    assert len(scripts) >= 11
    for number, script in enumerate(scripts):
        (link := tmp_path / str(number)).symlink_to(script)
        for called in (link, script):
            place = called.parents[1]
            variables = {"CDPATH": str(place), "PATH": f"{tmp_path}:/usr/bin:/bin"}
            answer = bash(str(called.relative_to(place)), cwd=place, **variables)
            assert (answer.returncode, answer.stderr) == (0, ""), called


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts as `lockstep init llama` puts them."""
    folder = tmp_path_factory.mktemp("copied")
    compat.init("llama", folder)
    return folder


def test_each_copied_script_answers_help_without_an_active_environment(copied: Path) -> None:
    """Shell scripts find the interpreter that `init` noted; PATH has a python3 without lockstep."""
    scripts = sorted(copied.glob("*.sh"))
    assert [script.name for script in scripts] == [
        "python.sh",
        "run.sh",
        "run_training.sh",
        "train_auto_gpu.sh",
        "train_gpu.sh",
    ]
    for script in scripts[1:]:
        answer = bash(str(script), "--help", PATH="/usr/bin:/bin")
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith("usage: ")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with nothing installed."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python3"


def test_lockstep_alone_makes_no_interpreter(bare_python: Path, tmp_path: Path) -> None:
    """PYTHONPATH gives lockstep to a python3 that has nothing else, or all but torch; `init` has noted a good one."""
    compat.init("llama", tmp_path)
    good = tmp_path / "good"
    good.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "good $@"\n', encoding="utf-8")
    good.chmod(0o755)
    (tmp_path / ".lockstep-python").write_text(str(good), encoding="utf-8")
    (packages,) = bare_python.parents[1].glob("lib/python3*/site-packages")
    path = f"{bare_python.parent}:/usr/bin:/bin"
    for given in ("nothing", "pydantic"):
        (packages / f"{given}.py").touch()
        answer = bash(str(tmp_path / "run.sh"), "--dry-run", PATH=path, PYTHONPATH=str(ROOT / "src"))
        assert answer.stdout == "good -m lockstep.compat run.sh --dry-run\n", (given, answer.stderr)


def test_an_interpreter_without_the_package_prints_the_install_command(bare_python: Path, tmp_path: Path) -> None:
    for script in ("pretrain_main.py", "prepare_dataset.py"):
        command = [str(bare_python), "-E", str(MODEL_CHECK / script), "--help"]  # -E: test.sh may have set PYTHONPATH
        answer = subprocess.run(command, capture_output=True, text=True)
        assert answer.returncode == 1
        assert f".venv/bin/python -m pip install -r {ROOT}/requirements.lock -e {ROOT}" in answer.stderr
        assert "Traceback" not in answer.stderr
    compat.init("llama", tmp_path)
    (tmp_path / ".lockstep-python").unlink()
    for tool in ("dirname", "readlink", "cat"):
        (bare_python.parent / tool).symlink_to(str(shutil.which(tool)))
    answer = subprocess.run(
        [str(shutil.which("bash")), str(tmp_path / "run.sh")],
        capture_output=True,
        text=True,
        env={"PATH": str(bare_python.parent)},
    )
    assert answer.returncode == 1
    assert "-m pip install lockstep-train" in answer.stderr, "install_hint.py speaks outside of a checkout too"


def test_an_interpreter_without_a_dependency_prints_the_install_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    close_logging()
    monkeypatch.setitem(sys.modules, "lockstep.config.load", None)  # what an import of it then raises: ImportError
    monkeypatch.setattr("lockstep.compat.resolve", lambda *_, **__: __import__("a_package_that_is_not_there"))
    assert compat.main("pretrain_main.py", []) == 1
    said = capsys.readouterr().err
    assert "a_package_that_is_not_there" in said
    assert f"{sys.executable} -m pip install -r {ROOT}/requirements.lock" in said


def test_run_sh_under_lang_c_in_a_pipe(tmp_path: Path) -> None:
    """The real thing, once: valid UTF-8, no colour, the documented lines, a status that survives."""
    variables = {
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONIOENCODING": "",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    command = [
        "bash",
        str(MODEL_CHECK / "run.sh"),
        "--config",
        "test_config.json",
        "--max-steps",
        "3",
        "--device",
        "cpu",
    ]
    answer = subprocess.run(command, capture_output=True, cwd=tmp_path, env=os.environ | variables, timeout=120)
    text = answer.stdout.decode("utf-8", errors="strict")
    assert answer.returncode == 0, text + answer.stderr.decode()
    assert "\x1b" not in text
    assert len(re.findall(rf"^\[GPU0\] {TAIL}$", text, re.MULTILINE)) == 3
    assert text.splitlines()[-1] == "[SUCCESS] All GPU training completed successfully"
    shutil.rmtree(re.findall(r"Log directory: (/tmp/model_check_logs_\d+_\d+)", text)[0])


def test_a_read_only_working_directory_fails_before_training(tmp_path: Path) -> None:
    """Root ignores modes: a read-only bind mount in a mount namespace of its own."""
    folder = tmp_path / "ro"
    folder.mkdir()
    freeze = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", freeze, str(folder), "true"], capture_output=True).returncode:
        pytest.skip("CANNOT MAKE A READ-ONLY FOLDER HERE: item 172 is not shown (needs unshare -m)")
    command = [
        sys.executable,
        "-m",
        "lockstep.compat",
        "pretrain_main.py",
        "--config",
        "test_config.json",
        "--device",
        "cpu",
    ]
    answer = subprocess.run(
        ["unshare", "-m", "sh", "-c", freeze, str(folder), *command], capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 73, answer.stdout + answer.stderr
    assert "Read-only file system" in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stdout + answer.stderr
    assert "Step [" not in answer.stdout
    assert "Preparing dataset" not in answer.stdout


class FakeNvml:
    """As much of pynvml as is used: two cards, of which one does not tell its utilisation."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, free=(10 + handle) << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle:
            raise self.NVMLError
        return SimpleNamespace(gpu=37)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA Fake"


def test_nvml_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    second, first = visible_gpus()
    assert (first.index, first.name, first.utilisation, first.memory_bytes) == (0, "NVIDIA Fake", 37, 80 << 30)
    assert (second.index, second.utilisation, second.free_bytes) == (1, 0, 11 << 30)
    assert nvml.open == 0


def test_without_a_driver_nvidia_smi_is_asked(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = devices._ask_nvml
    smi((3, 5, 7))
    monkeypatch.setattr(devices, "_ask_nvml", ask)  # the real one, which the fixture has put to sleep
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(driver=False))
    assert [gpu.index for gpu in visible_gpus()] == [3]


@pytest.mark.parametrize(
    ("script", "words", "workers"),
    [
        ("pretrain_main.py", ["--preset", "tiny"], ""),
        ("run.sh", ["--preset", "tiny"], " of 4 workers"),
        ("prepare_dataset.py", ["--preset", "tiny"], ""),
        ("train.py", [], ""),
        ("launch_training.sh", ["2", "windows", "--model_name", "lockstep/llada-tiny"], " of 2 workers"),
        ("run_multi_gpu_training.sh", [], " of 4 workers"),
    ],
)
def test_a_dry_run_counts_the_workers_of_its_script(
    door: Callable[..., Outcome], in_dir: Path, gpus: Callable[[int], None], script: str, words: list[str], workers: str
) -> None:
    gpus(4)
    make(in_dir / "windows")
    outcome = door(script, *words, "--dry-run")
    assert outcome.code == 0, outcome.err
    assert re.search(rf"^tokens per step   [\d,]+{workers}$", outcome.out, re.MULTILINE)
    assert [path.name for path in in_dir.iterdir()] == ["windows"]
