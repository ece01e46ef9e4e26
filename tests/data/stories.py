"""Sixty little stories, and the rows made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.schema import LlamaConfig
from lockstep.data.options import DataOptions
from lockstep.engine import settle
from lockstep.engine.options import TrainingOptions
from lockstep.engine.prepare import Prepared, prepare
from lockstep.models.options import LlamaOptions
from lockstep.objectives.causal import Causal
from lockstep.runtime.options import SystemOptions

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps", "in", "warm", "sun"]


def story(index: int) -> str:
    random = np.random.default_rng(index)
    return f"Story {index}. " + " ".join(random.choice(WORDS, 80)) + ".\n"


def write_stories(folder: Path) -> Path:
    """stories.jsonl in a folder, and the folder."""
    lines = [json.dumps({"text": story(index)}) for index in range(60)]
    (folder / "stories.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def configuration(*, context: int = 32, seed: int = 1, lr: float = 1e-3, model: str = "x", **data: Any) -> LlamaConfig:
    return LlamaConfig(
        training=TrainingOptions(context_length=context, learning_rate=lr),
        system=SystemOptions(seed=seed),
        model=LlamaOptions(model_path=model),
        data=DataOptions(**({"data_path": "stories.jsonl", "tokenizer_vocab_size": 400} | data)),
    )


def prepared(config: LlamaConfig, *, vocab_limit: int = 1000) -> Prepared:
    return prepare(settle.applied(config, settle.decide(config)), Causal(), vocab_limit=vocab_limit)
