"""The Python door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import Config, LockstepError, get_default_config
from lockstep.config.load import load


def test_get_default_config_as_documented() -> None:
    assert get_default_config() == get_default_config(preset="production")
    assert get_default_config(debug_mode=True) == get_default_config(preset="debug")
    assert get_default_config().training.max_steps == 100
    assert get_default_config("tiny").model.num_layers == 2
    with pytest.raises(LockstepError, match="no preset"):
        get_default_config("nonsense")


def test_config_goes_through_a_file(tmp_path: Path) -> None:
    config = get_default_config("tiny").replace(training={"max_steps": 3}, **{"system.seed": 7})
    config.save(tmp_path / "c.json")
    assert Config.load(tmp_path / "c.json") == config
    assert Config.from_dict(config.to_dict()) == config
    assert (config.training.max_steps, config.system.seed, config.training.batch_size) == (3, 7, 4)
    assert hash(Config.from_dict(config.to_dict())) == hash(config)


def test_config_reads_the_documented_words(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"training": {"use_amp": false}, "experiment_name": "x"} // documented')
    config = Config.load(tmp_path / "c.json")
    assert (config.training.precision, config.run.experiment_name) == ("fp32", "x")
    assert config.training.max_steps == 100


def test_saving_and_showing_mask_secrets_and_change_nothing(tmp_path: Path) -> None:
    config = Config.from_dict({"hf_token": "hf_canary_secret"})
    before = config.to_dict()
    config.save(tmp_path / "c.json")
    assert "canary" not in (tmp_path / "c.json").read_text() + repr(config) + json.dumps(before)
    assert config.data.hf_token.get_secret_value() == "hf_canary_secret"
    changed = config.replace(training={"max_steps": 5})
    assert changed.data.hf_token.get_secret_value() == "hf_canary_secret"
    before["training"]["max_steps"] = 1
    assert config.training.max_steps == 100


def test_config_is_read_only_and_validates() -> None:
    config = get_default_config("tiny")
    with pytest.raises(ValueError, match="frozen"):
        config.training.max_steps = 5
    config.validate()
    with pytest.raises(LockstepError, match="do not divide"):
        config.replace(**{"model.num_key_value_heads": 3}).validate()
    with pytest.raises(LockstepError, match=r"training\.max_steps"):
        config.replace(training={"max_steps": "5"})
    with pytest.raises(AttributeError):
        _ = config.nonsense


def test_train_resolves_and_hands_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lockstep.engine import train as engine

    seen: list[Any] = []
    monkeypatch.setattr(engine, "train", lambda loaded: seen.append(loaded) or "result")
    (tmp_path / "c.json").write_text('{"training": {"batch_size": 3}}')
    overrides: dict[str, Any] = {"system.seed": 7, "training": {"max_steps": 5}}
    assert lockstep.train("llama", "tiny", file=tmp_path / "c.json", **overrides) == "result"
    expected = load("llama", preset="tiny", file=tmp_path / "c.json", overrides=overrides).config
    assert seen[0].config == expected
    assert (expected.system.seed, expected.training.max_steps, expected.training.batch_size) == (7, 5, 3)


def test_train_without_preset_on_the_cpu_is_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.engine import train as engine

    seen: list[Any] = []
    monkeypatch.setattr(engine, "train", seen.append)
    lockstep.train(system={"device": "cpu"})
    assert seen[0].preset == "demo"
    assert "demo preset" in seen[0].notices[0]


def test_the_package_names_only_what_it_has() -> None:
    assert all(getattr(lockstep, name) is not None for name in lockstep.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = lockstep.nonsense
