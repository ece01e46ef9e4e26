"""The production LLaMA on one GPU: ours beside transformers and a plain compiled PyTorch model, in one call.

Shape: 4 layers of Llama-3.1-8B, vocabulary 128,256, context 8,192, batch 4; AdamW, clipping at 1.0, bf16 compute over
fp32 weights. Each row has a process of its own, one after another; ours is `lockstep bench`, so its figures are the
product's. Peers get their batches ready on the card, ours fetches them as a run does. Medians of the GPU's clock.
Usage: python benchmarks/h200_llama.py [--only eager,compiled,plain,ours,deterministic] [--batch8] [--fp8] [--steps 8]
[--layers 4] [--context 8192] [--anyway] [--json FILE]
The exit code is 1 when ours (batch 4) is not the fastest row, a row failed, or one of ours misses what is due at this
shape: cards differ by 3 %.
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
from typing import Any

import busy

PEAK_FLOPS = 989e12
DEVICE = "cuda"
WIDTH, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
WARM_UP = 3
BATCHES = 4  # that differ
CHUNK = 4096  # tokens whose logits exist at once, of the plain model
LIMIT_SECONDS = 240.0  # for a row
GIB = 2**30
OURS = {
    "ours": [],
    "deterministic": ["--deterministic"],
    "batch8": ["--training.batch-size=8"],
    "fp8": ["--precision=fp8"],
}
PEERS = ("eager", "compiled", "plain")
DUE = {"ours": (64_000, 46.0), "deterministic": (60_000, math.inf), "batch8": (65_500, 64.0), "fp8": (80_000, math.inf)}
DUE_AT = {"layers": 4, "context": 8192, "batch": 4}  # tokens/s at least and GiB at most, of this shape
NAMES = {
    "eager": "transformers, eager, SDPA, fused AdamW", "compiled": "transformers, torch.compile",
    "plain": "plain PyTorch, compiled, chunked CE", "ours": "lockstep", "deterministic": "lockstep --deterministic",
    "batch8": "lockstep, batch 8", "fp8": "lockstep --precision fp8",
}  # fmt: skip


def flops_per_token(layers: int, context: int) -> float:
    """6 N_matmul + 12 L d T, as torchtitan and nanochat count."""
    matrices = layers * (WIDTH * HEAD * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * INNER) + WIDTH * VOCABULARY
    return 6.0 * matrices + 12.0 * layers * HEADS * HEAD * context


# ------------------------------------------------------------------------------------------------ peers


def transformers_model(layers: int, context: int) -> Any:
    """LlamaForCausalLM from numbers alone, in fp32 on the card."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=context,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()


def plain_model(layers: int, context: int) -> Any:  # noqa: C901 - a whole model in one place, as people write one
    """What one would write by hand: blocks under torch.compile, logits in chunks that are computed twice."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
            self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
            self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
            self.down = nn.Linear(INNER, WIDTH, bias=False)
            self.first, self.second = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            rows, length, _ = x.shape
            q, k, v = self.qkv(normed(x, self.first)).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
            q, k, v = (part.view(rows, length, -1, HEAD).transpose(1, 2) for part in (q, k, v))
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(seen.transpose(1, 2).reshape(rows, length, -1))
            y = normed(x, self.second)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def normed(x: Any, weight: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def chunk_loss(x: Any, norm: Any, head: Any, targets: Any) -> Any:
        return F.cross_entropy(F.linear(normed(x, norm), head).float(), targets, reduction="sum")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.Parameter(torch.ones(WIDTH))
            self.head = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
            angle = torch.arange(context)[:, None] * 500000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())
            for block in self.blocks:
                block.compile()
            self.chunk_loss = torch.compile(chunk_loss)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens[:, :-1]).to(torch.bfloat16)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            x, targets = x.flatten(0, 1), tokens[:, 1:].flatten()
            total = x.new_zeros((), dtype=torch.float32)
            for part, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
                total = total + checkpoint(self.chunk_loss, part, self.norm, self.head, wanted, use_reentrant=False)
            return total / targets.numel()

    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Plain()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    return model


def peer_step(name: str, layers: int, context: int) -> tuple[Any, Callable[[Any], Any]]:
    """(model, from rows of context + 1 tokens to a loss)."""
    import torch

    if name == "plain":
        model = plain_model(layers, context)
        return model, model
    model = transformers_model(layers, context)
    called = torch.compile(model) if name == "compiled" else model
    return model, lambda tokens: called(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


def measure_peer(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and peak memory of a peer."""
    import torch

    torch.manual_seed(0)
    model, loss_of = peer_step(name, options.layers, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    shape = (options.batch, options.context + 1)
    batches = [torch.randint(VOCABULARY, shape, device=DEVICE) for _ in range(BATCHES)]

    def step(number: int) -> None:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = loss_of(batches[number % BATCHES])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    since = time.perf_counter()
    seconds = timed_steps(step, options.steps)
    compiled = time.perf_counter() - since - sum(seconds) / len(seconds) * (WARM_UP + options.steps)
    median = statistics.median(seconds)
    rate = options.batch * options.context / median
    return {
        "tokens_per_second": rate, "step_ms": 1e3 * median, "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "mfu": rate * flops_per_token(options.layers, options.context) / PEAK_FLOPS,
        "compile_seconds": max(0.0, compiled),
    }  # fmt: skip


def timed_steps(step: Callable[[int], object], steps: int) -> list[float]:
    """Seconds of each step by the GPU's clock, after some that warm up."""
    import torch

    for number in range(WARM_UP):
        step(number)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for number in range(steps):
        step(WARM_UP + number)
        marks[number + 1].record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]


