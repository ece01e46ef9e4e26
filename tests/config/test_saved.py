"""Settings come and go between versions: how a saved run is read, and how a removed setting is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from lockstep.config import catalog as catalogs
from lockstep.config import saved, schema
from lockstep.config.load import from_saved, identity, load, load_file, load_run, to_dict
from lockstep.config.saved import Removed
from lockstep.config.section import setting
from lockstep.errors import ConfigError
from lockstep.rundir import write_json
from tests.config.conftest import Write

GONE = Removed("nothing reserves disk space any more", "leave it out", harmless=(False,))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, str, Any], None]]:
    """Adds a setting to the schema: family, section, name, field."""

    def add(family: str, section: str, name: str, field: Any) -> None:
        config = schema.FAMILIES[family]
        old = config.model_fields[section].annotation
        new = create_model(old.__name__, __base__=old, **{name: (type(field.default), field)})  # type: ignore[union-attr]
        changed = create_model(config.__name__, __base__=config, **{section: (new, new())})
        monkeypatch.setitem(schema.FAMILIES, family, changed)
        catalogs.catalog.cache_clear()

    yield add
    monkeypatch.undo()
    catalogs.catalog.cache_clear()


def test_a_setting_that_was_added_since_had_its_default_in_older_runs(added: Callable[..., None]) -> None:
    config = load("llama", preset="tiny").config
    old_identity, old_tree = identity(config), to_dict(config)
    added("llama", "training", "optimizer_kind", setting("adamw", "Which optimizer."))
    added("llama", "model", "softcap", setting(30.0, "Limit of the logits.", before=0.0))
    now = load("llama", preset="tiny").config
    assert identity(now)["training.optimizer_kind"] == "adamw"
    read = saved.read_identity(old_identity, "llama")
    assert read["training.optimizer_kind"] == "adamw"
    assert read["model.softcap"] == 0.0, "what held then, not the default of today"
    assert identity(now)["model.softcap"] == 30.0, "the control: a new run has the new default"
    assert read == identity(from_saved(old_tree))


@pytest.mark.parametrize("value", [False, True])
def test_a_removed_setting_is_dropped_or_refused(value: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("llama", preset="tiny").config
    monkeypatch.setitem(saved.REMOVED, "training.reserve", GONE)
    tree = to_dict(config)
    tree["training"]["reserve"] = value
    write_json(tmp_path / "config.json", {"family": "llama", "preset": "tiny", "identity_hash": "0", "config": tree})
    readers = (
        lambda: load_run(tmp_path).config,
        lambda: from_saved(json.loads(json.dumps(tree))),
        lambda: load_file(tmp_path / "config.json").config,
    )
    for read in readers:
        if value is False:
            assert to_dict(read()) == to_dict(config)
        else:
            with pytest.raises(ConfigError, match=r"training\.reserve: true was removed: nothing reserves"):
                read()


@pytest.mark.parametrize("value", [False, True])
def test_writing_a_removed_setting_is_refused(value: bool, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its value: a file or flag of today has no reason to name it."""
    monkeypatch.setitem(saved.REMOVED, "training.reserve", GONE)
    for layer in (
        {"file": write({"training": {"reserve": value}})},
        {"flags": [("training.reserve", str(value).lower())]},
        {"flags": [("reserve", None)]},
    ):
        with pytest.raises(ConfigError, match="was removed: nothing reserves disk space") as refused:
            load("llama", preset="tiny", **layer)  # type: ignore[arg-type]
        assert refused.value.hint == "leave it out"


def test_a_removed_value_of_a_setting_is_refused_with_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = Removed("tables are read from files only", "data.data_path=FILE")
    monkeypatch.setitem(saved.REMOVED_VALUES, "training.schedule", {"zigzag": removed})
    with pytest.raises(ConfigError, match='"zigzag" was removed: tables are read') as refused:
        load("llama", preset="tiny", flags=[("training.schedule", "zigzag")])
    assert refused.value.hint == "data.data_path=FILE"
    with pytest.raises(ConfigError, match="expected one of"):
        load("llama", preset="tiny", flags=[("training.schedule", "zagzig")])


GONE_VALUES = [(key, value) for key, values in saved.REMOVED_VALUES.items() for value in values]


@pytest.mark.parametrize(("key", "value"), GONE_VALUES)
def test_each_removed_value_is_refused_and_its_weights_can_be_used(key: str, value: Any) -> None:
    family = next(name for name in schema.FAMILIES if key in identity(load(name, preset="tiny").config))
    with pytest.raises(ConfigError, match="was removed") as refused:
        load(family, preset="tiny", flags=[(key, str(value))])
    assert refused.value.hint
    tree = to_dict(load(family, preset="tiny").config)
    section, name = key.split(".")
    tree[section][name] = value
    with pytest.raises(ConfigError, match="was removed"):
        from_saved(tree)
    assert from_saved(tree, trains=False)
