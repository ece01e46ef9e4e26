"""Bad values, one by one: exit 2, the place, the key, got and expected, and the likely slip (faults.md row 35)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

# (text of the file, line:column, key, what else the message says)
IN_A_FILE: list[tuple[str, str, str, str]] = [
    # unknown keys and sections
    ('{"training": {"learnin_rate": 1}}', "1:15", "training.learnin_rate", "did you mean training.learning_rate?"),
    ('{"training": {"batchsize": 1}}', "1:15", "training.batchsize", "did you mean training.batch_size?"),
    ('{"training": {"max_step": 1}}', "1:15", "training.max_step", "did you mean training.max_steps?"),
    ('{"training": {"seed": 1}}', "1:15", "training.seed", "did you mean system.seed?"),
    ('{"training": {"num_layers": 1}}', "1:15", "training.num_layers", "did you mean model.num_layers?"),
    ('{"model": {"layers": 1}}', "1:12", "model.layers", "did you mean model.num_layers?"),
    ('{"data": {"datasets": "x"}}', "1:11", "data.datasets", "did you mean data.dataset_name?"),
    ('{"learning_rate": 1}', "1:2", "learning_rate", "did you mean training.learning_rate?"),
    ('{"max_steps": 1}', "1:2", "max_steps", "did you mean training.max_steps?"),
    ('{"trainig": {"max_steps": 1}}', "1:2", "trainig", "did you mean the section training?"),
    ('{"Model": {}}', "1:2", "Model", "did you mean the section model?"),
    ('{"zzz": 1}', "1:2", "zzz", "sections: model,"),
    ('{"training": {"": 1}}', "1:15", "training.", "no such setting"),
    ('{"training.max_steps": 1}', "1:2", "training.max_steps", 'write {"training": {"max_steps": ...}}'),
    ('{"training": {"training.seed": 1}}', "1:15", "training.training.seed", "did you mean system.seed?"),
    ('{"data": {"training.max_steps": 1}}', "1:11", "training.max_steps", 'write {"training": {"max_steps": ...}}'),
    ('{"training.max_step": 1}', "1:2", "training.max_step", "did you mean training.max_steps?"),
    # wrong types
    ('{"training": {"batch_size": "4"}}', "1:29", "training.batch_size", "write 4 without quotes"),
    ('{"training": {"learning_rate": "1e-4"}}', "1:32", "training.learning_rate", "write 1e-4 without quotes"),
    ('{"training": {"batch_size": true}}', "1:29", "training.batch_size", "got true, expected a whole number"),
    ('{"training": {"batch_size": 4.0}}', "1:29", "training.batch_size", "got 4.0, expected a whole number"),
    ('{"training": {"batch_size": 4.5}}', "1:29", "training.batch_size", "got 4.5"),
    ('{"training": {"batch_size": null}}', "1:29", "training.batch_size", "got null"),
    ('{"training": {"batch_size": [4]}}', "1:29", "training.batch_size", "got [4]"),
    ('{"training": {"batch_size": {"a": 4}}}', "1:29", "training.batch_size", 'got {"a": 4}'),
    ('{"training": {"learning_rate": true}}', "1:32", "training.learning_rate", "got true, expected a number"),
    ('{"training": {"learning_rate": null}}', "1:32", "training.learning_rate", "got null"),
    ('{"system": {"deterministic": "true"}}', "1:30", "system.deterministic", "write true without quotes"),
    ('{"system": {"deterministic": 1}}', "1:30", "system.deterministic", "got 1, expected true or false"),
    ('{"system": {"seed": 1.5}}', "1:21", "system.seed", "got 1.5"),
    ('{"model": {"model_path": 8}}', "1:26", "model.model_path", "got 8, expected text"),
    ('{"model": {"model_path": null}}', "1:26", "model.model_path", "got null"),
    ('{"model": {"hidden_size": "64"}}', "1:27", "model.hidden_size", "write 64 without quotes"),
    ('{"model": {"tie_word_embeddings": 0}}', "1:35", "model.tie_word_embeddings", "true or false or null"),
    ('{"data": {"num_workers": "four"}}', "1:26", "data.num_workers", 'or "auto"'),
    ('{"data": {"num_workers": true}}', "1:26", "data.num_workers", "got true"),
    ('{"run": {"tags": ["a"]}}', "1:18", "run.tags", "names with texts"),
    ('{"run": {"tags": {"a": 1}}}', "1:18", "run.tags", 'got {"a": 1}'),
    ('{"training": 4}', "1:14", "training", "expected a section"),
    ('{"training": []}', "1:14", "training", "expected a section"),
    # out of range
    ('{"training": {"batch_size": 0}}', "1:29", "training.batch_size", "from 1 to 1,048,576"),
    ('{"training": {"batch_size": -1}}', "1:29", "training.batch_size", "got -1"),
    ('{"training": {"max_steps": -5}}', "1:28", "training.max_steps", "got -5"),
    ('{"training": {"max_steps": 9223372036854775808}}', "1:28", "training.max_steps", "got 9223372036854775808"),
    ('{"training": {"context_length": 0}}', "1:33", "training.context_length", "got 0"),
    ('{"training": {"learning_rate": 0}}', "1:32", "training.learning_rate", "above 0"),
    ('{"training": {"learning_rate": -1e-3}}', "1:32", "training.learning_rate", "got -0.001"),
    ('{"training": {"adam_beta2": 1.0}}', "1:29", "training.adam_beta2", "below 1"),
    ('{"training": {"weight_decay": -0.1}}', "1:31", "training.weight_decay", "from 0 to 100"),
    ('{"training": {"min_lr_ratio": 2}}', "1:31", "training.min_lr_ratio", "from 0 to 1"),
    ('{"system": {"seed": -1}}', "1:21", "system.seed", "got -1"),
    ('{"system": {"device_id": -1}}', "1:26", "system.device_id", "from 0 to 1,023"),
    ('{"data": {"validation_fraction": 1}}', "1:34", "data.validation_fraction", "below 1"),
    ('{"data": {"prefetch_factor": 0}}', "1:30", "data.prefetch_factor", "got 0"),
    ('{"checkpoint": {"keep_last": 0}}', "1:30", "checkpoint.keep_last", "got 0"),
    ('{"model": {"num_layers": 0}}', "1:26", "model.num_layers", "got 0"),
    ('{"model": {"dropout": 1.0}}', "1:23", "model.dropout", "below 1"),
    ('{"model": {"init_std": 0}}', "1:24", "model.init_std", "above 0"),
    ('{"model": {"model_path": ""}}', "1:26", "model.model_path", 'got ""'),
    ('{"data": {"data_path": ""}}', "1:24", "data.data_path", 'got "", expected text of 1 to 4000 characters or null'),
    # not one of the words
    ('{"model": {"attention_backend": "flash"}}', "1:33", "model.attention_backend", "did you mean flash_attn?"),
    ('{"debug": {"log_level": "debug"}}', "1:25", "debug.log_level", "did you mean DEBUG?"),
    ('{"training": {"schedule": "cosin"}}', "1:27", "training.schedule", "did you mean cosine?"),
    ('{"training": {"precision": "int8"}}', "1:28", "training.precision", "one of auto, fp32, bf16, fp16"),
    ('{"training": {"amp_dtype": "int8"}}', "1:28", "training.amp_dtype", "bfloat16"),
    ('{"training": {"use_amp": "yes"}}', "1:26", "training.use_amp", "true or false"),
    ('{"system": {"device": "gpu"}}', "1:23", "system.device", "one of auto, cuda, cpu"),
    ('{"family": "mlm"}', "1:12", "family", 'expected "llama"'),
    ('{"objective": {"name": "casual"}}', "1:24", "objective.name", "did you mean 'causal'?"),
    # values that do not fit together
    ('{"training": {"warmup_steps": 21}}', "1:31", "training.warmup_steps", "at most 20"),
    ('{"data": {"max_seq_length": 128}}', "1:29", "data.max_seq_length", "training.context_length 64"),
    ('{"model": {"num_key_value_heads": 3}}', "1:35", "model.num_key_value_heads", "a divisor of 4"),
    ('{"model": {"num_attention_heads": 5}}', "1:35", "model.num_attention_heads", "do not divide"),
    ('{"model": {"head_dim": 15}}', "1:24", "model.head_dim", "odd"),
    ('{"training": {"context_length": 4096}}', "1:33", "training.context_length", "at most 2048"),
    ('{"data": {"dataset_name": "text"}}', "1:27", "data.dataset_name", "--data-path"),
    # names that are paths, characters that are none
    ('{"run": {"name": "../../x"}}', "1:18", "run.name", "letters, digits"),
    ('{"run": {"name": "a/b"}}', "1:18", "run.name", "letters, digits"),
    ('{"run_name": "/abs"}', "1:14", "run.name", "letters, digits"),
    ('{"experiment_name": "..\\\\x"}', "1:21", "run.experiment_name", "letters, digits"),
    ('{"model": {"model_path": "a\\u0000b"}}', "1:26", "model.model_path", "character"),
    # retired
    ('{"trust_remote_code": true}', "1:23", "trust_remote_code", "never runs code"),
    ('{"system": {"world_size": 8}}', "1:27", "system.world_size", "remove the key"),
    # twice
    ('{"training": {"batch-size": 1, "batch_size": 2}}', "1:32", "training.batch_size", "the same setting"),
    ('{"training": {"lr": 1, "learning_rate": 2}}', "1:24", "training.learning_rate", "set the same thing twice"),
]  # fmt: skip

# (words of the command line, the flag the message names, what else it says)
ON_THE_COMMAND_LINE: list[tuple[list[str], str, str]] = [
    (["--max-steps", "x"], "--max-steps", 'training.max_steps: got "x", expected a whole number'),
    (["--max_steps", "0"], "--max_steps", "got 0"),
    (["--max-steps"], "--max-steps", "needs a value"),
    (["--training.max-steps=1.5"], "--training.max-steps", "got 1.5"),
    (["training.batch_size=-1"], "--training.batch_size", "got -1"),
    (["--learning-rate", "nan"], "--learning-rate", "expected a number"),
    (["--learning-rate", "1e400"], "--learning-rate", "expected a number"),
    (["--seed", "true"], "--seed", "got true"),
    (["--training.learnin_rate", "1"], "--training.learnin_rate", "did you mean training.learning_rate?"),
    (["--optimizer.lr", "1"], "--optimizer.lr", "lockstep config explain"),
    (["--nonsense", "1"], "--nonsense", "no such flag of lockstep train"),
    (["--precision", "fp23"], "--precision", "did you mean"),
    (["--deterministic=maybe"], "--deterministic", "true or false"),
    (["--warmup-steps", "99"], "--warmup-steps", "at most 20"),
    (["--name", "../x"], "--name", "letters, digits"),
    (["--trust-remote-code", "true"], "--trust-remote-code", "never runs code"),
    (["--run.tags", "[1]"], "--run.tags", "names with texts"),
    (["--preset", "nonsense"], "--preset", "debug, demo, full, production, stable, tiny"),
    (["--config", "nowhere.json"], "--config nowhere.json", "custom_config.json"),
    (["--num-key-value-heads", "3"], "--num-key-value-heads", "a divisor of 4"),
]


@pytest.mark.parametrize(("text", "place", "key", "words"), IN_A_FILE)
def test_in_a_file(lockstep: Run, in_dir: Path, text: str, place: str, key: str, words: str) -> None:
    (in_dir / "bad.json").write_text(text)
    result = lockstep("train", "llama", "tiny", "--config", "bad.json", "--dry-run")
    assert result.code == 2
    assert result.out == ""
    first, *more = result.err.splitlines()
    assert first.startswith(f"lockstep: error: bad.json:{place}: "), result.err
    assert key in first
    assert words in result.err
    assert len(more) <= 1
    assert not more or more[0].startswith("  try: ")


@pytest.mark.parametrize(("words", "flag", "says"), ON_THE_COMMAND_LINE)
def test_on_the_command_line(lockstep: Run, in_dir: Path, words: list[str], flag: str, says: str) -> None:
    preset = [] if "--preset" in words else ["tiny"]
    result = lockstep("train", "llama", *preset, "--dry-run", *words)
    assert result.code == 2
    assert result.err.startswith(f"lockstep: error: {flag}: "), result.err
    assert says in result.err


def test_a_shape_of_ours_that_is_not_there_is_told_of_before_anything_is_fetched(lockstep: Run) -> None:
    result = lockstep("train", "llama", "tiny", "--dry-run", "--model-path", "lockstep/tinny")
    assert (result.code, result.out) == (66, "")
    assert "try: did you mean 'lockstep/tiny'?" in result.err


def test_there_are_enough_cases() -> None:
    assert len(IN_A_FILE) >= 60
    assert len({re.sub(r"\d+", "", text) for text, *_ in IN_A_FILE}) >= 60
