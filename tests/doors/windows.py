"""Folders as the documented scripts of LLaDA read them, and the words that make training on them quick."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LLADA = ROOT / "doors" / "llada"
LENGTH, TRAIN, VALIDATION = 16, 24, 6
VOCABULARY, ROWS, PARAMETERS = 257, 512, 164_160  # of the bytes, and of lockstep/llada-tiny
QUICK = ("--model_name", "lockstep/llada-tiny", "--tokenizer-name", "bytes", "--device", "cpu", "system.threads=1",
         "report.tensorboard=false", "report.sample_prompt=", "data.num_workers=0")  # fmt: skip


def make(folder: Path, *, seed: int = 0) -> Path:
    """The three files, with rows of bytes that rise: something that can be learnt."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = np.random.default_rng(seed).permutation(200)[: TRAIN + VALIDATION, None]
    rows = (starts + np.arange(LENGTH)).astype(np.int64)
    np.save(folder / "train_data.npy", rows[:TRAIN])
    np.save(folder / "val_data.npy", rows[TRAIN:])
    about = {
        "sequence_length": LENGTH, "vocab_size": VOCABULARY, "train_samples": TRAIN, "val_samples": VALIDATION,
        "total_tokens": rows.size, "mask_token": VOCABULARY, "bos_token": None, "eos_token": 256, "pad_token": 256,
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(about), encoding="utf-8")
    return folder
