"""The wheel carries presets and doors, and works where no checkout is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(iter(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))))


def test_it_holds_presets_and_doors_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        link = archive.read("lockstep/doors/model_check/config/presets/debug.json")
    tracked = [path for folder in ("presets", "doors") for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {f"lockstep/{path.relative_to(ROOT).as_posix()}" for path in tracked if "__pycache__" not in path.parts}
    assert len(wanted) >= 24
    data = {name for name in names if name.startswith(("lockstep/presets/", "lockstep/doors/"))}
    assert data == wanted
    assert link == (ROOT / "presets" / "llama" / "debug.json").read_bytes(), "content, not a link"
    assert {"lockstep/cli.py", "lockstep/compat.py", "lockstep/engine/loop.py"} <= names
    assert not any(name.startswith(("tests/", "src/", "setup/")) for name in names)


def test_installed_it_gives_working_scripts(wheel: Path, tmp_path: Path) -> None:
    target, work = tmp_path / "installed", tmp_path / "work"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    variables = os.environ | {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables)

    made = run(sys.executable, "-m", "lockstep", "init", "llama", str(work))
    assert made.returncode == 0, made.stdout + made.stderr
    for name in ("run.sh", "pretrain_main.py", "config/presets/production.json", "test_config.json"):
        assert (work / name).is_file()
    code = (
        "import lockstep, sys; sys.path.insert(0, sys.argv[1]); from config import get_default_config; "
        "print(lockstep.__file__, get_default_config('debug').model.num_layers)"
    )
    asked = run(sys.executable, "-c", code, str(work))
    assert asked.stdout.split() == [str(target / "lockstep" / "__init__.py"), "2"], asked.stderr
    helped = run("bash", str(work / "run.sh"), "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: bash run.sh")
    for script in ("pretrain_main.py", "prepare_dataset.py"):  # as files, the way the guides start them
        helped = run(sys.executable, str(work / script), "--help")
        assert helped.returncode == 0, helped.stderr
        assert helped.stdout.startswith(f"usage: python3 {script}")
