"""Makes tests/golden/kept: a small finished run of each family and one that ended with a NaN, as 76f46e4 made them.

    git worktree add --detach /tmp/then 76f46e4
    PYTHONPATH=/tmp/then/src .venv/bin/python tests/golden/make_runs.py

The folders are those that the command line left, nothing added. Of the histories that `ad` learnt from, only the
HDF5 file is kept. recorded.json: what the same version then said of each run, and on which machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
KEPT = TESTS / "golden" / "kept"
TEXTS = ("few_words.txt", "few_documents.jsonl")  # lie beside the runs
HISTORIES = Path("datasets", "tiny", "history_darkroom_PSRL_alg-seed42.hdf5")
SAME_BITS = {  # on every x86-64 processor, as far as possible: each of the first three changes the bits of some family
    "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
SMALL = ("model.hidden_size=8", "model.num_attention_heads=2", "model.intermediate_size=24", "system.threads=1")
TEXT = (*SMALL, "data.dataset_name=auto", "training.context_length=32")
LLAMA = ("llama", "tiny", *TEXT, "data.data_path=few_words.txt", "model.vocab_size=264", "model.head_dim=4",
         "model.num_key_value_heads=1")  # fmt: skip
TRAIN = {
    "llama": LLAMA,
    "mlm": (
        "mlm",
        "tiny",
        *TEXT,
        "data.data_path=few_documents.jsonl",
        "data.tokenizer_vocab_size=300",
        "model.vocab_size=304",
    ),
    "llada": ("llada", "tiny", *TEXT, "data.data_path=few_documents.jsonl", "model.vocab_size=264", "model.head_dim=4"),
    "ad": ("ad", "tiny", *SMALL, "data.n_stream=2", "data.train_n_stream=2", "data.total_source_timesteps=200"),
}
NAN = "nan_act@step=13,module=layers.1.mlp.w2,index=5"
EVALUATE = dict.fromkeys(TRAIN, ("eval", "--json")) | {"ad": ("eval", "--json", "--episodes", "5")}
FIGURES = ("loss", "accuracy", "return", "first_return", "last_return")  # of what `eval --json` says


def numbers(text: str) -> dict[str, float]:
    """What `eval --json` says that is kept."""
    told: dict[str, Any] = json.loads(text)
    return {name: told[name] for name in FIGURES if name in told}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def command(folder: Path, *words: str, code: int = 0, **variables: str) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LOCKSTEP_", "DATASET_"))}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder, env={**environ, **SAME_BITS, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def make(folder: Path) -> dict[str, Any]:
    """Train, look at a copy of each run, and say what was seen."""
    for name in TEXTS:
        shutil.copy(TESTS / name, folder)
    seen: dict[str, Any] = {"machine": f"{platform.machine()} {platform.node()}, {platform.platform()}"}
    for family, words in TRAIN.items():
        command(folder, "train", *words, "--name", family)
        copy = shutil.copytree(folder / "runs" / family, folder / "copies" / family)
        verb, *flags = EVALUATE[family]
        seen[family] = {"eval": numbers(command(folder, verb, str(copy), *flags))}
        if family != "ad":  # an agent is not exported
            command(folder, "export", str(copy), str(folder / "exported" / family), "--to", "hf")
            seen[family]["export"] = sha256(folder / "exported" / family / "model.safetensors")
    command(folder, "train", *LLAMA, "--batch-size", "auto:4", "--name", "nan", code=71, LOCKSTEP_FAULT=NAN)
    return seen


if __name__ == "__main__":
    import lockstep

    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        seen = {"source": lockstep.__file__, **make(made)}
        shutil.rmtree(KEPT, ignore_errors=True)
        for run in (*TRAIN, "nan"):
            shutil.copytree(made / "runs" / run, KEPT / run)
        (KEPT / HISTORIES).parent.mkdir(parents=True)
        shutil.copy(made / HISTORIES, KEPT / HISTORIES)
        (KEPT / "recorded.json").write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
