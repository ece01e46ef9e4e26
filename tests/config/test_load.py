"""Layers, provenance, old words, flags: what a configuration becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import (
    Loaded,
    Origin,
    load,
    presets,
    to_dict,
)
from lockstep.errors import ConfigError
from lockstep.families import FAMILIES, doors_folder
from tests.config.conftest import Write

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "doors" / "model_check").glob("*.json"))


def value(loaded: Loaded, key: str) -> Any:
    found: Any = to_dict(loaded.config)
    for part in key.split("."):
        found = found[part]
    return found


def refusal(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load("llama", **arguments)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ presets


def test_the_presets_are_those_of_the_contract() -> None:
    assert presets("llama") == ["debug", "demo", "full", "production", "stable", "tiny"]


def test_only_the_demo_is_not_compiled() -> None:
    """On a GPU that takes longer than all of its steps, and the first one is due after 8 s."""
    assert {name: load("llama", preset=name).config.model.compile for name in presets("llama")} == {
        **dict.fromkeys(presets("llama"), "auto"),
        "demo": "off",
    }


def test_the_presets_of_masked_lm_are_sane() -> None:
    """What is there, and that heads of the sane ones can tell something apart; the guide's own is kept as it is."""
    from lockstep.models import shapes

    assert presets("mlm") == ["debug", "demo", "microbert", "mlm_base", "mlm_modern", "mlm_small", "tiny"]
    found = {}
    for name in presets("mlm"):
        config = load("mlm", preset=name).config
        shape = shapes.resolve(config.model, context_length=config.training.context_length)
        found[name] = (shape.num_layers, shape.hidden_size, shape.head_dim)
    assert (found["microbert"], found["mlm_small"]) == ((6, 16, 2), (6, 256, 64))
    assert (found["mlm_base"], found["mlm_modern"]) == ((12, 768, 64), (22, 768, 64))
    modern: Any = load("mlm", preset="mlm_modern").config
    assert (modern.objective.mask_probability, modern.objective.last_mask_probability) == (0.3, 0.15)
    assert modern.data.documents == "masked"


def test_the_presets_of_llada_are_sane() -> None:
    """What is there; the published model is loaded where it is meant, with the settings that fit it to one GPU."""
    from lockstep.models import shapes

    own, large = ["tiny", "demo", "llada_small", "llada_base"], ["llada_8b_full", "llada_8b_lora", "llada_8b_sft"]
    assert presets("llada") == sorted([*own, *large, "debug", "pretrained"])
    for name in presets("llada"):
        config: Any = load("llada", preset=name).config
        shape = shapes.resolve(config.model, context_length=config.training.context_length)
        assert (config.model.init == "pretrained") == (name in (*large, "pretrained"))
        assert (shape.parameters() == 8_015_581_184) == (name in (*large, "pretrained"))
    full: Any = load("llada", preset="llada_8b_full").config
    assert (full.training.optimizer_states, full.training.batch_size) == ("bf16", 1)
    assert full.system.gradient_checkpointing
    assert load("llada", preset="llada_8b_sft").config.data.documents == "answers"


@pytest.mark.parametrize(
    ("preset", "layers", "steps", "context", "rate", "debug"),
    [
        ("debug", 2, 10, 512, 1e-7, True),
        ("production", 4, 100, 8192, 1e-5, False),
        ("full", 32, 10_000, 8192, 1e-5, False),
        ("stable", 4, 100, 8192, 1e-6, False),
        ("tiny", 2, 20, 64, 3e-3, False),
    ],
)
def test_documented_values(preset: str, layers: int, steps: int, context: int, rate: float, debug: bool) -> None:
    config: Any = load("llama", preset=preset).config
    training = config.training
    assert (config.model.num_layers, training.max_steps, training.context_length) == (layers, steps, context)
    assert training.learning_rate == rate
    assert config.debug.enabled is debug


def test_stable_is_full_precision_with_small_weights_and_clip() -> None:
    config = load("llama", preset="stable").config
    assert (config.training.precision, config.model.init_std, config.training.max_grad_norm) == ("fp32", 0.006, 0.5)


def test_no_preset_is_production() -> None:
    assert load("llama") == load("llama", preset="production")


