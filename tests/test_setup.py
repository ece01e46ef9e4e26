"""run.sh and test.sh set themselves up: once, in .venv only, and again after an interruption (contract item 70)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock")


def load_script(name: str) -> ModuleType:
    """A script of setup/ with its own folder first on the path, as Python starts it."""
    spec = importlib.util.spec_from_file_location(f"setup_{name}", ROOT / "setup" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "setup"))
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup/environment.py on a checkout of its own, with a pip that only notes what it was asked."""
    module = load_script("environment")
    for name in (*LOCKS, "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    asked: list[tuple[str, ...]] = []

    def make_venv() -> None:
        (tmp_path / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".venv" / "bin" / "python").touch()

    monkeypatch.setattr(module, "make_venv", make_venv)
    monkeypatch.setattr(module, "pip", lambda *arguments, **_: asked.append(arguments))
    module.asked = asked
    return module


def prepare(module: ModuleType, *names: str) -> int:
    """How many times pip was called."""
    module.asked.clear()
    module.prepare([module.ROOT / name for name in names])
    return len(module.asked)


def test_a_second_call_installs_nothing(environment: ModuleType) -> None:
    assert prepare(environment, LOCKS[0]) == 2  # the lock, then the checkout itself
    assert prepare(environment, LOCKS[0]) == 0
    assert prepare(environment, *LOCKS) == 1  # the tools come on top
    assert prepare(environment, *LOCKS) == 0
    assert prepare(environment, LOCKS[0]) == 0


def test_a_changed_requirement_is_installed(environment: ModuleType) -> None:
    prepare(environment, *LOCKS)
    lock = environment.ROOT / LOCKS[1]
    lock.write_text(lock.read_text(encoding="utf-8") + "extra==1.0\n", encoding="utf-8")
    assert prepare(environment, *LOCKS) == 1
    assert environment.asked[0] == ("-r", str(lock))


def test_an_interrupted_install_is_done_again(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: str, packages: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "pip", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(environment, LOCKS[0])
    assert prepare(environment, LOCKS[0]) == 2


def test_a_moved_checkout_is_installed_again(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its .venv would go on running the code at the old place."""
    prepare(environment, LOCKS[0])
    moved = environment.ROOT.with_name("moved")
    environment.ROOT.rename(moved)
    for name, path in {"ROOT": moved, "VENV": moved / ".venv", "PYTHON": moved / ".venv/bin/python"}.items():
        monkeypatch.setattr(environment, name, path)
    assert prepare(environment, LOCKS[0]) == 2


def test_an_active_environment_with_everything_is_used_as_it_is(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(sys.prefix)
    if not (own / "bin" / "python").is_file():
        pytest.skip("NOT IN A VIRTUAL ENVIRONMENT: that an active one is used as it is (AB22) is not shown")
    monkeypatch.setenv("VIRTUAL_ENV", str(own))
    assert environment.prepare([environment.ROOT / name for name in LOCKS]) == own / "bin" / "python"
    assert not environment.VENV.exists()
    project = environment.ROOT / "pyproject.toml"
    monkeypatch.setattr(environment, "__file__", str(_planted_environment(environment.ROOT)))
    project.write_text(project.read_text(encoding="utf-8").replace('"rich>=13.9"', '"rich>=9999"'), encoding="utf-8")
    assert environment.prepare([environment.ROOT / LOCKS[0]]) == environment.PYTHON, "too old is not everything"


def _planted_environment(root: Path) -> Path:
    """A copy of the script that reads the copy of pyproject.toml."""
    (root / "setup").mkdir()
    return Path(shutil.copy(ROOT / "setup" / "environment.py", root / "setup" / "environment.py"))


def test_only_the_lines_worth_reading(environment: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = environment.Progress(71)
    for line in (
        "Looking in links: /somewhere",
        "Collecting absl-py==2.5.1 (from -r requirements.lock (line 3))",
        "  Downloading absl_py-2.5.1-py3-none-any.whl.metadata (3.3 kB)",
        "  Downloading absl_py-2.5.1-py3-none-any.whl (135 kB)",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (894.7 MB)",
        "Requirement already satisfied: numpy in ./x",
    ):
        progress.read(line + "\n")
    assert capsys.readouterr().err.splitlines() == ["  downloading torch 2.13.0 (894.7 MB)"]


def test_a_failing_pip_is_shown_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_script("environment")
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\necho Collecting x\necho ERROR: no matching distribution >&2\nexit 3\n", encoding="utf-8"
    )
    fake.chmod(0o755)
    for name, path in {"ROOT": tmp_path, "PYTHON": fake, "LOG": tmp_path / "install.log"}.items():
        monkeypatch.setattr(module, name, path)
    with pytest.raises(module.SetupError, match="no matching distribution") as caught:
        module.pip("x", packages=1)
    assert "exit 3" in str(caught.value)
    assert "no matching distribution" in (tmp_path / "install.log").read_text(encoding="utf-8")


def test_pip_never_leaves_the_venv(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    variables = environment.clean_environment()
    assert "PIP_TARGET" not in variables
    assert (variables["PIP_USER"], variables["PYTHONNOUSERSITE"]) == ("0", "1")
    text = (ROOT / "setup" / "environment.py").read_text(encoding="utf-8") + (ROOT / "run.sh").read_text(
        encoding="utf-8"
    )
    assert "break-system-packages" not in text


def test_no_python_is_a_clear_message(tmp_path: Path) -> None:
    for tool in ("dirname", "readlink", "cat"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    (tmp_path / "python3").write_text("#!/bin/sh\necho Python 3.9.1; exit 1\n", encoding="utf-8")
    (tmp_path / "python3").chmod(0o755)
    command = [str(shutil.which("bash")), str(ROOT / "run.sh")]
    answer = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert answer.returncode == 1
    assert "Python 3.11 or newer" in answer.stderr
    assert "3.9.1" in answer.stderr


def test_the_locks_pin_what_pyproject_asks_for() -> None:
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in LOCKS)
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), "no local paths, URLs or +cpu"
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert len(names) == len(set(names))
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {re.sub(r"[-_.]+", "-", line.partition(">=")[0]) for line in wanted} <= set(names)
    assert "torch==2.13.0" in pins
    assert not any(name.startswith("nvidia-c") for name in names)


@pytest.mark.parametrize("told", ["", '\nvenvPath = "."\nvenv = ".venv"'], ids=["as it is", "bound to a .venv"])
def test_types_are_checked_with_the_running_interpreter(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a clone without .venv (the user's own environment is active) torch is still found."""
    checks = load_script("checks")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = project.replace("[tool.basedpyright]", f"[tool.basedpyright]{told}")
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    package = tmp_path / "src" / "lockstep"
    package.mkdir(parents=True)
    (package / "errors.py").write_text("import torch\n\nx: torch.Tensor = torch.zeros(1)\n", encoding="utf-8")
    good = checks.run_stage("types", checks.stages()["types"])
    said = capsys.readouterr().out
    assert good == (not told), said
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("bad", ["", "beside", "other"])
def test_all_tests_run_in_two_processes_and_either_can_fail(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checks = load_script("checks")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    for name in checks.BESIDE:
        assert list((ROOT / "tests" / name).glob("test_*.py")), f"{name} has no tests"
    monkeypatch.setattr(checks, "BESIDE", ("beside",))
    for name in ("beside", "other"):
        folder = tmp_path / "tests" / name
        folder.mkdir(parents=True)
        (folder / f"test_{name}.py").write_text(f"def test_{name}():\n    assert {name != bad}\n", encoding="utf-8")
    assert checks.run_tests([]) == (not bad)
    said = capfd.readouterr().out
    assert said.count("1 passed") == (1 if bad else 2)
    assert said.count("1 failed") == bool(bad)
    assert checks.run_tests(["tests/beside", "-k", "beside"]) == (bad != "beside")


def test_slices_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = load_script("checks")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "STAMPS", tmp_path / ".slices")
    (tmp_path / "tests").mkdir()
    (tmp_path / ".gitignore").write_text(".slices/\n__pycache__/\n", encoding="utf-8")
    slow = "import pytest\n\n\n@pytest.mark.slow\ndef test_it():\n    assert {}\n"
    (tmp_path / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--full', action='store_true')\n\n\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'slow: slow')\n",
        encoding="utf-8",
    )
    (tmp_path / "tests" / "test_a.py").write_text(slow.format("True"), encoding="utf-8")
    (tmp_path / "tests" / "test_b.py").write_text(slow.format("False"), encoding="utf-8")
    (tmp_path / "tests" / "test_c.py").write_text("def test_quick():\n    assert True\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    names = checks.slices()
    assert names == ["tests/test_a.py", "tests/test_b.py"]
    assert not checks.run_slices(names)
    tree = checks.tree_hash()
    assert [checks.passed(name, tree) for name in names] == [True, False]
    assert checks.run_slices(["tests/test_a.py"])
    assert "passed before on this tree" in capsys.readouterr().out
    assert not checks.run_slices(["tests/test_c.py"])
    assert "tests/test_c.py: has no long proof; its tests: bash test.sh tests/test_c.py" in capsys.readouterr().out
    (tmp_path / "tests" / "test_b.py").write_text(slow.format("1"), encoding="utf-8")
    assert checks.tree_hash() != tree, "a changed file makes every proof due again"


def test_ci_runs_exactly_test_sh() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert run.read_text(encoding="utf-8").splitlines()[-1].endswith("exec bash test.sh")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fresh_clone_sets_itself_up_and_trains(checkout: Path) -> None:
    """Item 70: nothing but Python and the package index; the second call installs nothing; the system is untouched."""
    variables = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH")
    }
    variables["PATH"] = os.pathsep.join(part for part in variables["PATH"].split(os.pathsep) if ".venv" not in part)
    system = str(shutil.which("python3", path=variables["PATH"]))
    freeze = [
        system,
        "-c",
        "import importlib.metadata as m; print(sorted(d.name + d.version for d in m.distributions()))",
    ]
    before = subprocess.run(freeze, capture_output=True, text=True, check=True, env=variables).stdout

    def run() -> subprocess.CompletedProcess[str]:
        command = [
            "bash",
            str(checkout / "run.sh"),
            "--config",
            "test_config.json",
            "--max-steps",
            "2",
            "--device",
            "cpu",
        ]
        return subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=variables)

    first, second = run(), run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Installing" in first.stderr
    assert "Step [1/2]" in first.stdout
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Installing" not in second.stderr
    assert "Step [1/2]" in second.stdout
    assert subprocess.run(freeze, capture_output=True, text=True, check=True, env=variables).stdout == before
