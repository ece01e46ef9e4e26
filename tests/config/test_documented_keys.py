"""Every key of the documented configuration acts, or is refused; none is silently ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.load import load, to_dict
from lockstep.errors import ConfigError

ACTS: dict[str, tuple[Any, str, Any]] = {  # documented key -> (a value that is not the default, setting, its value)
    "debug.enabled": (True, "debug.enabled", True),
    "debug.log_level": ("ERROR", "debug.log_level", "ERROR"),
    "model.model_path": ("lockstep/small", "model.model_path", "lockstep/small"),
    "model.num_layers": (3, "model.num_layers", 3),
    "model.hidden_size": (96, "model.hidden_size", 96),
    "model.num_attention_heads": (8, "model.num_attention_heads", 8),
    "model.num_key_value_heads": (1, "model.num_key_value_heads", 1),
    "model.intermediate_size": (77, "model.intermediate_size", 77),
    "model.vocab_size": (999, "model.vocab_size", 999),
    "model.max_position_embeddings": (4096, "model.max_position_embeddings", 4096),
    "model.attention_backend": ("native_math", "model.attention_backend", "native_math"),
    "model.use_flash_attention": (False, "model.use_flash_attention", False),
    "model.rope_theta": (12345.0, "model.rope_theta", 12345.0),
    "model.init_std": (0.01, "model.init_std", 0.01),
    "model.tie_word_embeddings": (True, "model.tie_word_embeddings", True),
    "training.batch_size": (3, "training.batch_size", 3),
    "training.grad_accum_nums": (3, "training.grad_accum_nums", 3),
    "training.context_length": (32, "training.context_length", 32),
    "training.max_steps": (7, "training.max_steps", 7),
    "training.warmup_steps": (5, "training.warmup_steps", 5),
    "training.learning_rate": (0.5, "training.learning_rate", 0.5),
    "training.weight_decay": (0.5, "training.weight_decay", 0.5),
    "training.adam_beta1": (0.5, "training.adam_beta1", 0.5),
    "training.adam_beta2": (0.5, "training.adam_beta2", 0.5),
    "training.adam_epsilon": (0.5, "training.adam_epsilon", 0.5),
    "training.max_grad_norm": (0, "training.max_grad_norm", 0.0),
    "training.use_amp": (False, "training.precision", "fp32"),
    "training.amp_dtype": ("torch.float16", "training.precision", "fp16"),
    "training.save_interval": (3, "training.save_interval", 3),
    "training.eval_interval": (3, "training.eval_interval", 3),
    "training.checkpoint_dir": ("./.checkpoints", "training.checkpoint_dir", "./.checkpoints"),
    "training.patience": (1000, "training.patience", 1000),
    "training.min_delta": (0.5, "training.min_delta", 0.5),
    "training.num_workers": (3, "data.num_workers", 3),
    "data.dataset_name": ("wikitext", "data.dataset_name", "wikitext"),
    "data.data_path": ("x.txt", "data.data_path", "x.txt"),
    "data.num_workers": (3, "data.num_workers", 3),
    "data.pin_memory": (False, "data.pin_memory", False),
    "data.prefetch_factor": (3, "data.prefetch_factor", 3),
    "data.tokenizer_name": ("builtin", "data.tokenizer_name", "builtin"),
    "max_train_samples": (3, "data.max_train_samples", 3),
    "system.device": ("cpu", "system.device", "cpu"),
    "system.device_id": (3, "system.device_id", 3),
    "system.empty_cache_interval": (10, "system.empty_cache_interval", 10),
    "system.gradient_checkpointing": (True, "system.gradient_checkpointing", True),
    "system.seed": (3, "system.seed", 3),
    "system.deterministic": (True, "system.deterministic", True),
    "system.output_dir": ("./.outputs", "system.output_dir", "./.outputs"),
    "system.log_dir": ("./.logs", "system.log_dir", "./.logs"),
    "hf_token": ("hf_abc", "data.hf_token", "***"),
    "experiment_name": ("other", "run.experiment_name", "other"),
    "run_name": ("other", "run.name", "other"),
    "tags": ({"a": "b"}, "run.tags", {"a": "b"}),
}
REFUSED: dict[str, tuple[Any, Any]] = {  # documented key -> (the value it may have, one it may not)
    "model.model_type": ("llama", "gpt2"),
    "data.max_seq_length": (64, 65),
    "data.use_augmentation": (False, True),
    "data.augmentation_prob": (0.1, 0.5),
    "system.use_distributed": (False, True),
    "system.world_size": (1, 8),
    "system.rank": (0, 1),
    "system.backend": ("nccl", "mpi"),
    "trust_remote_code": (False, True),  # contract item 44
}


def write(folder: Path, key: str, value: Any) -> Path:
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    path = folder / "c.json"
    path.write_text(json.dumps(tree))
    return path


def get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize("key", ACTS)
def test_it_acts(tmp_path: Path, key: str) -> None:
    given, setting, expected = ACTS[key]
    before = to_dict(load("llama", preset="tiny").config)
    loaded = load("llama", preset="tiny", file=write(tmp_path, key, given))
    after = to_dict(loaded.config)
    assert get(before, setting) != expected
    assert get(after, setting) == expected
    assert loaded.origins[setting].layer == "file"


@pytest.mark.parametrize("key", REFUSED)
def test_it_is_refused_unless_it_says_what_is_so_anyway(tmp_path: Path, key: str) -> None:
    harmless, other = REFUSED[key]
    assert (
        load("llama", preset="tiny", file=write(tmp_path, key, harmless)).config == load("llama", preset="tiny").config
    )
    with pytest.raises(ConfigError) as caught:
        load("llama", preset="tiny", file=write(tmp_path, key, other))
    assert key in str(caught.value)
    assert "c.json:1:" in str(caught.value)
    as_flag = [(key, json.dumps(other) if not isinstance(other, str) else other)]
    with pytest.raises(ConfigError, match=f"--{key}"):
        load("llama", preset="tiny", flags=as_flag)


def test_the_table_is_whole() -> None:
    assert len(ACTS) + len(REFUSED) == 62  # those of contract 1.2 one by one, and training.num_workers of its text
