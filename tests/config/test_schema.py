"""The schema stays small, and every setting says what it is."""

from __future__ import annotations

import json

import pytest

from lockstep.config import show
from lockstep.config.catalog import catalog
from lockstep.config.load import load, presets
from lockstep.config.schema import FAMILIES
from lockstep.errors import ConfigError


@pytest.mark.parametrize("family", FAMILIES)
def test_each_setting_is_described_and_has_a_role(family: str) -> None:
    for setting in catalog(family).settings.values():
        assert len(setting.description) > 5, setting.key
        assert setting.role in ("identity", "layout", "cosmetic"), setting.key
        assert setting.expected, setting.key


def test_every_preset_says_what_it_is_for() -> None:
    listing = show.list_presets()
    for name in presets("llama"):
        line = next(line for line in listing.splitlines() if line.strip().startswith(name))
        assert len(line.split(maxsplit=1)[1]) > 30


def test_show_gives_value_and_provenance_of_every_setting() -> None:
    loaded = load("llama", preset="tiny", flags=[("max-steps", "3"), ("hf-token", "hf_secret_canary")])
    text = show.show(loaded)
    rows = {line.split()[0]: line for line in text.splitlines() if not line.startswith("#")}
    assert rows.keys() == {setting.key for setting in catalog("llama").settings.values()}
    assert rows["training.max_steps"].split()[1:] == ["3", "flag", "--max-steps"]
    assert rows["training.batch_size"].split()[1:] == ["4", "preset", "tiny"]
    assert rows["training.adam_beta1"].split()[1:] == ["0.9", "default"]
    assert "***" in rows["data.hf_token"]
    assert "canary" not in text + show.show_json(loaded)
    assert len(show.show(loaded, only_set=True)) < len(text)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.learning_rate", ["above 0", "1e-05", "identity", "lr", "stable: 1e-06"]),
        ("learning-rate", ["training.learning_rate"]),
        ("lr", ["training.learning_rate"]),
        ("training.use_amp", ["training.precision", "fp16"]),
        ("data.max_seq_length", ["training.context_length"]),
        ("system.world_size", ["has no effect", "refused otherwise"]),
        ("report", ["report.log_interval", "report.sample_tokens"]),
        ("", ["model.num_layers", "run.tags"]),
        ("model.model_path", ["lockstep/tiny"]),
    ],
)
def test_explain(key: str, words: list[str]) -> None:
    text = show.explain(key, "llama", known_models=("lockstep/tiny",))
    assert not [word for word in words if word not in text]


def test_explain_of_an_unknown_key_suggests() -> None:
    with pytest.raises(ConfigError, match=r"did you mean training\.learning_rate"):
        show.explain("training.learnin_rate", "llama")


@pytest.mark.parametrize(
    ("key", "family"),
    [
        ("training.max_steps", "llama"), ("grid_size", "ad"), ("data.grid-size", "ad"), ("", "llama"),
        ("num_actions", "ad"), ("objective.mask_probability", "mlm"), ("data", "llama"), ("x.y", "llama"),
    ],
)  # fmt: skip
def test_a_key_is_explained_for_the_first_family_that_has_it(key: str, family: str) -> None:
    assert show.family_of(key) == family


def test_what_a_refusal_advises_explains_that_setting() -> None:
    with pytest.raises(ConfigError) as refused:
        load("ad", preset="tiny", flags=[("data.grid_size", "x")])
    *_, key, flag, family = refused.value.hint.split()
    assert refused.value.hint == f"lockstep config explain {key} {flag} {family}"
    assert "Cells of a side" in show.explain(key, family)
    with pytest.raises(ConfigError) as refused:
        load("llama", preset="tiny", flags=[("training.max_steps", "x")])
    assert refused.value.hint == "lockstep config explain training.max_steps"


def test_every_setting_can_be_explained() -> None:
    for setting in catalog("llama").settings.values():
        assert setting.description in show.explain(setting.key, "llama")


def test_the_json_schema_describes_every_setting() -> None:
    tree = json.loads(show.schema("llama"))
    assert tree["additionalProperties"] is False
    assert tree["$defs"]["TrainingOptions"]["properties"]["max_steps"]["minimum"] == 1
    assert "include" in tree["properties"]
