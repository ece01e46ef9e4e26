"""The folder is the registry: what it offers, what it refuses, and code of one's own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lockstep import registry
from lockstep.errors import ConfigError, ExitCode


def test_a_name_is_a_file() -> None:
    assert "causal" in registry.names("objectives")
    assert {"builtin", "synthetic", "text"} <= set(registry.names("sources"))
    for folder in ("objectives", "sources"):
        package = Path(registry.__file__).parent / folder
        parts = getattr(importlib.import_module(f"lockstep.{folder}"), "PARTS", ())
        files = {path.stem for path in package.glob("*.py")} - {"__init__", "options", *parts}
        assert registry.names(folder) == sorted(files), "settings are no choice, and parts of a choice are none"
        assert all((package / f"{part}.py").is_file() for part in parts)


def test_what_is_there_is_loaded() -> None:
    from lockstep.sources import builtin

    assert registry.load("sources", "builtin", "build") is builtin.build


@pytest.mark.parametrize(("word", "hint"), [("casual", "did you mean 'causal'?"), ("zzz", "one of ")])
def test_an_unknown_name_suggests(word: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{word}' is not in objectives/") as caught:
        registry.load("objectives", word, "build")
    assert caught.value.hint.startswith(hint)
    assert "causal" in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("word", ["options", "__init__", "denoise", "../engine/train", "engine.train", "", "Causal"])
def test_nothing_else_of_the_package_can_be_reached(word: str) -> None:
    with pytest.raises(ConfigError, match="is not in objectives/"):
        registry.load("objectives", word, "build")


def test_code_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_objective.py").write_text("def make(options):\n    return options\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_objective", raising=False)
    assert registry.load("objectives", "my_objective:make", "build")("x") == "x"


@pytest.mark.parametrize("word", ["no_such_package:make", "json:no_such_name", ":make", "json:", ".relative:make"])
def test_a_wrong_place_is_one_message(word: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot load '{word}' for objectives: "):
        registry.load("objectives", word, "build")


def test_the_nearest_word() -> None:
    assert registry.nearest("trian", ["train", "sample"]) == "train"
    assert registry.nearest("zzz", ["train", "sample"]) == ""
    assert registry.suggest("x", []) == "nothing is registered"
    assert registry.suggest("x", ["p", "q", "r"], most=2) == "one of p, q, 1 more"
