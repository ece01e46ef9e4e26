"""LLaDA on one card: the memory estimate beside what training really takes, with additions and with all weights.

Random weights are written in LLaDA's own layout (bf16, a file for each layer, an index), read by our loader, and
trained for some steps. Usage: python benchmarks/llada_memory.py FOLDER [--shape GSAI-ML/LLaDA-8B-Base] [--layers N]
[--cases lora,bf16] [--batch 1] [--context 2048] [--steps 4] [--rank 16] [--device cuda|cpu] [--eager] [--json F]
A folder that has weights is used as it is. On the CPU the peak is not known and the ratio is left out. The exit code is
1 where an estimate is further than 10 % from the peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from lockstep.config.load import load
from lockstep.contracts import Batch, Draw, Rows, Vocabulary
from lockstep.engine.build import Plan, make_stepper, plan
from lockstep.engine.fitting import words
from lockstep.engine.present import memory_estimate
from lockstep.engine.step import Stepper
from lockstep.models.build import lay_out
from lockstep.models.hf_names import their_names
from lockstep.models.shapes import KNOWN, LlamaShape
from lockstep.runtime import hardware
from lockstep.runtime.group import Group
from lockstep.runtime.marks import NoMarks

GIB = 2**30
LIMIT = 0.1  # of the peak
CASES: dict[str, dict[str, str]] = {
    "lora": {"model.lora_rank": "{rank}"},
    "lora-plain": {"model.lora_rank": "{rank}", "system.gradient_checkpointing": "false"},
    "bf16": {"training.optimizer_states": "bf16"},
    "fp32": {},
}


def write_weights(shape: LlamaShape, folder: Path, device: torch.device) -> int:
    """One layer at a time, so that no more than one lies in memory; returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = lay_out(shape, attention="native_math")
    files: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[1] if name.startswith("layers.") else "rest"
        files.setdefault(part, {})[name] = parameter.shape
    generator = torch.Generator(device).manual_seed(0)
    where: dict[str, str] = {}
    written = 0
    for number, (_, sizes) in enumerate(files.items(), start=1):
        file, tensors = f"model-{number:05d}-of-{len(files):05d}.safetensors", {}
        for name, size in sizes.items():
            tensor = torch.ones(size, dtype=torch.bfloat16, device=device)
            if len(size) > 1:
                tensor.normal_(std=0.02, generator=generator)
            theirs = their_names(shape, name)[0]
            tensors[theirs], where[theirs] = tensor.cpu(), file
        save_file(tensors, folder / file, metadata={"format": "pt"})
        written += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": written}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape.to_hf(dtype_name="bf16"), indent=1))
    return written


def planned(folder: Path, case: str, asked: argparse.Namespace, device: torch.device) -> Plan:
    settings = {
        "model.model_path": str(folder), "model.init": "pretrained", "training.batch_size": asked.batch,
        "training.context_length": asked.context, "training.grad_accum_nums": 1, "training.precision": "bf16",
        "training.max_steps": max(10, asked.steps), "training.learning_rate": 1e-5, "training.warmup_steps": 0,
        "objective.random_length_probability": 0, "system.gradient_checkpointing": "true", "system.device": device.type,
        "model.compile": "off" if asked.eager or device.type == "cpu" else "on",
        **{key: value.format(rank=asked.rank) for key, value in CASES[case].items()},
    }  # fmt: skip
    found = plan(load("llada", preset="tiny", flags=[(key, str(value)) for key, value in settings.items()]), device)
    mask = getattr(found.shape, "mask", None)
    size = found.shape.vocab_size if mask is None else mask
    told: Any = found.objective
    vocabulary = Vocabulary(size=size - 1, specials={}, continues=np.zeros(size - 1, bool))
    return replace(found, objective=told.with_vocabulary(vocabulary))


