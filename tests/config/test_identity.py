"""What a configuration keeps: secrets masked, copies equal, and which settings decide the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config.load import (
    Origin,
    from_dict,
    identity,
    identity_diff,
    identity_hash,
    load,
    load_run,
    to_dict,
)
from lockstep.errors import ConfigError
from lockstep.rundir import write_json
from tests.config.conftest import Write
from tests.config.test_load import refusal


def test_the_token_is_never_shown(write: Write) -> None:
    """Contract item 174, for configurations."""
    canary = "hf_" + "canary" * 4
    loaded = load("llama", file=write({"hf_token": canary}))
    assert loaded.config.data.hf_token is not None
    assert loaded.config.data.hf_token.get_secret_value() == canary
    assert canary not in repr(loaded) + json.dumps(to_dict(loaded.config)) + json.dumps(identity(loaded.config))
    assert to_dict(loaded.config)["data"]["hf_token"] == "***"
    assert canary not in refusal(file=write({"hf_token": [canary]}))
    assert canary not in refusal(file=write({"hf_tokn": canary}))


def test_a_masked_token_is_left_out_again(write: Write) -> None:
    loaded = load("llama", file=write({"data": {"hf_token": "***"}}))
    assert loaded.config.data.hf_token is None
    assert "masked" in loaded.notices[0]


def test_round_trip_and_copies() -> None:
    config = load("llama", preset="demo", flags=[("run.tags.a", "b")]).config
    tree = to_dict(config)
    assert from_dict(json.loads(json.dumps(tree))) == config
    tree["run"]["tags"]["a"] = "changed"
    tree["training"]["max_steps"] = 1
    assert config.run.tags == {"a": "b"}
    assert to_dict(config)["training"]["max_steps"] != 1


def test_identity_holds_what_decides_the_numbers() -> None:
    one = load("llama", preset="tiny").config
    cosmetic = load("llama", preset="tiny", flags=[("log-interval", "5"), ("out", "x"), ("save-interval", "1")]).config
    other = load("llama", preset="tiny", flags=[("learning-rate", "0.5"), ("seed", "1")]).config
    assert identity_hash(one) == identity_hash(cosmetic)
    assert identity_hash(one) != identity_hash(other)
    assert identity_diff(identity(one), identity(cosmetic)) == []
    assert identity_diff(identity(one), identity(other)) == [
        "system.seed: 42 in the checkpoint, 1 now",
        "training.learning_rate: 0.003 in the checkpoint, 0.5 now",
    ]
    assert "data.hf_token" not in identity(one)


def test_a_run_is_loaded_from_its_folder(tmp_path: Path) -> None:
    config = load("llama", preset="tiny", flags=[("seed", "5")]).config
    write_json(tmp_path / "config.json", {"family": "llama", "preset": "tiny", "config": to_dict(config)})
    loaded = load_run(tmp_path, [("checkpoint.resume", "x")])
    assert loaded.preset == "tiny"
    assert loaded.config == config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"resume": "x"})}
    )
    assert loaded.origins["system.seed"].layer == "file"
    assert "training.adam_beta1" not in loaded.origins
    with pytest.raises(ConfigError, match="no run here"):
        load_run(tmp_path / "nowhere")


def test_overrides_from_python_dotted_and_nested() -> None:
    loaded = load("llama", preset="tiny", overrides={"training": {"max_steps": 3}, "training.batch_size": 1})
    assert (loaded.config.training.max_steps, loaded.config.training.batch_size) == (3, 1)
    assert loaded.origins["training.max_steps"] == Origin("flag", "training.max_steps")
    with pytest.raises(ConfigError, match=r"argument training\.max_steps: .*got \"3\""):
        load("llama", overrides={"training.max_steps": "3"})
