"""Learning with float8 products beside bf16: real text, the same seeds, one verdict.

Usage: python benchmarks/float8_parity.py [--precision fp8] [--steps 200] [--seeds 11,12,13] [--rounds 3]
[--corpus code|builtin] [--vocabulary 8192] [--json FILE] [--break]
Trains a model of 90 million parameters, in bf16, with float8 in the blocks alone, and with float8 in the output matrix
too: the same first weights, the same rows in the same order. Two losses count, the mean of the last 20 steps and the
validation. A seed's are their means over the rounds: a GPU adds in another order each time. The mean of float8 over the
seeds must lie within what bf16 reaches with them, and no seed may differ from its own in bf16 by more than that spread.
Exit code 1 if not, 2 if there is no such GPU.
`code` is the source text of Python and of torch, of which 200 steps see each row once, as pre-training does. `builtin`
is the documentation inside Python, small enough to be read four times and learnt by heart; float8's rounding is in
the way of that, as dropout would be. The lines by passes show it.
The rate of learning is LLaMA's own, 3e-4. At 1e-3, where bf16's own seeds end 0.1 to 0.2 apart, float8 lost 0.06 of
3.92 on the H200 (16 November 2026; LOG.md): rounding costs more where training is close to unstable.
--break gives all numbers of float8 scales that are far too large: a proof that passes then proves nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from lockstep.config.load import load
from lockstep.engine.build import assemble, plan
from lockstep.engine.evaluate import evaluate
from lockstep.kernels import float8_head
from lockstep.models import float8
from lockstep.rundir import RunDir
from lockstep.runtime import precision
from lockstep.runtime.signals import StopRequest

LAST = 20  # steps whose mean counts
LOST = 2.0**18  # the largest number of a matrix becomes the smallest that e4m3 has
BLOCKS = "fp8, blocks"  # the output matrix stays in bf16
CODE_BYTES = 24_000_000  # more than 200 steps read
SETTINGS: dict[str, Any] = {
    "model.hidden_size": 1024, "model.num_layers": 6, "model.num_attention_heads": 16, "model.num_key_value_heads": 8,
    "model.head_dim": 64, "model.intermediate_size": 2816, "model.compile": "on",
    "training.context_length": 1024, "training.batch_size": 16, "training.learning_rate": 3e-4,
    "training.warmup_steps": 20, "training.eval_batches": 16, "training.save_interval": 0, "report.sample_prompt": "",
}  # fmt: skip


class Learnt(NamedTuple):
    """What a run came to."""

    train: float
    validation: float
    passes: list[float]  # the mean of each pass over the corpus


def trained(run: RunDir, kind: str, seed: int, device: torch.device, changed: dict[str, Any]) -> Learnt:
    """One run that saves nothing."""
    asked = "fp8" if kind == BLOCKS else kind
    settings = {**SETTINGS, **changed, "system.device": device.type, "system.seed": seed, "training.precision": asked}
    loaded = load("llama", preset="demo", flags=[(key, str(value)) for key, value in settings.items()])
    since = time.perf_counter()
    assembled = assemble(plan(loaded, device), run, point=None, sinks=[], stop=StopRequest())
    parts = assembled.parts
    try:
        steps = range(loaded.config.training.max_steps)
        with output_matrix_in_bf16(kind == BLOCKS):
            pending = [parts.stepper.launch(step, parts.council.fetch(parts.batches, parts.stop)) for step in steps]
        losses = [each.read().loss for each in pending]
        validation = evaluate(parts.stepper, parts.validation)["loss"]
    finally:
        assembled.loader.close()
    a_pass = max(1, parts.table.epoch_rows // assembled.loader.batch_rows)
    passes = [statistics.fmean(losses[first : first + a_pass]) for first in range(0, len(losses), a_pass)]
    last = statistics.fmean(losses[-LAST:])
    print(
        f"{kind:12} seed {seed}: first {losses[0]:.4f}, mean of the last {LAST} {last:.4f}, validation {validation:.4f}; "
        f"{len(losses) / a_pass:.2f} passes over {parts.table.epoch_rows:,} rows; {time.perf_counter() - since:.1f} s",
        *(line for line in assembled.built.notices if line.startswith("float8")),
        sep="; ",
        flush=True,
    )
    return Learnt(last, validation, passes)


@contextmanager
def output_matrix_in_bf16(wanted: bool) -> Iterator[None]:
    """Float8 in the blocks alone, or as it is."""
    with mock.patch.object(float8_head, "fits", (lambda _: False) if wanted else float8_head.fits):
        yield


def broken(right: Callable[..., float8.Cast]) -> Callable[..., float8.Cast]:
    """A cast as it must not be."""

    def lost(*args: Any, **named: Any) -> float8.Cast:
        numbers, scale = right(*args, **named)
        return (numbers.float() / LOST).to(numbers.dtype), scale * LOST

    return lost


def write_code(file: Path, most: int = CODE_BYTES) -> None:
    """Source text of this Python and of torch, a document each file, until it is enough."""
    library, torch_folder = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    mine = (path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts)
    written = 0
    with file.open("w", encoding="utf-8") as out:
        for path in (*mine, *sorted(torch_folder.rglob("*.py"))):
            text = path.read_text(encoding="utf-8", errors="replace")
            written += out.write(json.dumps({"text": text}) + "\n") if text.strip() else 0
            if written >= most:
                break


def within(what: str, plain: list[float], small: list[float], kind: str) -> bool:
    """Say whether float8 is where bf16 is."""
    low, high, mean = min(plain), max(plain), statistics.fmean(small)
    more = [other - one for one, other in zip(plain, small, strict=True)]
    furthest, unsure = max(map(abs, more)), statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else math.nan
    good = low <= mean <= high and furthest <= high - low
    print(
        f"{'ok' if good else 'NOT THE SAME'}: {what}: bf16 {low:.4f} to {high:.4f}, mean "
        f"{statistics.fmean(plain):.4f}, {kind} {mean:.4f}; furthest from its own seed {furthest:.4f}, spread "
        f"{high - low:.4f}; {statistics.fmean(more):+.4f} +- {unsure:.4f} on average"
    )
    return good


def compare(found: dict[str, list[list[Learnt]]], kind: str) -> bool:
    """The verdict on a kind: seeds' means over the rounds. What each pass over the corpus adds is told beside it."""
    means: dict[str, dict[str, list[float]]] = {
        what: {
            name: [statistics.fmean(getattr(each, what) for each in rounds) for rounds in found[name]]
            for name in ("bf16", kind)
        }
        for what in ("train", "validation")
    }
    good = [within(what, both["bf16"], both[kind], kind) for what, both in means.items()]
    by_pass = {
        name: [statistics.fmean(each) for each in zip(*(run.passes for runs in found[name] for run in runs), strict=True)]
        for name in ("bf16", kind)
    }
    apart = [f"{other - one:+.4f}" for one, other in zip(by_pass["bf16"], by_pass[kind], strict=True)]
    print(f"    by passes over the corpus: {', '.join(apart)}")
    return all(good)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8", choices=sorted(precision.FLOAT8))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=numbers, default="11,12,13", help="with commas; a seed alone proves nothing")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each seed and kind")
    parser.add_argument("--corpus", choices=("code", "builtin"), default="code")
    parser.add_argument("--vocabulary", type=int, default=8192, help="words: shares of many are smaller numbers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--break", dest="broken", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := precision.float8_obstacle(options.precision, device):
        print(f"nothing is shown: {reason}")
        return 2
    if options.broken:
        float8.cast, float8_head.turned = broken(float8.cast), broken(float8_head.turned)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; {options}")
    kinds = ["bf16", BLOCKS, "fp8"] if options.precision == "fp8" else ["bf16", options.precision]
    found: dict[str, list[list[Learnt]]] = {kind: [[] for _ in options.seeds] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder, since = Path(name), time.perf_counter()
        changed = {"training.max_steps": options.steps, "data.cache_dir": folder / "cache"}
        changed |= dict.fromkeys(("model.vocab_size", "data.tokenizer_vocab_size"), options.vocabulary)
        if options.corpus == "code":
            write_code(folder / "code.jsonl")
            changed |= {"data.dataset_name": "text", "data.data_path": folder / "code.jsonl"}
        for number in range(options.rounds):
            for place, seed in enumerate(options.seeds):
                for kind in kinds:
                    run = RunDir(folder / f"{kind}-{seed}-{number}")
                    found[kind][place].append(trained(run, kind, seed, device, changed))
    good = [compare(found, kind) for kind in kinds[1:]]
    print(f"{time.perf_counter() - since:.0f} s in all")
    if options.json:
        named = {kind: [[run._asdict() for run in runs] for runs in each] for kind, each in found.items()}
        options.json.write_text(json.dumps({"good": good, "seeds": options.seeds, **named}, indent=1))
    return 0 if good[-1] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
