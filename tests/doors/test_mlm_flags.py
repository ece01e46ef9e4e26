"""The flags of mlm_pretrain_v3.py: as documented, in every spelling."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.compat import DOORS, parse, resolve
from lockstep.config.load import Loaded
from tests.conftest import Outcome

Run = Callable[..., Outcome]
TRAINER = DOORS["mlm_pretrain_v3.py"]


def trained(*words: str) -> Loaded:
    return resolve(TRAINER, *parse(TRAINER, words))


def test_help_lists_the_documented_options_with_their_defaults(door: Run) -> None:
    """Item 85."""
    result = door("mlm_pretrain_v3.py", "--help")
    assert result.code == 0
    text = " ".join(result.out.split())
    for option, default in {
        "--dataset {imdb,hf}": "Dataset choice (default: hf)",
        "--streaming {true,false}": "Streaming mode (default: true)",
        "--batch-size INT": "Batch size per GPU (default: 32)",
        "--epochs INT": "Number of training epochs (default: 5)",
        "--lr FLOAT": "Learning rate (default: 3e-5)",
        "--max-samples STR": "(e.g., 500k, 5M, 50M, 500M) (default: 500k)",
        "--local_rank INT": "Local rank for distributed training (auto-detected)",
    }.items():
        assert option in text
        assert default in text


def test_the_defaults() -> None:
    config: Any = trained().config
    assert (config.data.dataset_name, config.data.streaming, config.data.max_train_samples) == ("hf", True, 500_000)
    assert (config.training.batch_size, config.training.epochs, config.training.learning_rate) == (32, 5, 3e-5)
    assert (config.training.schedule, config.training.min_lr_ratio, config.training.warmup_ratio) == ("linear", 0, 0.1)
    assert (config.training.max_grad_norm, config.training.weight_decay, config.training.precision) == (1, 0.01, "auto")
    assert (config.training.context_length, config.training.grad_accum_nums) == (128, 1)
    assert (config.data.min_words, config.data.validation_fraction, config.data.documents) == (5, 0.1, "padded")
    assert (config.data.tokenizer_name, config.data.tokenizer_vocab_size) == ("word", 30522)
    assert (config.model.num_layers, config.model.num_attention_heads, config.model.hidden_size) == (6, 8, 16)
    assert (config.report.results_dir, config.checkpoint.resume) == (".mlm_pretrained_v3", "auto")
    imdb: Any = trained("--dataset", "imdb").config.model
    assert (imdb.num_layers, imdb.num_attention_heads, imdb.hidden_size) == (4, 4, 8)
    given: Any = trained("--dataset", "imdb", "--n-layers", "2").config.model
    assert (given.num_layers, given.num_attention_heads, given.hidden_size) == (2, 4, 8)


@pytest.mark.parametrize(
    ("text", "count"),
    [("500k", 500_000), ("500K", 500_000), ("5M", 5_000_000), ("1.5M", 1_500_000), ("1000000", 1_000_000),
     ("1_000_000", 1_000_000), ("500M", 500_000_000)],
)  # fmt: skip
def test_max_samples(text: str, count: int) -> None:
    """Item 86."""
    assert trained("--max-samples", text).config.data.max_train_samples == count


@pytest.mark.parametrize(
    "words",
    [["--max-samples", "abc"], ["--streaming", "maybe"], ["--epochs", "-1"], ["--epochs", "0"], ["--lr", "fast"],
     ["--local_rank", "-1"], ["--batch-size", "0"], ["--config-name", "h200_8gpu_fats"], ["--epoch", "3"],
     ["--mixed-precision", "perhaps"]],
)  # fmt: skip
def test_a_bad_value_is_exit_2(door: Run, words: list[str]) -> None:
    """Items 86, 87."""
    result = door("mlm_pretrain_v3.py", *words)
    assert result.code == 2
    assert words[-1] in result.err or words[0] in result.err
    assert "Traceback" not in result.err


def test_zero_epochs_are_fine_where_steps_decide() -> None:
    training: Any = trained("--epochs", "0", "--max-steps", "7").config.training
    assert (training.epochs, training.max_steps) == (0, 7)


@pytest.mark.parametrize(
    ("words", "on"),
    [(["--streaming", "true"], True), (["--streaming", "FALSE"], False), (["--streaming", "Yes"], True),
     (["--streaming", "no"], False), (["--streaming", "1"], True), (["--streaming=0"], False), (["--streaming"], True),
     (["--no-streaming"], False), (["--streaming", "--epochs", "1"], True)],
)  # fmt: skip
def test_streaming(words: list[str], on: bool) -> None:
    """Item 87 and C12."""
    assert trained(*words).config.data.streaming is on


EVERY = {
    "--dataset": "imdb", "--streaming": "false", "--batch-size": "4", "--epochs": "2", "--lr": "1e-4",
    "--max-samples": "1k", "--local-rank": "0", "--n-layers": "2", "--n-heads": "2", "--n-embed": "32",
    "--max-seq-len": "64", "--min-words": "7", "--grad-accum": "2", "--gradient-clip": "0.5", "--warmup-ratio": "0.2",
    "--weight-decay": "0.1", "--mixed-precision": "bf16", "--config-name": "1gpu_standard", "--overwrite": "",
    "--mask-probability": "0.3", "--master-port": "12356",
}  # fmt: skip


def test_no_flag_of_its_own_is_forgotten(door: Run) -> None:
    usage = door("mlm_pretrain_v3.py", "--help").out
    of_mlm = {flag.replace("_", "-") for flag in re.findall(r"--[a-z_-]+", usage.partition("[--config FILE]")[0])}
    assert 18 <= len(of_mlm & EVERY.keys()) == len(of_mlm)


@pytest.mark.parametrize("flag", EVERY)
def test_every_flag_with_hyphen_and_underscore(flag: str) -> None:
    """Items 88, 158."""
    value = [EVERY[flag]] if EVERY[flag] else []

    def understood(*words: str) -> tuple[object, list[tuple[str, str | None]]]:
        asked, settings = parse(TRAINER, words)
        return asked, [(key.replace("-", "_"), text) for key, text in settings]

    hyphen = understood(flag, *value)
    assert hyphen == understood("--" + flag[2:].replace("-", "_"), *value)
    assert hyphen == understood("=".join([flag, *value]))
    assert hyphen != understood()
    assert trained(flag, *value)


def test_local_rank_is_the_device_only_where_no_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: the environment wins."""
    assert trained("--local_rank", "0").config == trained().config
    assert trained("--local-rank=3").config.system.device_id == 3
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    assert trained("--local-rank=3").config.system.device_id == 0
