"""`training.batch_size: auto`: a number stands in its place until one is found, in every layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep import Config
from lockstep.config.load import Loaded, as_asked, from_dict, load, replaced
from lockstep.config.show import explain, schema, show
from lockstep.errors import ConfigError


def asked(loaded: Loaded) -> tuple[int, bool]:
    return loaded.config.training.batch_size, loaded.finds_batch


def test_the_number_of_the_layer_below_stands_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for content, flags, expected in (
        ("{}", [], (4, False)),
        ("{}", [("batch-size", "auto")], (4, True)),
        ("training: {batch_size: 6}", [("batch_size", "auto")], (6, True)),
        ("training: {batch_size: auto}", [], (4, True)),
        ("training: {batch_size: auto}", [("batch_size", "3")], (3, False)),
        ("{}", [("batch_size", "auto"), ("batch_size", "5")], (5, False)),
    ):
        file.write_text(content)
        assert asked(load("llama", preset="tiny", file=file, flags=flags)) == expected, (content, flags)
    assert type(load("llama", preset="tiny", flags=[("batch-size", "auto")]).config.training.batch_size) is int


def test_what_was_asked_is_the_rows_of_a_step() -> None:
    plain, auto = (load("llama", preset="tiny", flags=flags) for flags in ([], [("batch-size", "auto")]))
    assert as_asked(plain)["training.batch_size"] == 4
    assert as_asked(auto) == as_asked(plain) | {"training.batch_size": "auto", "training.grad_accum_nums": 4}
    assert '"auto (4)"' in show(auto)


def test_a_number_of_earlier_versions_is_read(tmp_path: Path) -> None:
    """They wrote auto:N, for N rows that a search might cut."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"training": {"batch_size": "auto:12"}}))
    assert asked(load("llama", preset="tiny", file=file)) == (12, False)
    assert from_dict({"training": {"batch_size": "auto:12"}}).training.batch_size == 12


def test_a_configuration_without_a_run_has_a_number() -> None:
    """Its copies would not know that one is to be found."""
    for make in (
        lambda: from_dict({"training": {"batch_size": "auto"}}),
        lambda: Config.from_dict({"training": {"batch_size": "auto"}}),
        lambda: Config.from_dict({}).replace(training={"batch_size": "auto"}),
    ):
        with pytest.raises(ConfigError, match='"auto" is found when a run begins'):
            make()
    config = load("llama", preset="tiny").config
    assert asked(replaced(config, {"training.batch_size": "auto"})) == (4, True), "as train() reads its words"


@pytest.mark.parametrize("value", ["atuo", "auto:", "auto:0", "auto:-1", "auto:x", "auto:1048577", "auto:1.5", "AUTO"])
def test_what_is_nearly_auto_is_refused_in_a_line(value: str) -> None:
    with pytest.raises(ConfigError, match='from 1 to 1,048,576 or "auto"') as caught:
        load("llama", preset="tiny", flags=[("batch-size", value)])
    assert "auto" in caught.value.hint or value in ("auto:0", "auto:1048577")


def test_it_is_explained_and_in_the_schema() -> None:
    text = explain("batch_size", "llama")
    assert "auto: the largest that fits" in text
    assert 'accepts   a whole number from 1 to 1,048,576 or "auto" (rows)' in text
    field = json.loads(schema("llama"))["$defs"]["TrainingOptions"]["properties"]["batch_size"]
    assert [choice["type"] for choice in field["anyOf"]] == ["integer", "string"]
