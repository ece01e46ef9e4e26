"""The words of Algorithm Distillation's files: each reaches its setting (contract items 134-136, 158)."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.compat import DOORS, parse, resolve
from lockstep.config import renames
from lockstep.config.load import from_dict, identity, load, to_dict
from lockstep.config.reader import read_file
from lockstep.config.show import as_yaml
from lockstep.errors import ConfigError
from lockstep.models import shapes
from tests.doors.agents import AD

TRAIN = DOORS["train.py"]
BASE = AD / "config/model/ad_dr.yaml"
FILES = sorted(path.relative_to(AD).as_posix() for path in AD.rglob("*.yaml"))
WORDS = {  # documented key -> (another value, the setting it is, what that becomes)
    "mixed_precision": ("bf16", "training.precision", "bf16"),
    "gradient_accumulation_steps": ("4", "training.grad_accum_nums", 4),
    "train_batch_size": ("256", "training.batch_size", 256),
    "test_batch_size": ("64", "training.eval_batch_size", 64),
    "num_workers": ("2", "data.num_workers", 2),
    "tf_n_embd": ("32", "model.hidden_size", 32),
    "tf_n_layer": ("2", "model.num_layers", 2),
    "n_transit": ("160", "training.context_length", 160),
    "tf_n_head": ("2", "model.num_attention_heads", 2),
    "tf_n_inner": ("96", "model.intermediate_size", 96),
    "tf_dropout": ("0.2", "model.dropout", 0.2),
    "tf_attn_dropout": ("0.3", "model.attention_dropout", 0.3),
    "use_compressed_context": ("true", "model.compressed", True),
    "compress_interval": ("40", "model.region", 40),
    "lr": ("1e-4", "training.learning_rate", 1e-4),
    "beta1": ("0.8", "training.adam_beta1", 0.8),
    "beta2": ("0.95", "training.adam_beta2", 0.95),
    "weight_decay": ("0.1", "training.weight_decay", 0.1),
    "num_warmup_steps": ("7", "training.warmup_steps", 7),
    "train_timesteps": ("3000", "training.max_steps", 3000),
    "train_source_timesteps": ("500", "data.train_source_timesteps", 500),
    "train_n_stream": ("50", "data.train_n_stream", 50),
    "label_smoothing": ("0.1", "objective.label_smoothing", 0.1),
    "dynamics": ("true", "model.dynamics", True),
    "dynamics_strength": ("0.5", "model.dynamics_strength", 0.5),
    "flash_attn": ("false", "model.use_flash_attention", False),
    "summary_interval": ("10", "report.log_interval", 10),
    "eval_interval": ("20", "training.eval_interval", 20),
    "gen_interval": ("30", "training.gen_interval", 30),
    "ckpt_interval": ("40", "training.save_interval", 40),
    "env": ("darkroompermuted", "data.env", "darkroompermuted"),
    "grid_size": ("7", "data.grid_size", 7),
    "horizon": ("10", "data.horizon", 10),
    "max_reward": ("5", "data.max_reward", 5.0),
    "env_split_seed": ("3", "data.env_split_seed", 3),
    "train_env_ratio": ("0.8", "data.train_env_ratio", 0.8),
    "alg": ("PSRL", "data.alg", "PSRL"),
    "n_steps": ("40", "data.n_steps", 40),
    "batch_size": ("20", "data.source_batch_size", 20),
    "n_epochs": ("5", "data.n_epochs", 5),
    "alg_seed": ("1", "data.alg_seed", 1),
    "total_source_timesteps": ("5000", "data.total_source_timesteps", 5000),
    "n_stream": ("10", "data.n_stream", 10),
    "source_lr": ("1e-3", "data.source_lr", 1e-3),
    "n_process": ("2", "data.n_process", 2),
    "traj_dir": ("elsewhere", "data.data_path", "elsewhere"),
    "device": ("cuda", "system.device", "cuda"),
}
ALIKE = {"model": ("AD", "AO"), "dim_states": ("2", "3"), "dim_actions": ("1", "2"), "num_actions": ("5", "4"),
         "policy": ("MlpPolicy", "CnnPolicy")}  # fmt: skip
NATIVE = {"batch_size", "env"}  # words that as a flag are a setting's own: rows of the agent's batch
SEED_VALUES = {  # of the files, after contract 4.2 and E6
    "config/model/ad_dr.yaml": {"tf_n_embd": 64, "tf_n_layer": 4, "tf_n_head": 4, "n_transit": 240,
                                "train_batch_size": 512, "num_workers": 4, "train_timesteps": 50_000},
    "config/model/ad_dr_compressed.yaml": {
        "tf_n_embd": 128, "tf_n_layer": 6, "tf_n_head": 8, "n_transit": 328, "train_batch_size": 1024,
        "num_workers": 16, "train_timesteps": 100_000, "use_compressed_context": True, "compress_interval": 80},
    "config/model/ad_base.yaml": {
        "model": "AD", "mixed_precision": "fp16", "gradient_accumulation_steps": 1, "tf_n_inner": 128,
        "tf_dropout": 0.1, "tf_attn_dropout": 0.1, "lr": 3e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01,
        "num_warmup_steps": 1000, "train_source_timesteps": 1000, "train_n_stream": 100, "label_smoothing": 0.0,
        "dynamics": False, "dynamics_strength": 1.0, "flash_attn": True, "summary_interval": 100,
        "eval_interval": 1000, "gen_interval": 10_000, "ckpt_interval": 1000},
    "config/env/darkroom.yaml": {
        "env": "darkroom", "grid_size": 9, "dim_states": 2, "dim_actions": 1, "num_actions": 5, "horizon": 20,
        "max_reward": 20, "env_split_seed": 0, "train_env_ratio": 0.9},
    "config/algorithm/ppo_base.yaml": {"alg": "PPO", "policy": "MlpPolicy", "n_steps": 80, "batch_size": 40,
                                       "n_epochs": 20, "alg_seed": 42, "source_lr": 3e-4},
    "config/algorithm/ppo_darkroom.yaml": {"total_source_timesteps": 100_000, "n_stream": 100, "n_process": 8},
}  # fmt: skip
SEED_VALUES["config/model/ad_dr.yaml"]["test_batch_size"] = 2048
SEED_VALUES["config/model/ad_dr_compressed.yaml"]["test_batch_size"] = 2048


@pytest.fixture(autouse=True)
def here(in_dir: Path, gpus: Callable[[int], None]) -> Path:
    gpus(1)
    return in_dir


def loaded(*words: str) -> Any:
    return resolve(TRAIN, *parse(TRAIN, TRAIN.complete(words)))


def value(found: Any, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(found.config, section), name)


# ----------------------------------------------------------------------------------------------------------- the files


def test_the_files_say_what_is_documented() -> None:
    """Item 135, contract 4.2: each key once, with its value, and no other."""
    assert sorted(SEED_VALUES) == FILES
    for name, values in SEED_VALUES.items():
        assert read_file(AD / name)[-1].tree == values, name
    documented = {*WORDS, *ALIKE} - {"device", "traj_dir"}  # those two are no part of a file
    assert {key for values in SEED_VALUES.values() for key in values} == documented


def test_plain_it_uses_the_compressed_file() -> None:
    """Items 134, 135, E6: the file named by the guide, with all that it includes."""
    plain = loaded()
    config = plain.config
    assert (config.model.hidden_size, config.model.num_layers, config.model.num_attention_heads) == (128, 6, 8)
    assert (config.training.context_length, config.training.batch_size, config.training.max_steps) == (
        328,
        1024,
        100_000,
    )
    assert (config.training.precision, config.training.grad_accum_nums, config.training.min_lr_ratio) == ("fp16", 1, 0)
    assert (config.data.source_batch_size, config.data.n_steps, config.data.n_epochs) == (40, 80, 20)
    assert (config.run.out, config.run.name, config.data.data_path) == ("runs", "AD-darkroom-seed0", "datasets")
    assert (config.training.checkpoint_dir, config.checkpoint.resume) == ("runs/AD-darkroom-seed0", "auto")
    assert not config.data.collect
    assert (config.model.compressed, config.model.region) == (True, 80)
    other = loaded("--config", "config/model/ad_dr.yaml").config
    assert (other.model.hidden_size, other.model.num_layers, other.training.context_length) == (64, 4, 240)
    assert not plain.notices, "documented words need no explanation"


@pytest.mark.parametrize("name", ["ad_dr", "ad_dr_compressed"])
def test_a_file_and_the_preset_of_its_name_are_one(name: str, gpus: Callable[[int], None]) -> None:
    """`lockstep train ad NAME` trains what train.py does; the file writes out the sizes of the shape."""
    gpus(0)  # where 16 bits are left out
    native, found = load("ad", preset=name).config, loaded("--config", f"config/model/{name}.yaml").config
    ours, theirs = identity(native), identity(found)
    differ = {key for key in ours if ours[key] is not None and ours[key] != theirs[key]}
    assert differ == ({"training.context_length"} if name == "ad_dr_compressed" else set()), "328 and 320 steps"
    shapes_of = [shapes.resolve(each.model, context_length=320) for each in (native, found)]
    assert shapes_of[0] == shapes_of[1]


def test_the_file_beside_the_script_is_the_users_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started from anywhere; the working directory comes first, our own copy last."""
    place = here / "theirs"
    shutil.copytree(AD, place)
    for folder, steps in ((place, 11), (here, 12)):
        file = folder / "config/model/ad_dr_compressed.yaml"
        monkeypatch.setattr(sys, "argv", [str(place / "train.py")])
        if folder == here:
            shutil.copytree(AD / "config", here / "config")
        file.write_text(f"include: ad_base.yaml\ntrain_timesteps: {steps}\nnum_warmup_steps: 1\n", encoding="utf-8")
        words = TRAIN.complete(["--device", "cpu"])
        assert loaded("--device", "cpu").config.training.max_steps == steps
        monkeypatch.setattr(sys, "argv", ["compat.py"])
        assert loaded(*words).config.training.max_steps == steps, "a worker that was started otherwise reads the same"


