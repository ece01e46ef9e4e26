"""Settings of the data (section `data`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from lockstep.config.section import Section, setting


class DataOptions(Section):
    """What is trained on, and how it reaches the model."""

    dataset_name: str = setting(
        "auto",
        "auto, builtin, text (with data_path), synthetic, or a dataset of the hub. auto: data_path if set, else the "
        "best corpus that can be reached, said in one line.",
        max_length=500,
    )
    data_path: str | None = setting(
        None, "Local .txt, .jsonl, .json or .parquet file, folder or glob.", max_length=4000
    )
    text_column: str | None = setting(
        None, "Field that holds the text (null: text, content or the only text field).", max_length=200
    )
    max_train_samples: int = setting(500_000, "Documents used at most, before the split.", ge=2, le=1 << 40)
    validation_fraction: float = setting(0.05, "Share of the documents kept for validation.", gt=0, lt=1)
    tokenizer_name: str | None = setting(
        None,
        "null or auto: the model's own where it can be had, else builtin. builtin: byte-level BPE trained on the "
        "training split; bytes: one id per byte; a folder or file with tokenizer.json; or a hub id.",
        max_length=500,
    )
    tokenizer_vocab_size: int = setting(
        4096, "Size of the builtin tokenizer (capped at model.vocab_size).", ge=300, le=1 << 20
    )
    cache_dir: str = setting(".cache/datasets", "Where prepared datasets lie.", role="cosmetic", max_length=4000)
    num_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = setting(
        "auto", "Threads that prepare batches ahead of the step; 0: none.", role="layout"
    )
    prefetch_factor: int = setting(2, "Batches each worker keeps ready.", role="layout", ge=1, le=1024)
    pin_memory: bool = setting(True, "Page-locked batches, for faster copies to a GPU.", role="layout")
    hf_token: SecretStr | None = setting(
        None, "Hugging Face token (default: $HF_TOKEN). Never written.", role="cosmetic"
    )
