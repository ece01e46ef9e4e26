"""`training.batch_size: auto`: the word stands for the number it replaces, in every layer and through every copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.config.load import Loaded, from_dict, identity_hash, load, replaced, to_dict
from lockstep.config.show import explain, schema
from lockstep.engine.options import AutoRows, TrainingOptions
from lockstep.errors import ConfigError


def written(loaded: Loaded) -> int | str:
    return to_dict(loaded.config)["training"]["batch_size"]


def test_a_flag_keeps_the_number_of_the_layer_below(tmp_path: Path) -> None:
    plain, auto = (load("llama", preset="tiny", flags=flags) for flags in ([], [("batch-size", "auto")]))
    assert isinstance(auto.config.training.batch_size, AutoRows)
    assert not isinstance(plain.config.training.batch_size, AutoRows)
    assert auto.config.training.batch_size == plain.config.training.batch_size == 4
    assert (written(plain), written(auto)) == (4, "auto:4")
    assert auto.config.training.grad_accum_nums == plain.config.training.grad_accum_nums
    assert identity_hash(auto.config) != identity_hash(plain.config), "what is found is not known by then"
    file = tmp_path / "mine.yaml"
    file.write_text("training: {batch_size: 6}\n")
    assert written(load("llama", preset="tiny", file=file, flags=[("batch_size", "auto")])) == "auto:6"
    file.write_text("training: {batch_size: auto}\n")
    assert written(load("llama", preset="tiny", file=file)) == "auto:4"
    assert written(load("llama", preset="tiny", file=file, flags=[("batch_size", "3")])) == 3
    assert written(load("llama", preset="tiny", file=file, flags=[("batch_size", "auto:12")])) == "auto:12"
    assert from_dict({"training": {"batch_size": "auto"}}).training.batch_size == TrainingOptions().batch_size


def test_copies_stay_auto() -> None:
    auto = load("llama", preset="tiny", overrides={"training.batch_size": "auto"}).config
    for copy in (replaced(auto, {"training.max_steps": 3}).config, from_dict(to_dict(auto)), auto.model_copy()):
        assert isinstance(copy.training.batch_size, AutoRows)
        assert to_dict(copy)["training"]["batch_size"] == "auto:4"
    again = replaced(auto, {"training.batch_size": "auto"}).config
    assert to_dict(again)["training"]["batch_size"] == "auto:4", "not 4 times 4"
    assert type(replaced(auto, {"training.batch_size": 2}).config.training.batch_size) is int


@pytest.mark.parametrize("value", ["atuo", "auto:", "auto:0", "auto:-1", "auto:x", "auto:1048577", "auto:1.5", "AUTO"])
def test_what_is_nearly_auto_is_refused_in_a_line(value: str) -> None:
    with pytest.raises(ConfigError, match='from 1 to 1,048,576 or "auto" or "auto:N"') as caught:
        load("llama", preset="tiny", flags=[("batch-size", value)])
    assert "auto" in caught.value.hint


def test_it_is_explained_and_in_the_schema() -> None:
    text = explain("batch_size", "llama")
    assert "auto: the largest that fits" in text
    assert 'accepts   a whole number from 1 to 1,048,576 or "auto" or "auto:N" (rows)' in text
    field = json.loads(schema("llama"))["$defs"]["TrainingOptions"]["properties"]["batch_size"]
    assert [choice["type"] for choice in field["anyOf"]] == ["integer", "string", "string"]