def batches(plan: Plan, step: int) -> list[Batch]:
    """Random tokens; every other step nearly all of them are hidden, which takes the most memory."""
    options = plan.config.training
    ids = np.arange(options.batch_size)
    tokens = np.random.default_rng(step).integers(0, 200, (options.batch_size, options.context_length))
    rows = Rows(ids, np.full_like(ids, step), ids, {"tokens": tokens.astype(np.int32)})
    batch = plan.objective.collate(
        rows, Draw(seed=1, step=step, batch_rows=options.batch_size, steps=options.max_steps)
    )
    if step % 2:
        return [batch]
    places = torch.arange(tokens.size)
    weights = torch.full((tokens.size,), 1.0)
    everything = {"targets": torch.from_numpy(tokens.reshape(-1)), "places": places, "token_weights": weights}
    hidden = torch.full_like(batch.tensors["inputs"], getattr(plan.objective, "mask", 0))
    kept = {name: value for name, value in batch.tensors.items() if name == "times"}
    return [batch._replace(tensors={**kept, **everything, "inputs": hidden}, weights={"loss": tokens.size})]


def measure(folder: Path, case: str, asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Load, train, and compare."""
    ready = planned(folder, case, asked, device)
    options = ready.config.training
    estimate = memory_estimate(ready.config, ready.shape, compiled=ready.config.model.compile == "on")
    say(f"{case}: {words(estimate, hardware.free_memory_bytes(device))}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    since = time.perf_counter()
    stepper, _ = make_stepper(ready, Group(), NoMarks())
    loaded = time.perf_counter() - since
    taken, losses = train(stepper, ready, asked.steps)
    found: dict[str, Any] = {
        "case": case, "batch": options.batch_size, "context": options.context_length, "estimate_bytes": estimate.total,
        "states_bytes": estimate.states, "load_seconds": loaded, "step_seconds": min(taken[1:] or taken),
        "first_step_seconds": taken[0], "losses": losses,
        "trained": sum(item.numel() for item in stepper.parameters),
    }  # fmt: skip
    text = f"{case}: {found['trained']:,} trained, loaded in {loaded:.1f} s, {found['step_seconds']:.3f} s a step"
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["ratio"] = estimate.total / found["peak_bytes"]
        text += f"; estimated {estimate.total / GIB:.1f} GiB, peak {found['peak_bytes'] / GIB:.1f} GiB"
        text += f" ({found['reserved_bytes'] / GIB:.1f} reserved), ratio {found['ratio']:.3f}"
    say(text)
    return found


def train(stepper: Stepper, ready: Plan, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step; the first one compiles."""
    taken: list[float] = []
    losses: list[float] = []
    for step in range(steps):
        made = batches(ready, step)
        since = time.perf_counter()
        losses.append(stepper.launch(step, made).read().loss)
        taken.append(time.perf_counter() - since)
    return taken, losses


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="GSAI-ML/LLaDA-8B-Base", choices=sorted(KNOWN))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--cases", default="lora,bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    device, shape = torch.device(asked.device), KNOWN[asked.shape]
    assert isinstance(shape, LlamaShape)
    shape = replace(shape, num_layers=asked.layers or shape.num_layers)
    if not (asked.folder / "config.json").is_file():
        since = time.perf_counter()
        written = write_weights(shape, asked.folder, device)
        say(f"{shape.parameters():,} random weights, {written / GIB:.1f} GiB, in {time.perf_counter() - since:.1f} s")
    results: list[dict[str, Any]] = []
    for case in asked.cases.split(","):
        results.append(measure(asked.folder, case, asked, device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))
    return verdict([each["ratio"] for each in results if "ratio" in each])


def verdict(ratios: list[float]) -> int:
    """Say whether all estimates are near enough; the exit code."""
    good = all(abs(ratio - 1) <= LIMIT for ratio in ratios)
    if ratios:
        say(f"{'ok' if good else 'TOO FAR'}: estimates within {LIMIT:.0%} of the peak")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