@pytest.mark.parametrize("name", ["nonsense", "../llama/tiny", "", "tiny\0", "a" * 300])
def test_an_unknown_preset_lists_the_presets(name: str) -> None:
    if not name:
        return
    message = refusal(preset=name)
    assert "--preset" in message
    assert "debug, demo, full, production, stable, tiny" in message


# ------------------------------------------------------------------------------------------------ layers


def test_layers_and_the_provenance_of_each_value(write: Write) -> None:
    path = write('{"training": {"max_steps": 7,\n "batch_size": 3}}')
    loaded = load("llama", preset="tiny", file=path, flags=[("training.batch_size", "5")])
    assert value(loaded, "training.max_steps") == 7
    assert value(loaded, "training.batch_size") == 5
    assert value(loaded, "training.context_length") == 64
    assert loaded.origins["training.max_steps"] == Origin("file", f"{path}:1:28")
    assert loaded.origins["training.batch_size"] == Origin("flag", "--training.batch_size")
    assert loaded.origins["training.context_length"] == Origin("preset", "tiny")
    assert "training.adam_beta1" not in loaded.origins


def test_debug_then_file_then_flag(write: Write) -> None:
    """Contract item 22."""
    path = write({"training": {"max_steps": 3, "learning_rate": 1e-4}})
    loaded = load("llama", preset="debug", file=path, flags=[("max_steps", "2")])
    assert loaded.config.debug.enabled
    assert (value(loaded, "training.learning_rate"), value(loaded, "training.max_steps")) == (1e-4, 2)


def test_the_custom_config_of_the_seeds(write: Write) -> None:
    """Contract item 15: each value is there, with provenance `file`."""
    tree: dict[str, Any] = {
        "model": {
            "model_path": "meta-llama/Llama-3.1-8B-Instruct",
            "num_layers": 8,
            "attention_backend": "flash_attn",
        },
        "training": {"batch_size": 4, "learning_rate": 5e-6, "max_steps": 500, "context_length": 4096},
        "system": {"device": "cuda", "seed": 42},
    }
    loaded = load("llama", file=write(tree))
    for section, entries in tree.items():
        for key, expected in entries.items():
            assert value(loaded, f"{section}.{key}") == expected
            assert loaded.origins[f"{section}.{key}"].layer == "file"


def test_the_commented_snippet_of_the_seeds(write: Write) -> None:
    """Contract item 16: comments are read, num_workers lands in the loader's section, one notice."""
    path = write("""{ "training": { "batch_size": 8,         // Larger batch since only one GPU
                "grad_accum_nums": 4,    // Less accumulation needed
                "num_workers": 8 } }     // More data workers for single GPU""")
    loaded = load("llama", file=path)
    assert value(loaded, "data.num_workers") == 8
    assert loaded.notices == (f"{path}:3:17: training.num_workers is read as data.num_workers",)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_shipped_examples_load(path: Path) -> None:
    load("llama", file=path)


def test_there_are_examples() -> None:
    """Contract item 20."""
    wanted = {
        "config_stable.json",
        "single_gpu.json",
        "custom_config.json",
        "my_config.json",
        "test_config.json",
        "debug_config.json",
    }
    assert wanted <= {path.name for path in EXAMPLES}


def test_yaml_with_include_over_a_preset(write: Write) -> None:
    base = write("training:\n  max_steps: 9\n  learning_rate: 3e-4\n", "base.yaml")
    path = write("include: base.yaml\ntraining:\n  max_steps: 4\n", "top.yaml")
    loaded = load("llama", preset="tiny", file=path)
    assert (value(loaded, "training.max_steps"), value(loaded, "training.learning_rate")) == (4, 3e-4)
    assert loaded.origins["training.learning_rate"].where == f"{base}:3:18"


