"""A real proof on real text: the bound of masked diffusion beside the loss of next-token prediction (science G2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.inference import load_run
from tests.gates.training import run
from tests.science import documentation, doubts

MEGABYTES = 3
MOST = 1.35  # times the loss of next-token prediction
WORD = re.compile(r"[a-z]{2,}")
SHAPE: dict[str, Any] = {  # twelve million parameters, 4,096 tokens
    "model.num_layers": 6,
    "model.hidden_size": 384,
    "model.num_attention_heads": 6,
    "model.num_key_value_heads": 6,
    "model.intermediate_size": 1024,
    "model.vocab_size": 4097,
    "model.tie_word_embeddings": True,
    "model.dropout": 0.1,
    "data.dataset_name": "text",
    "data.tokenizer_name": "builtin",
    "data.tokenizer_vocab_size": 4096,
    "data.validation_fraction": 0.15,
    "training.context_length": 256,
    "training.batch_size": 128,
    "training.learning_rate": 1e-3,
    "training.warmup_steps": 200,
    "training.min_lr_ratio": 0.05,
    "training.weight_decay": 0.1,
    "training.adam_beta2": 0.98,
    "training.eval_interval": 250,
    "training.save_interval": 0,
}
STEPS = {"llama": 1250, "llada": 6000}  # next-token prediction has its best validation long before
OWN: dict[str, dict[str, Any]] = {"llama": {}, "llada": {"objective.eval_draws": 4, "training.eval_interval": 0}}
PROMPTS = ("Return the number of", "Raises an error if the ", "This function ")


def trained(folder: Path, family: str, **changes: Any) -> tuple[float, Mapping[str, float]]:
    """The best validation of a model of that family on the same text, and all measures of the last."""
    text = folder / "text.jsonl"
    if not text.is_file() and documentation.write(text, MEGABYTES) < 0.9e6 * MEGABYTES:
        pytest.skip("TOO LITTLE DOCUMENTATION INSTALLED: the bound on real text (science G2) is not shown")
    own = {"data.data_path": text, "data.cache_dir": folder / "cache", "training.max_steps": STEPS[family]}
    parts, recorder = run(folder / family, {**SHAPE, **OWN[family], **own, **changes}, family=family, preset="tiny")
    assert family != "llada" or doubts.of_diffusion(parts.measures) == ""
    return min(event["val_loss"] for kind, event in recorder.events if kind == "eval"), parts.measures


def known_share(sample: str, text: str) -> float:
    """Which share of the words of a sample are words of the text."""
    words = WORD.findall(sample.lower())
    return sum(word in known for word in words) / len(words) if (known := set(WORD.findall(text.lower()))) else 0.0


def test_words_that_are_none_are_seen() -> None:
    """The control of the dictionary."""
    assert known_share("the quick brown fox", "a fox, the QUICK one; brown") == 1.0
    assert known_share("the qzwx browm fox", "a fox, the quick one; brown") == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: science G2 is not shown")
def test_the_bound_lies_just_above_what_next_token_prediction_reaches(tmp_path: Path) -> None:
    (loss, _), (bound, parts) = (trained(tmp_path, family, **{"system.device": "cuda"}) for family in STEPS)
    sample = samples(tmp_path / "llada")
    print(f"next token {loss:.4f}, bound {bound:.4f}, ratio {bound / loss:.3f}; {dict(parts)}\n{sample}")
    assert loss - 0.02 < bound < MOST * loss
    assert known_share(sample, (tmp_path / "text.jsonl").read_text(encoding="utf-8")) > 0.9


def samples(folder: Path) -> str:
    """What the model makes of some beginnings."""
    from lockstep.engine.inference import continue_text
    from lockstep.objectives.denoise import DiffusionSampleOptions

    (checkpoint,) = sorted((folder / "checkpoints").glob("step_*"))[-1:]
    known = load_run(checkpoint, device="cuda")
    options = [
        DiffusionSampleOptions(tokens=128, steps=128, block_length=32, temperature=0.3, seed=seed)
        for seed in range(len(PROMPTS))
    ]
    parts = (known.model, known.objective, known.tokenizer)
    return "\n---\n".join(
        continue_text(*parts, prompt, option) for prompt, option in zip(PROMPTS, options, strict=True)
    )
