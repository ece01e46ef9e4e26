"""The other families on one GPU, each beside what it is held against; one call, a process and a time limit for each.

  llada   4 layers of LLaDA-8B's width, 4,096 tokens, batch 8: hidden places alone through the head, and all of them
  bert    BERT-base, natural document lengths (a quarter of 512 on average): ours packed, transformers compiled, padded
  ad      64 wide, 4 layers, 240 transitions, batch 512: minutes for 50,000 steps
  full    llama with 32 layers, 8,192 tokens, batch 1, moments in bf16: MFU, and the memory estimate; with blocks that
          are computed again in the backward pass, as the preset has it, and with all that they made kept
  demo    seconds from `lockstep train llama demo` to its first step line: the first time, and with warm caches (the
          median of three starts after it)
Usage: python benchmarks/h200_families.py [--only llada,bert,ad,full,demo] [--steps 10] [--anyway] [--json FILE]
The exit code is 1 when a figure misses what is due, or a row failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # benchmarks are scripts, this one shares its clock with another

import busy
from h200_llama import WARM_UP, figures_of, timed_steps, write

from lockstep.objectives.diffusion import Diffusion

LIMIT_SECONDS = 240.0  # for a row
BERT_ROWS, BERT_LENGTH, BERT_VOCABULARY, CHOSEN = 128, 512, 30522, 0.15
AD_STEPS = 50_000
FIRST_STEP, WARM_STARTS = "Step [0/", 3
BENCH = [sys.executable, "-m", "lockstep", "bench"]
ONCE = ["--training.grad-accum-nums=1", "--system.device=cuda"]
LLADA = [
    "llada", "llada_base", "--model.model-path=GSAI-ML/LLaDA-8B-Base", "--model.num-layers=4",
    "--training.context-length=4096", "--training.batch-size=8", "--objective.random-length-probability=0", *ONCE,
]  # fmt: skip
FULL = ["llama", "full", "--training.batch-size=1", "--training.optimizer-states=bf16", *ONCE]
COMMANDS = {
    "llada": [*BENCH, *LLADA],
    "llada-all": [*BENCH, *LLADA, "--objective.name=h200_families:everywhere"],
    "bert": [*BENCH, "mlm", "mlm_base", "--data.documents=masked", f"--training.batch-size={BERT_ROWS}", *ONCE],
    "bert-padded": [sys.executable, __file__, "--row", "bert-padded"],
    "ad": [*BENCH, "ad", "ad_dr", *ONCE],
    "full": [*BENCH, *FULL],
    "full-kept": [*BENCH, *FULL, "--system.gradient-checkpointing=false"],
}
ROWS = {
    "llada": ("llada", "llada-all"), "bert": ("bert", "bert-padded"), "ad": ("ad",), "full": ("full", "full-kept"),
    "demo": (),
}  # fmt: skip


class Due(NamedTuple):
    """A figure and what it has to be: at least, or at most."""

    what: str
    value: float
    least: float = -math.inf
    most: float = math.inf
    unit: str = ""

    def holds(self) -> bool:
        return self.least <= self.value <= self.most

    def text(self) -> str:
        limit = f"at least {self.least:g}" if self.most == math.inf else f"at most {self.most:g}"
        return f"{'ok' if self.holds() else 'MISSED'}: {self.what} {self.value:.3g}{self.unit}, due {limit}{self.unit}"


def judged(name: str, found: dict[str, dict[str, Any]]) -> list[Due]:
    """What is due of a row, of the figures of its processes."""
    if name == "llada":
        ours, every = found["llada"], found["llada-all"]
        ratio = ours["tokens_per_second"] / every["tokens_per_second"]
        return [
            Due("LLaDA, times the step with all logits", ratio, least=1.15),
            Due("LLaDA, MFU of computed head rows", 100 * ours["mfu"], least=58, unit=" %"),
        ]
    if name == "bert":
        ratio = found["bert"]["tokens_per_second"] / found["bert-padded"]["tokens_per_second"]
        return [Due("BERT-base, times transformers compiled and padded, real tokens", ratio, least=4.5)]
    if name == "ad":
        minutes = AD_STEPS * found["ad"]["step_ms"] / 6e4
        return [Due(f"AD, {AD_STEPS:,} steps", minutes, most=4, unit=" min")]
    if name == "full":
        off = {part: each["estimated_memory_bytes"] / each["peak_memory_bytes"] - 1 for part, each in found.items()}
        return [
            Due(f"{part}, memory estimate off the peak", 100 * abs(off[part]), most=10, unit=" %") for part in found
        ]
    return [Due("demo, first step with a warm cache", found["demo"]["warm_seconds"], most=8, unit=" s")]


# ------------------------------------------------------------------------------------------------ what ours is held to


def with_all_places(batch: Any) -> Any:
    """The same batch with a place for every token: what was not hidden has no target, and weighs nothing."""
    import torch

    parts = dict(batch.tensors)
    places, count = parts["places"], parts["inputs"].numel()
    for name, nothing in (("targets", -100), ("token_weights", 0.0)):
        every = torch.full((count,), nothing, dtype=parts[name].dtype, device=places.device)
        parts[name] = every.index_copy(0, places, parts[name])
    parts["places"] = torch.arange(count, device=places.device)
    return batch._replace(tensors=parts)


class Everywhere(Diffusion):
    """Diffusion that sends every position through the head."""

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        return super().loss(model, with_all_places(batch))


def everywhere(options: Any, *, documents: str) -> Everywhere:
    """What `--objective.name` means above."""
    return Everywhere(options, documents=documents)


def padded_bert(steps: int, file: Path) -> None:
    """transformers' BertForMaskedLM under torch.compile: a sentence in each row of 512, bf16 autocast, fused AdamW."""
    import numpy as np
    import torch
    from transformers import BertConfig, BertForMaskedLM

    from lockstep.bench.short_run import made_documents

    with torch.device("cuda"):
        config = BertConfig(vocab_size=BERT_VOCABULARY, attention_probs_dropout_prob=0.0)  # as ours: its fast attention
        model = BertForMaskedLM(config).train()
    called, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches, tokens = list[tuple[Any, ...]](), list[int]()
    documents = made_documents(4 * BERT_ROWS, row=BERT_LENGTH)
    for _ in range(4):
        rows = np.zeros((BERT_ROWS, BERT_LENGTH), np.int64)
        for row, words in zip(rows, itertools.islice(documents, BERT_ROWS), strict=False):
            row[: len(words)] = [1 + int(word[1:]) % (BERT_VOCABULARY - 1) for word in words]
        ids = torch.from_numpy(rows).cuda()
        mask = (ids > 0).long()
        chosen = (torch.rand(ids.shape, device="cuda") < CHOSEN) & (ids > 0)
        batches.append((torch.where(chosen, 103, ids), mask, torch.where(chosen, ids, -100)))
        tokens.append(int((rows > 0).sum()))

    def step(number: int) -> None:
        ids, mask, labels = batches[number % len(batches)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = called(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = statistics.median(timed_steps(step, steps))
    rate = statistics.fmean(tokens) / seconds
    figures = {"tokens_per_second": rate, "step_ms": 1e3 * seconds, "tokens_per_step": statistics.fmean(tokens),
               "peak_memory_bytes": torch.cuda.max_memory_allocated()}  # fmt: skip
    file.write_text(json.dumps(figures), encoding="utf-8")


def demo_starts() -> dict[str, Any]:
    """Seconds to the first step line, in one place: the first time nothing is compiled or tokenised yet."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TRITON_CACHE_DIR": str(place / "triton")}
        cold, *warm = (first_step_seconds(place, caches) for _ in range(1 + WARM_STARTS))
        return {"cold_seconds": cold, "warm_seconds": statistics.median(warm), "warm_starts": warm}


def first_step_seconds(folder: Path, variables: dict[str, str]) -> float:
    """From the start of the command to its first step line."""
    command = [sys.executable, "-m", "lockstep", "train", "llama", "demo", "--max-steps", "3"]
    environment = {**os.environ, **variables, "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every start compiles lockstep, as nobody else's does
    since, first, said = time.perf_counter(), 0.0, ""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if not first and FIRST_STEP in line:
                first = time.perf_counter() - since
    if process.returncode or not first:
        raise RuntimeError(f"exit code {process.returncode}: {said[-2000:]}")
    return first


CHILDREN: dict[str, Callable[[int, Path], None]] = {"bert-padded": padded_bert}


# ------------------------------------------------------------------------------------------------ rows


def measured(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """The figures that one process leaves in a file, or why there are none."""
    file = folder / f"{name}.json"
    count = 20 * steps if name == "ad" else steps  # they are short
    command = [*COMMANDS[name], f"--steps={count}", f"--json={file}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}  # an objective is in this file
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_SECONDS:g} s"}
    if answer.returncode or not file.is_file():
        return {"error": f"exit code {answer.returncode}", "said": (answer.stdout + answer.stderr)[-3000:]}
    print(answer.stdout, flush=True)
    return figures_of(file)


def row(name: str, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """All figures of a row."""
    if name == "demo":
        try:
            return {"demo": demo_starts()}
        except (RuntimeError, OSError) as error:
            return {"demo": {"error": str(error)}}
    return {part: measured(part, steps, folder) for part in ROWS[name]}


def show(name: str, found: dict[str, dict[str, Any]]) -> bool:
    """A line for each figure, and whether all that is due holds."""
    for part, figures in found.items():
        if "error" in figures:
            print(f"{part:12} {figures['error']}\n{figures.get('said', '')}")
        elif name == "demo":
            starts = ", ".join(f"{seconds:.1f}" for seconds in figures["warm_starts"])
            print(f"{part:12} {figures['cold_seconds']:.1f} s cold, {figures['warm_seconds']:.1f} s warm ({starts})")
        else:
            mfu = f", MFU {100 * figures['mfu']:.1f} %" if figures.get("mfu") else ""
            peak = f"{figures['peak_memory_bytes'] / 2**30:.1f} GiB"
            print(f"{part:12} {figures['tokens_per_second']:,.0f} tokens/s, {figures['step_ms']:.2f} ms, {peak}{mfu}")
    if any("error" in figures for figures in found.values()):
        print(f"FAILED: {name}")
        return False
    due = judged(name, found)
    print(*(each.text() for each in due), sep="\n", flush=True)
    return all(each.holds() for each in due)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, with commas")
    parser.add_argument("--steps", type=int, default=10, help=f"measured, after {WARM_UP} that warm up")
    busy.add_anyway(parser)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        CHILDREN[options.row](options.steps, Path(options.json))
        return 0
    busy.ensure_quiet(parser, options, [0])
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: {', '.join(ROWS)}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            since = time.perf_counter()
            found[name] = row(name, options.steps, Path(folder))
            print(f"[{name}: {time.perf_counter() - since:.0f} s]", flush=True)
    good = [show(name, found[name]) for name in names]
    write(options.json, "h200_families.json", found)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