def test_a_missing_file_is_named_with_the_examples(tmp_path: Path) -> None:
    """Contract item 19."""
    message = refusal(file=tmp_path / "nowhere.json")
    assert "nowhere.json" in message
    assert "custom_config.json" in message


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_advised_for_a_missing_file_is_of_the_family(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(family, file=tmp_path / "nowhere.json")
    known = FAMILIES[family]
    assert f" {family} " in refused.value.hint
    assert not [name for name in known.examples if not (doors_folder() / known.folder / name).is_file()]


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\n"])
def test_impossible_file_names(name: str) -> None:
    assert "no such configuration file" in refusal(file=Path(name))


# ------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ({"use_amp": False}, "fp32"),
        ({"use_amp": False, "amp_dtype": "bfloat16"}, "fp32"),
        ({"use_amp": True}, "auto"),
        ({"use_amp": True, "amp_dtype": "bfloat16"}, "bf16"),
        ({"amp_dtype": "torch.bfloat16"}, "bf16"),
        ({"amp_dtype": "float16"}, "fp16"),
        ({"amp_dtype": "half"}, "fp16"),
        ({"amp_dtype": "torch.half"}, "fp16"),
        ({"amp_dtype": "float32"}, "fp32"),
        ({"amp_dtype": "torch.float32"}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"precision": "bf16", "amp_dtype": "bfloat16"}, "bf16"),
        ({}, "auto"),
    ],
)
def test_the_documented_words_for_precision(write: Write, words: dict[str, Any], precision: str) -> None:
    """Contract item 25."""
    assert load("llama", preset="tiny", file=write({"training": words})).config.training.precision == precision


def test_precision_over_layers(write: Write) -> None:
    file = write({"training": {"amp_dtype": "float16"}})
    assert load("llama", file=file, flags=[("use_amp", "false")]).config.training.precision == "fp32"
    assert load("llama", file=file, flags=[("precision", "bf16")]).config.training.precision == "bf16"
    assert load("llama", preset="stable", file=file).config.training.precision == "fp16"


def test_contradicting_words_for_precision(write: Write) -> None:
    message = refusal(file=write({"training": {"use_amp": False, "precision": "bf16"}}))
    assert "training.use_amp means training.precision fp32" in message
    assert ":1:15: " in message


# ------------------------------------------------------------------------------------------------ other families' words


@pytest.mark.parametrize(
    ("word", "given", "key"),
    [
        ("train_batch_size", 3, "training.batch_size"),
        ("batch_size_per_gpu", 3, "training.batch_size"),
        ("gradient_accumulation_steps", 3, "training.grad_accum_nums"),
        ("lr", 0.5, "training.learning_rate"),
        ("train_timesteps", 33, "training.max_steps"),
        ("n_transit", 33, "training.context_length"),
        ("max_seq_len", 33, "training.context_length"),
        ("sequence_length", 33, "training.context_length"),
        ("tf_n_layer", 3, "model.num_layers"),
        ("n_layers", 3, "model.num_layers"),
        ("tf_n_head", 8, "model.num_attention_heads"),
        ("n_heads", 8, "model.num_attention_heads"),
        ("tf_n_embd", 96, "model.hidden_size"),
        ("n_embed", 96, "model.hidden_size"),
        ("tf_n_inner", 96, "model.intermediate_size"),
        ("mixed_precision", "bf16", "training.precision"),
        ("summary_interval", 3, "report.log_interval"),
        ("ckpt_interval", 3, "training.save_interval"),
    ],
)
def test_words_of_the_other_families(write: Write, word: str, given: Any, key: str) -> None:
    from_file = load("llama", preset="tiny", file=write({word: given}))
    assert value(from_file, key) == given
    assert [notice for notice in from_file.notices if word in notice and key in notice]
    from_section = load("llama", preset="tiny", file=write({key.split(".")[0]: {word: given}}))
    assert value(from_section, key) == given
    from_flag = load("llama", preset="tiny", flags=[(word.replace("_", "-"), str(given))])
    assert value(from_flag, key) == given
    assert from_flag.notices == ()


def test_mixed_precision_no_is_full_precision(write: Write) -> None:
    assert load("llama", file=write("mixed_precision: no\n", "a.yaml")).config.training.precision == "fp32"


def test_one_thing_set_under_two_names(write: Write) -> None:
    message = refusal(file=write({"training": {"batch_size": 1}, "train_batch_size": 2}))
    assert "set the same thing twice (training.batch_size)" in message


# ------------------------------------------------------------------------------------------------ warm-up


def test_an_explicit_warmup_above_max_steps_is_refused(write: Write) -> None:
    message = refusal(preset="tiny", file=write({"training": {"warmup_steps": 30}}))
    assert "training.warmup_steps: 30 is more than training.max_steps 20" in message
    assert ":1:31: " in message
    assert "--warmup-steps: " in refusal(preset="tiny", flags=[("max-steps", "3"), ("warmup-steps", "4")])


