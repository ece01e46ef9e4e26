"""The benchmarks judge: over the limit is exit 1, and their page names the limits they have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "constant"), [("start", "LIMIT_SECONDS"), ("loop", "LIMIT_MS")])
def test_over_the_limit_is_exit_1(name: str, constant: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = script(name)
    limit = getattr(module, constant)
    assert module.verdict(limit * 0.99, limit) == 0
    assert capsys.readouterr().out.startswith("ok: lockstep ")
    assert module.verdict(limit * 1.01, limit) == 1
    assert capsys.readouterr().out.startswith("TOO SLOW: lockstep ")
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"`{name}.py` |" in line)
    assert f"| {limit} " in row