# ------------------------------------------------------------------------------------------------ rows


def command_of(name: str, options: argparse.Namespace, file: Path) -> list[str]:
    """The process that measures a row and leaves its figures in a file."""
    if name in PEERS:
        sizes = [f"--layers={options.layers}", f"--context={options.context}", f"--batch={options.batch}"]
        return [sys.executable, __file__, "--row", name, f"--steps={options.steps}", *sizes, f"--json={file}"]
    return [
        sys.executable, "-m", "lockstep", "bench", "llama", "production", f"--steps={options.steps}",
        f"--model.num-layers={options.layers}", f"--training.context-length={options.context}",
        f"--training.batch-size={options.batch}", "--training.grad-accum-nums=1", "--system.device=cuda",
        *OURS[name], f"--json={file}",
    ]  # fmt: skip


def figures_of(file: Path) -> dict[str, Any]:
    """The figures of a file: of a bench those of its one worker, beside what was measured."""
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures | figures["workers"][0] if "workers" in figures else figures


def measure_row(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of a row, or why there are none."""
    file = folder / f"{name}.json"
    try:
        answer = subprocess.run(
            command_of(name, options, file), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_SECONDS:g} s"}
    if answer.returncode or not file.is_file():
        return {"error": f"exit code {answer.returncode}", "said": (answer.stdout + answer.stderr)[-3000:]}
    figures = figures_of(file)
    if name not in PEERS:
        print(answer.stdout, flush=True)  # the whole table, with the anatomy of a step
        figures["peak_gib"] = figures["peak_memory_bytes"] / GIB
    return figures


def show(rows: dict[str, dict[str, Any]]) -> None:
    ours = rows.get("ours", {}).get("tokens_per_second")
    print(f"{'who':42} {'tokens/s':>9} {'MFU':>9} {'peak GiB':>9} {'ratio to ours':>14}")
    for name, row in rows.items():
        if "error" in row:
            print(f"{NAMES[name]:42} {row['error']}\n{row.get('said', '')}")
            continue
        rate, mfu = row["tokens_per_second"], row.get("mfu")
        ratio = f"{rate / ours:.3f}" if ours else "-"
        share = f"{100 * mfu:.1f} %" if mfu else "-"
        print(f"{NAMES[name]:42} {rate:9,.0f} {share:>9} {row['peak_gib']:9.1f} {ratio:>14}")


def verdict(rows: dict[str, dict[str, Any]]) -> int:
    """1 where a row failed, or a peer is ahead of ours."""
    rates = {name: row.get("tokens_per_second", 0.0) for name, row in rows.items()}
    ahead = [name for name in PEERS if "ours" in rates and rates.get(name, 0.0) > rates["ours"]]
    failed = [name for name, row in rows.items() if "error" in row]
    for what, names in (("AHEAD OF OURS", ahead), ("FAILED", failed)):
        print(f"{what}: {', '.join(names)}" if names else f"ok: none {what.lower()}")
    return 1 if ahead or failed else 0


def missed(rows: dict[str, dict[str, Any]]) -> int:
    """1 where a row of ours is slower than is due, or needs more memory."""
    good: list[bool] = []
    for name, (least, most) in DUE.items():
        if "tokens_per_second" in (row := rows.get(name, {})):
            rate, peak = row["tokens_per_second"], row["peak_gib"]
            good.append(rate >= least and peak <= most)
            limit = f", at most {most:g} GiB" if math.isfinite(most) else ""
            print(f"{'ok' if good[-1] else 'MISSED'}: {NAMES[name]} {rate:,.0f} tokens/s, {peak:.1f} GiB, ", end="")
            print(f"due at least {least:,}{limit}")
    return int(not all(good))


def write(file: str | None, name: str, rows: dict[str, Any]) -> None:
    """Figures as JSON: where it was asked for, else to $OUT where that is set."""
    place = Path(file) if file else Path(os.environ["OUT"]) / name if os.environ.get("OUT") else None
    if place:
        place.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join((*PEERS, "ours", "deterministic")), help="rows, with commas")
    parser.add_argument("--batch8", action="store_true", help="also ours at batch 8")
    parser.add_argument("--fp8", action="store_true", help="also ours with fp8 linears")
    parser.add_argument("--steps", type=int, default=8, help="measured, after 3 that warm up")
    for name, size in DUE_AT.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    busy.add_anyway(parser)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        Path(options.json).write_text(json.dumps(measure_peer(options.row, options)), encoding="utf-8")
        return 0
    busy.ensure_quiet(parser, options, [0])
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    names += [name for name in ("batch8", "fp8") if getattr(options, name)]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no row {unknown[0]!r}: {', '.join(NAMES)}")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            since = time.perf_counter()
            rows[name] = measure_row(name, options, Path(folder))
            print(f"[{name}: {time.perf_counter() - since:.0f} s]", flush=True)
    show(rows)
    write(options.json, "h200_llama.json", rows)
    is_due = all(getattr(options, name) == size for name, size in DUE_AT.items())
    return verdict(rows) | (missed(rows) if is_due else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