def test_an_inherited_warmup_is_clamped_and_said(write: Write) -> None:
    loaded = load("llama", preset="tiny", flags=[("max-steps", "1")])
    assert loaded.config.training.warmup_steps == 1
    assert loaded.notices == ("training.warmup_steps 2 (preset tiny) is clamped to max_steps 1",)
    from_file = load("llama", preset="tiny", file=write({"training": {"warmup_steps": 9}}), flags=[("max_steps", "3")])
    assert from_file.config.training.warmup_steps == 3


def test_the_settings_of_a_run_are_a_configuration_too(tmp_path: Path) -> None:
    """Its config.json says more than the settings; a slip in it is told with its place."""
    first = load("llama", preset="tiny", flags=[("max_steps", "3")])
    file = tmp_path / "config.json"
    told = {"family": "llama", "preset": "tiny", "identity_hash": "0", "config": to_dict(first.config)}
    file.write_text(json.dumps(told, indent=1), encoding="utf-8")
    assert load("llama", file=file).config == first.config
    told["config"]["training"]["max_step"] = 4
    file.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"training\.max_step: no such setting") as caught:
        load("llama", file=file)
    assert re.fullmatch(r".*config\.json:1:\d+", caught.value.where)


# ------------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("key", "text", "target", "expected"),
    [
        ("max-steps", "3", "training.max_steps", 3),
        ("max_steps", "3", "training.max_steps", 3),
        ("training.max-steps", "3", "training.max_steps", 3),
        ("learning-rate", "3e-4", "training.learning_rate", 3e-4),
        ("seed", "7", "system.seed", 7),
        ("deterministic", None, "system.deterministic", True),
        ("deterministic", "false", "system.deterministic", False),
        ("data-path", "null", "data.data_path", None),
        ("data-path", "3", "data.data_path", "3"),
        ("tokenizer-name", "no", "data.tokenizer_name", "no"),
        ("num-workers", "auto", "data.num_workers", "auto"),
        ("num-workers", "2", "data.num_workers", 2),
        ("max-grad-norm", "-1", "training.max_grad_norm", -1.0),
        ("hidden-size", "null", "model.hidden_size", None),
        ("name", "x1", "run.name", "x1"),
        ("checkpoint", "runs/x", "checkpoint.resume", "runs/x"),
        ("experiment-name", "e", "run.experiment_name", "e"),
        ("run.tags.team", "blue", "run.tags", {"team": "blue"}),
        ("tags", "{a: b, c: '1'}", "run.tags", {"a": "b", "c": "1"}),
        ("sample-prompt", "", "report.sample_prompt", ""),
        ("tie-word-embeddings", "true", "model.tie_word_embeddings", True),
    ],
)
def test_flags_are_read_by_their_setting(key: str, text: str | None, target: str, expected: Any) -> None:
    loaded = load("llama", preset="tiny", flags=[(key, text)])
    assert value(loaded, target) == expected
    assert loaded.origins[target] == Origin("flag", f"--{key}")


def test_the_last_flag_wins_and_tags_add_up() -> None:
    loaded = load("llama", flags=[("seed", "1"), ("seed", "2"), ("run.tags.a", "x"), ("run.tags.b", "y")])
    assert (loaded.config.system.seed, loaded.config.run.tags) == (2, {"a": "x", "b": "y"})


def test_every_setting_can_be_set_by_a_flag_in_both_spellings() -> None:
    """Contract item 158, for the settings."""
    plain = load("llama", preset="tiny")
    tree = to_dict(plain.config)
    tried = 0
    for section, entries in tree.items():
        if not isinstance(entries, dict):
            continue
        for name, current in entries.items():
            if name in ("tags", "resume", "hf_token", "profile_steps"):  # the last asks for the trace, too
                continue
            text = "null" if current is None else str(current).lower() if isinstance(current, bool) else str(current)
            for spelling in (f"{section}.{name}", f"{section}.{name}".replace("_", "-")):
                assert load("llama", preset="tiny", flags=[(spelling, text)]).config == plain.config
                tried += 1
    assert tried > 140
