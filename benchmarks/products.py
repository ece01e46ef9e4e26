"""The matrix products of a step at steady power: torch's, all that cublasLt proposes, and the one that the rule takes.

The products are those of the production LLaMA (4 layers of Llama-3.1-8B, 32,768 tokens) that `kernels/products.py` is
for. A card that has rested runs at a higher clock than one in a step, and there other kernels are ahead: each is run
until the power limit holds it, and only then timed. Two rounds, in turn.
Usage: python benchmarks/products.py [--only up,head] [--seconds 0.4] [--anyway] [--json FILE]
The exit code is 1 when the rule's products take longer than torch's over a whole step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import busy

ROUNDS = 2
WARM_UP, TIMED = 3, 7  # of a timing
USUAL_FLOPS = 7e14  # to know how often a product fits into the time
TORCH, RULE = "torch", "rule"


class Work(NamedTuple):
    """(M, K) times (K, N): how often in a step, which factor lies by columns, and whether the result is in fp32."""

    count: int
    rows: int
    inner: int
    columns: int
    turned: str = ""
    wide: bool = False
    adds: bool = False


STEP = {
    "up": Work(8, 32768, 4096, 14336, "second"),
    "down": Work(4, 32768, 14336, 4096, "second"),
    "query": Work(8, 32768, 4096, 4096, "second"),
    "head": Work(4, 8192, 4096, 128256, "second"),
    "up's input": Work(8, 32768, 14336, 4096),
    "down's input": Work(4, 32768, 4096, 14336),
    "query's input": Work(8, 32768, 4096, 4096),
    "head's input": Work(4, 8192, 128256, 4096),
    "up's gradient": Work(8, 14336, 32768, 4096, "first", wide=True),
    "down's gradient": Work(4, 4096, 32768, 14336, "first", wide=True),
    "query's gradient": Work(8, 4096, 32768, 4096, "first", wide=True),
    "head's gradient": Work(4, 128256, 8192, 4096, "first", wide=True, adds=True),
}


def ways(work: Work) -> tuple[dict[str, Callable[[], Any]], str]:
    """Each way to compute it by its name, and the name of the one that the rule takes."""
    import torch

    from lockstep.kernels import cublaslt, products

    def normal(rows: int, columns: int, *, turned: bool) -> Any:
        made = torch.randn((columns, rows) if turned else (rows, columns), device="cuda", dtype=torch.bfloat16)
        return made.T if turned else made

    first = normal(work.rows, work.inner, turned=work.turned == "first")
    second = normal(work.inner, work.columns, turned=work.turned == "second")
    result = torch.float32 if work.wide else torch.bfloat16
    out = torch.zeros(work.rows, work.columns, device="cuda", dtype=result)
    shapes = cublaslt.matrix(first), cublaslt.matrix(second)
    product = cublaslt.Product(*shapes, result, out.device)
    found: dict[str, Callable[[], Any]] = {
        TORCH: lambda: products.plain(first, second, result=result, total=out if work.adds else None)
    }
    for kernel in product.proposals:
        found[str(tuple(kernel))] = lambda kernel=kernel: product.run(kernel, first, second, out, adds=work.adds)
    taken = next((each for each in products.preferred(*shapes, result) if each in product.proposals), None)
    return found, TORCH if taken is None else str(tuple(taken))


def milliseconds(compute: Callable[[], Any], *, in_a_row: int) -> float:
    """Of one product by the GPU's own clock: the median of a few, after some that warm it up."""
    import torch

    times: list[float] = []
    for index in range(WARM_UP + TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(in_a_row):
            compute()
        end.record()
        end.synchronize()
        if index >= WARM_UP:
            times.append(begin.elapsed_time(end) / in_a_row)
    return statistics.median(times)


def measure(work: Work, seconds: float) -> dict[str, float]:
    """Milliseconds of each way, and of the rule's, each computed for so many seconds."""
    found, taken = ways(work)
    flops = 2.0 * work.rows * work.inner * work.columns
    in_a_row = max(1, round(seconds * USUAL_FLOPS / flops / (WARM_UP + TIMED)))
    taken_at: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, compute in found.items():
            taken_at[name].append(milliseconds(compute, in_a_row=in_a_row))
    times = {name: statistics.mean(each) for name, each in taken_at.items()}
    return {**times, RULE: times[taken]}


def show(name: str, work: Work, times: dict[str, float]) -> None:
    best = min((each for each in times if each not in (TORCH, RULE)), key=lambda each: times[each], default=TORCH)
    kernel = next(each for each, time in times.items() if time == times[RULE])
    rate = 2e-9 * work.rows * work.inner * work.columns / times[RULE]
    sizes = f"{work.rows:,} x {work.inner:,} x {work.columns:,}"
    print(
        f"{work.count} x {name:17} {sizes:25} torch {times[TORCH]:7.3f} ms   rule {times[RULE]:7.3f} ms {kernel:>11} "
        f"{rate:4.0f} TFLOP/s   best {times[best]:7.3f} ms {best}",
        flush=True,
    )


def verdict(found: dict[str, dict[str, float]]) -> int:
    """1 where the rule is behind torch over all of a step."""
    torchs, rules = (sum(STEP[name].count * times[who] for name, times in found.items()) for who in (TORCH, RULE))
    print(f"{'ok' if rules < torchs else 'TOO SLOW'}: of a step, torch {torchs:.1f} ms, the rule {rules:.1f} ms")
    return int(rules >= torchs)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STEP), help="products, with commas")
    parser.add_argument("--seconds", type=float, default=0.4, help="for each way of each, in each round")
    busy.add_anyway(parser)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in STEP]:
        parser.error(f"no product {unknown[0]!r}: {', '.join(STEP)}")
    busy.ensure_quiet(parser, options, [0])
    import torch

    from lockstep.kernels import products

    if not (torch.cuda.is_available() and products.is_for(torch.device("cuda", 0))):
        parser.exit(1, "the rule is for Hopper GPUs, and there is none here: nothing to measure\n")
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = measure(STEP[name], options.seconds)
        show(name, STEP[name], found[name])
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return verdict(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
