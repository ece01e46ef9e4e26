"""The Python door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep import Config, LockstepError, get_default_config
from lockstep.config.load import load
from lockstep.families import FAMILIES


def test_get_default_config_as_documented() -> None:
    assert get_default_config() == get_default_config(preset="production")
    assert get_default_config(debug_mode=True) == get_default_config(preset="debug")
    assert get_default_config().training.max_steps == 100
    assert get_default_config("tiny").model.num_layers == 2
    with pytest.raises(LockstepError, match="no preset"):
        get_default_config("nonsense")


def test_debug_mode_over_a_named_preset_keeps_the_preset() -> None:
    debugged, plain = get_default_config("production", debug_mode=True), get_default_config("production")
    assert (debugged.debug.enabled, debugged.debug.log_level, debugged.training.max_steps) == (True, "DEBUG", 100)
    assert debugged == plain.replace(debug={"enabled": True, "log_level": "DEBUG"})
    assert get_default_config("debug", debug_mode=True) == get_default_config("debug")


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
    with pytest.raises(AttributeError, match=r"max_steps cannot be set.*config\.replace\(training="):
        config.training.max_steps = 5
    with pytest.raises(AttributeError, match=r"training cannot be set.*config\.replace\("):
        config.training = None
    with pytest.raises(AttributeError, match="nonsense cannot be set"):
        config.nonsense = 3
    assert config == get_default_config("tiny")
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


def test_train_takes_a_preset_a_file_or_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lockstep.engine import train as engine

    seen: list[Any] = []
    monkeypatch.setattr(engine, "train", seen.append)
    path = tmp_path / "c.json"
    config = get_default_config("tiny").replace(training={"max_steps": 3}, **{"data.hf_token": "hf_canary_secret"})
    path.write_text('{"training": {"max_steps": 3}}')
    lockstep.train("llama", "tiny", max_train_samples=9)
    lockstep.train("llama", preset="tiny", file=path)
    lockstep.train("llama", path)
    lockstep.train("llama", str(path), preset="tiny")
    lockstep.train("llama", config, **{"system.seed": 7})
    assert [loaded.preset for loaded in seen] == ["tiny", "tiny", "production", "tiny", ""]
    assert [loaded.config.training.max_steps for loaded in seen] == [20, 3, 3, 3, 3]
    last = seen[-1]
    assert (last.config.system.seed, last.config.model.model_path) == (7, "lockstep/tiny")
    assert last.config.data.hf_token.get_secret_value() == "hf_canary_secret"
    assert last.origins["system.seed"].layer == "flag"
    assert "model.init_std" not in last.origins, "what is as it would be anyway has no origin"
    for wrong in ("nonsense", Path("nowhere")):
        with pytest.raises(LockstepError, match="no preset or file"):
            lockstep.train("llama", wrong)
    with pytest.raises(LockstepError, match="no preset or file as well"):
        lockstep.train("llama", config, preset="tiny")
    with pytest.raises(LockstepError, match="do not divide"):
        lockstep.train("llama", config, **{"model.num_key_value_heads": 3})


def test_load_finds_a_run_as_the_command_line_does(monkeypatch: pytest.MonkeyPatch, in_dir: Path) -> None:
    from types import SimpleNamespace

    from lockstep.engine import inference
    from lockstep.rundir import write_json

    seen: list[Path] = []

    def load_model(path: Path) -> SimpleNamespace:
        seen.append(path)
        return SimpleNamespace(model="model", config=SimpleNamespace(family="llama"))

    monkeypatch.setattr(inference, "load_model", load_model)
    monkeypatch.setattr(inference, "with_words", lambda _: SimpleNamespace(tokenizer="tokenizer"))
    with pytest.raises(LockstepError, match="lockstep train llama demo makes one"):
        lockstep.load("latest")
    write_json(Path("runs/mine/config.json"), {})
    Path("runs/latest").symlink_to("mine")
    for name in ("latest", "mine", Path("runs/mine")):
        assert lockstep.load(name) == ("model", "tokenizer")
    assert seen == [Path("runs/mine")] * 3
    with pytest.raises(LockstepError, match="did you mean 'mine'"):
        lockstep.load("mina")


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


def test_the_family_is_checked_with_a_config_too(in_dir: Path) -> None:
    config = lockstep.get_default_config("tiny")
    with pytest.raises(lockstep.LockstepError, match="unknown family"):
        lockstep.train("nonsense", config)
    with pytest.raises(lockstep.LockstepError, match="Config is of family 'llama'"):
        lockstep.train("llada", config)
    with pytest.raises(lockstep.LockstepError, match="family comes first"):
        lockstep.train(config)
    with pytest.raises(lockstep.LockstepError, match="expected a preset, a file or a Config"):
        lockstep.train("llama", {"training": {"max_steps": 1}})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_any_family_is_written_and_read_again(family: str, tmp_path: Path) -> None:
    config = get_default_config("tiny", family=family)
    assert config == Config(load(family, preset="tiny").config)
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config
    (tmp_path / "config.json").write_text('{"family": "nonsense"}')
    with pytest.raises(LockstepError, match="unknown family 'nonsense'"):
        Config.load(tmp_path / "config.json")


@pytest.mark.usefixtures("shared_cache", "in_dir")
@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize("forgets", [True, False])
def test_runs_of_one_process_compile_as_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """A second length would make a graph for any, with other bits than the same run has alone; and it would add up."""
    import torch

    from lockstep.engine import train as engine
    from lockstep.models import build

    any_length: list[bool] = []

    def noted(graph: Any, inputs: Any) -> Any:
        any_length.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward

    compile_blocks = build.compile_blocks
    monkeypatch.setattr(build, "compile_blocks", lambda *given, **how: compile_blocks(*given, **how, backend=noted))
    if not forgets:
        monkeypatch.setattr(engine, "forget_compiled", lambda: None)
    build.forget_compiled()
    try:
        for length in (32, 48):
            steps = {"max_steps": 1, "context_length": length, "eval_batches": 1}
            lockstep.train("llama", "tiny", training=steps, **{"system.device": "cpu", "model.compile": "on"})
    finally:
        build.forget_compiled()
    assert len(any_length) > 0
    assert any(any_length) == (not forgets)  # or else the control
