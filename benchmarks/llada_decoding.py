"""What fewer forward passes cost: masked diffusion that fills one token a pass, by threshold, and in fewer steps.

A tiny model learns sentences of a small grammar, so that quality can be counted: words the grammar has, and neighbours
it allows. All ways sample the same prompts with the same seeds, in one process, in turn.
Usage: python benchmarks/llada_decoding.py [--steps 1500] [--texts 40] [--tokens 56] [--run FOLDER] [--anyway]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import busy
import numpy as np

from lockstep.config.load import load
from lockstep.engine.inference import Trained, load_run
from lockstep.engine.train import train
from lockstep.objectives.denoise import DiffusionSampleOptions, generate
from lockstep.objectives.diffusion import Diffusion

KINDS: Mapping[str, tuple[str, ...]] = {
    "start": ("the", "a", "every", "some"),
    "thing": ("cat", "horse", "sailor", "lamp", "window", "river"),
    "act": ("sees", "follows", "paints", "hears"),
}
ORDER = ("start", "thing", "act", "start", "thing")
WORDS = {word: kind for kind, words in KINDS.items() for word in words}
NEXT = {first: {second for one, second in itertools.pairwise(ORDER) if one == first} for first in KINDS}
SEED, SENTENCES, TEMPERATURE, PROMPT = 7, 20_000, 0.8, "the cat "


def sentences(count: int) -> str:
    random = np.random.default_rng(SEED)
    return "\n".join(" ".join(str(random.choice(KINDS[kind])) for kind in ORDER) + "." for _ in range(count))


def quality(text: str) -> tuple[int, int, int, int]:
    """(known words, words, allowed neighbours, neighbours); the last word may be cut off and is left out."""
    known = pairs = allowed = total = 0
    for sentence in text.replace("\n", " ").split("."):
        words = sentence.split()
        total += len(words)
        known += sum(word in WORDS for word in words)
        for one, other in itertools.pairwise(words):
            pairs += 1
            allowed += one in WORDS and WORDS.get(other) in NEXT[WORDS[one]]
    return known, total, allowed, pairs


def trained(folder: Path, steps: int) -> Path:
    """The folder of a run that has learnt the grammar."""
    text = folder / "text.txt"
    text.write_text(sentences(SENTENCES), encoding="utf-8")
    settings = {
        "data.dataset_name": "text", "data.data_path": text, "data.cache_dir": folder / "cache", "run.out": folder,
        "run.name": "grammar", "training.max_steps": steps, "training.batch_size": 32, "training.eval_interval": 0,
        "training.save_interval": 0, "training.learning_rate": 3e-3, "report.sample_prompt": "", "system.device": "cpu",
        "report.log_interval": max(1, steps // 10),
    }  # fmt: skip
    found = train(load("llada", preset="tiny", flags=[(key, str(value)) for key, value in settings.items()]))
    print(f"trained {steps} steps, loss {found.loss:.3f}")
    return folder / "grammar"


def measure(known: Trained, options: DiffusionSampleOptions, texts: int) -> tuple[float, float, float, float]:
    """(passes, seconds, share of known words, share of allowed neighbours) of one way to sample."""
    objective = known.objective
    assert isinstance(objective, Diffusion)
    prompt = known.tokenizer.encode([PROMPT])[0].tolist()
    bias_V, passes, seconds, counts = objective.logit_bias(known.model), list[int](), list[float](), [0, 0, 0, 0]
    for seed in range(texts):
        began = time.process_time()
        asked = DiffusionSampleOptions(**{**vars(options), "seed": seed})
        done = generate(known.model, [prompt], asked, mask=objective.mask, bias_V=bias_V)
        seconds.append(time.process_time() - began)
        passes.append(done.passes)
        counts = [sum(pair) for pair in zip(counts, quality(known.tokenizer.decode(done.rows[0])), strict=True)]
    return statistics.mean(passes), statistics.median(seconds), counts[0] / counts[1], counts[2] / max(1, counts[3])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=56)
    parser.add_argument("--run", type=Path, help="of an earlier call, instead of training")
    busy.add_anyway(parser)
    asked = parser.parse_args()
    busy.ensure_quiet(parser, asked)
    with tempfile.TemporaryDirectory() as folder:
        known = load_run(asked.run or trained(Path(folder), asked.steps), device="cpu")
    plain = {"tokens": asked.tokens, "temperature": TEMPERATURE}
    ways: dict[str, DiffusionSampleOptions] = {
        "one token a pass": DiffusionSampleOptions(**plain),
        **{f"threshold {value}": DiffusionSampleOptions(**plain, threshold=value) for value in (0.9, 0.8, 0.6)},
        **{
            f"{asked.tokens * part // 4} steps": DiffusionSampleOptions(**plain, steps=asked.tokens * part // 4)
            for part in (3, 2)
        },
    }
    print(f"{'':<18}{'passes':>8}{'CPU ms':>9}{'words':>8}{'neighbours':>12}")
    for name, options in ways.items():
        passes, seconds, words, neighbours = measure(known, options, asked.texts)
        print(f"{name:<18}{passes:>8.1f}{seconds * 1e3:>9.0f}{words:>8.1%}{neighbours:>12.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
