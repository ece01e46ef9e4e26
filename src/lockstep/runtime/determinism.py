"""Same seed, same bits: what must be switched, and randomness keyed by position instead of by history."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from lockstep.runtime import env
from lockstep.runtime.hardware import threads_text

MASK_64 = (1 << 64) - 1


def mix(*words: int) -> int:
    """One well-mixed 64-bit number from several small ones (splitmix64, word by word)."""
    state = 0
    for word in words:
        state = (state + 0x9E3779B97F4A7C15 + (word & MASK_64)) & MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
        state ^= state >> 31
    return state


def reseed(device: torch.device, *words: int) -> None:
    """Key torch's generators by position: (seed, step, micro-batch). So no generator's history needs saving."""
    seed = mix(*words)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def label(device: torch.device, *, deterministic: bool) -> str:
    """What may be promised about the bits of this run, for the banner."""
    if device.type == "cpu":
        return f"bit-reproducible on this kind of CPU with {threads_text()}"
    return "bit-reproducible on this kind of GPU" if deterministic else "not bit-reproducible (--deterministic is)"


@contextlib.contextmanager
def mode(device: torch.device, *, deterministic: bool, threads: int) -> Iterator[None]:
    """Fix the number of threads and, if asked, allow only kernels that repeat their bits."""
    previous_threads = torch.get_num_threads()
    previous = torch.are_deterministic_algorithms_enabled()
    previous_benchmark = torch.backends.cudnn.benchmark
    torch.set_num_threads(threads or default_threads())
    if deterministic and device.type == "cuda":
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        _fill_fresh_memory(False)  # with NaN, which takes time, and looks like one that was computed
        _make_inductor_deterministic(True)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)
        if deterministic and device.type == "cuda":
            torch.use_deterministic_algorithms(previous)
            _fill_fresh_memory(True)
            torch.backends.cudnn.benchmark = previous_benchmark
            _make_inductor_deterministic(previous)


def default_threads() -> int:
    """OMP_NUM_THREADS if set, else the cores this process may use."""
    asked = env.get("OMP_NUM_THREADS")
    return int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))


def _make_inductor_deterministic(wanted: bool) -> None:
    import torch._inductor.config as inductor

    if hasattr(inductor, "deterministic"):
        inductor.deterministic = wanted


def _fill_fresh_memory(wanted: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = wanted  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs
