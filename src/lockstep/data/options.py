"""Settings of the data (section `data`)."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr

from lockstep.config.section import Section, setting

SUFFIXES = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}
COUNT = re.compile(r"(\d{1,20}(_\d{1,20}){0,9}|\d{1,3}(,\d{3}){1,9})(\.\d{1,20})?[kmb]?", re.ASCII)


def count(value: object) -> object:
    """500k, 1.5M or 1_000_000 as a number; what is none of these is left to be refused."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if not COUNT.fullmatch(text):
        return value
    scale = SUFFIXES.get(text[-1:], 1)
    exact = Decimal((text[:-1] if scale > 1 else text).replace(",", "_")) * scale
    return int(exact) if exact == exact.to_integral_value() else value


class DataOptions(Section, frozen=True):
    """What is trained on, and how it reaches the model."""

    dataset_name: str = setting(
        "auto",
        "auto, builtin, text (with data_path), synthetic, wikitext, c4, imdb, hf (their mixture), or a dataset of the "
        "hub: owner/name[:config[:split]][@revision]. A|B: B where A cannot be had. auto: data_path if set, else "
        "wikitext where the hub gives it, else builtin, said in one line.",
        max_length=500,
    )
    data_path: str | None = setting(
        None,
        "Local .txt, .jsonl, .json, .csv or .parquet file, folder or glob. A folder with "
        "train_data.npy, val_data.npy and metadata.json is ready windows of token ids.",
        min_length=1,
        max_length=4000,
    )
    text_column: str | None = setting(
        None, "Field that holds the text (null: text, content or the only text field).", max_length=200
    )
    streaming: bool = setting(False, "Fetch only those parts of the hub's files that are needed, not whole files.")
    max_train_samples: Annotated[int, BeforeValidator(count)] = setting(
        500_000, "Documents used at most, before the split; also 500k, 1.5M.", ge=2, le=1 << 40, examples=["500k"]
    )
    min_words: int = setting(0, "Documents of fewer words are left out.", unit="words", ge=0, le=1 << 20)
    documents: Literal["joined", "separated", "masked", "padded", "answers"] = setting(
        "separated",
        "How documents share a row: joined, with a separator between them, also blind to each other (masked), or not "
        "at all (padded, mlm only). answers (llada only): each is a conversation, of which the last answer is learnt.",
    )
    validation_fraction: float = setting(0.05, "Share of the documents kept for validation.", gt=0, lt=1)
    tokenizer_name: str | None = setting(
        None,
        "null or auto: the model's own where it can be had, else builtin. builtin: byte-level BPE trained on the "
        "training split; wordpiece, word: likewise, lower-cased; bytes: one id per byte; a folder or file with "
        "tokenizer.json; or a hub id.",
        max_length=500,
    )
    tokenizer_vocab_size: int = setting(
        4096, "Size of the builtin tokenizer (capped at model.vocab_size).", ge=300, le=1 << 20
    )
    cache_dir: str = setting(
        ".cache/datasets", "Where prepared datasets lie.", role="cosmetic", min_length=1, max_length=4000
    )
    num_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = setting(
        "auto", "Threads that prepare batches ahead of the step; 0: none.", role="layout"
    )
    prefetch_factor: int = setting(2, "Batches each worker keeps ready.", role="layout", ge=1, le=1024)
    pin_memory: bool = setting(True, "Page-locked batches, for faster copies to a GPU.", role="layout")
    hf_token: SecretStr | None = setting(
        None, "Hugging Face token (default: $HF_TOKEN). Never written.", role="cosmetic"
    )


class HistoryOptions(DataOptions, frozen=True):
    """Histories of source learners: the worlds they are of, who learnt in them, and which of them are distilled."""

    data_path: str | None = setting(None, "Folder of the histories (null: datasets).", min_length=1, max_length=4000)
    env: Literal["darkroom", "darkroompermuted", "key_door"] = setting("darkroom", "The world that is learnt in.")
    grid_size: int = setting(9, "Cells of a side of the grid.", ge=2, le=16)
    horizon: int | None = setting(None, "Steps of an episode (null: the world's own).", unit="steps", ge=1, le=1 << 20)
    max_reward: float = setting(20, "What a return is told beside, in evaluations.", role="cosmetic", gt=0, le=1e9)
    env_split_seed: int = setting(0, "Decides which tasks are kept unseen.", ge=0, le=(1 << 63) - 1)
    train_env_ratio: float = setting(0.9, "Share of the tasks that are learnt from.", gt=0, lt=1)
    alg: Literal["PPO", "PSRL"] = setting("PPO", "Who learnt: PPO, or posterior sampling (PSRL).")
    policy: Literal["MlpPolicy"] = setting("MlpPolicy", "The network of PPO.")
    n_steps: int = setting(80, "Steps between two updates of PPO.", unit="steps", ge=1, le=1 << 20)
    source_batch_size: int = setting(40, "Steps of a minibatch of PPO.", unit="steps", ge=1, le=1 << 24)
    n_epochs: int = setting(20, "Passes of PPO over what it has just seen.", ge=1, le=1 << 16)
    source_lr: float = setting(3e-4, "Learning rate of PPO.", gt=0, le=100)
    source_noise: float = setting(0.05, "Share of random actions of posterior sampling.", ge=0, le=1)
    streams_per_learner: int = setting(
        1, "Histories that one PPO learner makes at a time; 0: all of a task.", ge=0, le=1 << 16
    )
    alg_seed: int = setting(42, "Seed of the source learners.", ge=0, le=(1 << 63) - 1)
    total_source_timesteps: int = setting(
        100_000, "Steps of all histories of a task together.", unit="steps", ge=1, le=1 << 40
    )
    n_stream: int = setting(100, "Histories of each task.", ge=1, le=1 << 24)
    n_process: int = setting(8, "Threads that collect, at most as many as cores.", role="layout", ge=1, le=4096)
    collect: bool = setting(True, "Collect histories that are not there; false: say how.", role="cosmetic")
    train_source_timesteps: int = setting(
        1000, "Steps from the beginning of each history that are distilled.", unit="steps", ge=1, le=1 << 40
    )
    train_n_stream: int = setting(100, "Histories of each task that are distilled.", ge=1, le=1 << 24)
    episode_stride: int = setting(
        1, "Distil every n-th episode of a history: more of it in one context.", ge=1, le=1 << 20
    )


TEXT_SETTINGS = (
    "dataset_name", "text_column", "streaming", "max_train_samples", "min_words", "documents", "validation_fraction",
    "tokenizer_name", "tokenizer_vocab_size",
)  # fmt: skip