def test_includes_count_from_the_file_and_from_here(here: Path) -> None:
    """Item 134: nested, later keys win, a circle is refused."""
    (here / "deep").mkdir()
    (here / "base.yaml").write_text("tf_n_embd: 16\ntf_n_head: 2\nlr: 1e-5\n", encoding="utf-8")
    (here / "deep/middle.yaml").write_text("include: base.yaml\ntf_n_embd: 32\n", encoding="utf-8")
    (here / "top.yaml").write_text("include: [deep/middle.yaml]\nlr: 1e-4\n", encoding="utf-8")
    config = loaded("--config", "top.yaml").config
    assert (config.model.hidden_size, config.model.num_attention_heads, config.training.learning_rate) == (32, 2, 1e-4)
    (here / "deep/base.yaml").write_text("tf_n_head: 4\n", encoding="utf-8")
    assert loaded("--config", "top.yaml").config.model.num_attention_heads == 4, "the one beside it comes first"
    (here / "deep/base.yaml").write_text("include: top.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="includes itself"):
        loaded("--config", "top.yaml")


# ----------------------------------------------------------------------------------------------------------- the words


@pytest.fixture(scope="module")
def usual() -> Any:
    """What ad_dr.yaml says."""
    return loaded("--config", str(BASE))


@pytest.mark.parametrize("spelling", ["_", "-"])
@pytest.mark.parametrize("way", ["file", "--set", "--set=", "flag", "native"])
def test_every_key_reaches_its_setting(way: str, spelling: str, here: Path, usual: Any) -> None:
    """Items 136, 158: in a file, with --set, and as a flag; hyphen and underscore alike."""
    base = ["--config", str(BASE)]
    words = {word.replace("_", spelling): row for word, row in WORDS.items() if way != "flag" or word not in NATIVE}
    if way == "file":
        lines = [f"{word}: {text}" for word, (text, _, _) in words.items()]
        (here / "own.yaml").write_text("\n".join([f"include: {BASE}", *lines]), encoding="utf-8")
        found = loaded("--config", "own.yaml")
    elif way in ("--set", "--set="):
        given = [f"{word}={text}" for word, (text, _, _) in words.items()]
        found = loaded(*base, *(part for one in given for part in ([way, one] if way == "--set" else [way + one])))
    elif way == "flag":
        found = loaded(*base, *(part for word, (text, _, _) in words.items() for part in (f"--{word}", text)))
    else:
        keys = {key.replace("_", spelling): text for text, key, _ in words.values()}
        found = loaded(*base, *(part for key, text in keys.items() for part in (f"--{key}", text)))
    assert {key: value(found, key) for _, key, _ in words.values()} == {key: want for _, key, want in words.values()}
    assert all(value(usual, key) != expected for _, key, expected in words.values())
    assert not found.notices, "documented words need no explanation"


def test_batch_size_is_ppos_in_a_file_and_the_agents_as_a_flag() -> None:
    config = loaded("--batch-size", "3", "--set", "batch_size=10").config
    assert (config.training.batch_size, config.data.source_batch_size) == (3, 10)


@pytest.mark.parametrize("word", ALIKE)
def test_what_cannot_be_chosen_is_checked(word: str, here: Path) -> None:
    right, wrong = ALIKE[word]
    (here / "right.yaml").write_text(f"{word}: {right}\n", encoding="utf-8")
    assert not loaded("--config", "right.yaml", "--set", f"{word}={right}").notices
    (here / "wrong.yaml").write_text(f"{word}: {wrong}\n", encoding="utf-8")
    for words in (["--config", "wrong.yaml"], ["--set", f"{word}={wrong}"]):
        with pytest.raises(ConfigError) as caught:
            loaded(*words)
        assert right in f"{caught.value.what} {caught.value.hint}", "it says the right one"


def test_the_run_folder_is_named_by_log_dir_or_by_what_is_learnt() -> None:
    for words, out, name in (
        (["--set", "log_dir=./elsewhere/this one".replace(" ", "-")], "elsewhere", "this-one"),
        (["--set", "log-dir=/a/b/"], "/a", "b"),
        (["--set", "env=darkroompermuted", "--set", "env_split_seed=7"], "runs", "AD-darkroompermuted-seed7"),
        (["--name", "mine", "--out", "there"], "there", "mine"),
    ):
        config = loaded(*words).config
        assert (config.run.out, config.run.name) == (out, name)
        assert config.training.checkpoint_dir == str(Path(out) / name)


@pytest.mark.parametrize("word", ["tf_n_embdd", "train_batchsize", "num_worker", "mixed_precisions", "gen_intervall"])
def test_a_slip_is_refused_with_what_was_meant(word: str, here: Path) -> None:
    """Item 136."""
    (here / "slip.yaml").write_text(f"{word}: 3\n", encoding="utf-8")
    for words in (["--config", "slip.yaml"], ["--set", f"{word}=3"], [f"--{word}", "3"]):
        with pytest.raises(ConfigError) as caught:
            loaded(*words)
        assert re.search(rf"did you mean -*{word[:6]}", caught.value.hint.replace("-", "_").replace("__", "--")), words
    for text in ("tf_n_embd", "=3", "a b=3"):
        with pytest.raises(ConfigError, match="expected KEY=VALUE"):
            loaded("--set", text)


def test_other_families_do_not_know_these_words(here: Path) -> None:
    (here / "other.yaml").write_text("batch_size: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no such section or setting"):
        load("llama", preset="tiny", file=Path("other.yaml"))
    assert renames.moved(("batch_size",)) is None
    assert renames.moved(("batch_size",), "ad") == ("data", "source_batch_size")
    (here / "other.yaml").write_text("model: AD\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a section with settings"):
        load("llama", preset="tiny", file=Path("other.yaml"))


def test_config_yaml_says_all_of_it_and_can_be_read_again(here: Path) -> None:
    config = loaded("--set", "log_dir=runs/here", "--precision", "bf16").config.model_copy()
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": "n", "tags": {"a": "b: #c"}})})
    (here / "again.yaml").write_text(as_yaml(to_dict(config)), encoding="utf-8")
    assert from_dict(read_file(here / "again.yaml")[-1].tree) == config
