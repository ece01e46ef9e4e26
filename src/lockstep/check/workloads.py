"""What every card is made to do, by level and by what the card can: torch-free, and the same for all cards.

Each workload covers kernels that real training uses. All data is made here, or of what Python carries, so that a
machine without a network can be checked, and two sites have the same rows where they have the same Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.check.records import Workload
from lockstep.config.load import Loaded, load
from lockstep.errors import ConfigError
from lockstep.models import shapes
from lockstep.models.memory import memory_bytes as estimated_memory
from lockstep.registry import suggest

LEVELS = ("quick", "default", "deep")
TIMES = {"quick": 1, "default": 1, "deep": 10}  # as many steps
SHARE = 0.95  # of the free memory: what a workload may need by the estimate, which is some percent above the truth
PATTERN_SHARE = 0.9  # of the free memory: pattern and model together
GIB = 1 << 30
AMPERE, ADA = (8, 0), (8, 9)  # the first with bf16, and with fp8
ATTENTION: Mapping[str, Any] = {  # most of the work is attention
    "model.hidden_size": 1024,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 2,
    "model.head_dim": 128,
    "model.intermediate_size": 2816,
    "model.num_layers": 4,
    "model.vocab_size": 32768,
    "training.context_length": 8192,
}
SHORT: Mapping[str, Any] = {"model.num_layers": 2, "training.context_length": 2048}
SMALLER: tuple[Mapping[str, Any], ...] = (  # the production shape, and what is left of it on smaller cards
    {"model.num_layers": 4, "training.context_length": 8192},
    {"model.num_layers": 2, "training.context_length": 8192},
    SHORT,
    {**SHORT, "model.num_layers": 1},
    {**SHORT, "model.vocab_size": 32768},
    {**SHORT, "model.num_layers": 1, "model.vocab_size": 32768},
    {**SHORT, "model.num_layers": 1, "model.vocab_size": 32768, "model.hidden_size": 2048, "model.head_dim": 64},
)


MADE: Mapping[str, Any] = {"data.dataset_name": "synthetic", "data.tokenizer_name": None}  # ready in a moment


def workloads(
    level: str, device: str, memory_bytes: int = 0, capability: tuple[int, int] | None = None
) -> tuple[Workload, ...]:
    """All of a level. `memory_bytes`: free on the smallest card; `capability`: the least of all cards, as (9, 0)."""
    assert level in LEVELS, level
    chosen = _on_cuda(level, memory_bytes, capability or AMPERE) if device == "cuda" else _on_cpu(level)
    times = TIMES[level]
    return tuple(replace(each, steps=each.steps * times) for each in chosen)


def named(chosen: Sequence[Workload], names: str) -> tuple[Workload, ...]:
    """Those of a list "production,memory"; a name that is none is refused."""
    known = {each.name: each for each in chosen}
    asked = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in asked:
        if name not in known:
            raise ConfigError(f"no workload {name[:80]!r} here", where="--workload", hint=suggest(name, list(known)))
    if not asked:
        raise ConfigError("names no workload", where="--workload", hint=",".join(known))
    return tuple(known[name] for name in asked)


def _on_cpu(level: str) -> list[Workload]:
    """Everything is small: it is there to test the check itself, and to compare CPUs."""
    small = {"training.batch_size": 2, "training.context_length": 32}
    quick = {**small, **MADE}
    chosen = [
        Workload("llama", settings=quick),
        Workload("memory", kind="memory", settings=quick, steps=8, pattern_bytes=8 << 20),
    ]
    if level == "quick":
        return chosen
    return [
        *chosen,
        Workload("bf16", settings={**quick, "training.precision": "bf16"}),
        Workload("pulse", settings=quick, pulse_seconds=0.2),
        Workload("mlm", family="mlm", settings=small),
        Workload("llada", family="llada", settings=quick),
        Workload("ad", family="ad", settings={"training.batch_size": 2}),
    ]


def _on_cuda(level: str, memory: int, capability: tuple[int, int]) -> list[Workload]:
    half = "bf16" if capability >= AMPERE else "fp16"
    shape = _fitting(SMALLER[2:] if level == "quick" else SMALLER, memory, half)
    short = _fitting(SMALLER[2:], memory, half)

    def production(name: str, sizes: Mapping[str, Any], precision: str = half, **other: Any) -> Workload:
        settings = {**sizes, **other.pop("settings", {}), "training.batch_size": 1, "training.precision": precision}
        return Workload(name, preset="production", settings=settings, **{"steps": 50, **other})

    chosen = [production("production", shape, steps=60 if level == "quick" else 100)]
    probes = [_attention_probe(memory)] if capability >= AMPERE else []
    probes += [Workload("fp8_probe", kind="fp8_probe", settings=FP8, steps=20)] if capability >= ADA else []
    if level == "quick":
        return [*chosen, *probes, _memory(memory, steps=6)]
    chosen += [
        production("attention", _fitting([ATTENTION], memory, half)),
        production("strict_flash", short, settings={"model.attention_backend": "native_flash"}),
        production("pulse", shape, steps=40, pulse_seconds=2.0),
        *([production("fp16", short, "fp16")] if half != "fp16" else []),
        production("fp32", _fitting(SMALLER[2:], memory, "fp32"), "fp32"),
        Workload("mlm", family="mlm", preset="mlm_small", steps=50),
        Workload("llada", family="llada", preset="llada_small", settings={"training.batch_size": 8}, steps=50),
        Workload("ad", family="ad", preset="demo", steps=50),
    ]
    return [*chosen, *probes, _memory(memory, steps=30)]


FP8: Mapping[str, Any] = {"rows": 8192, "inner": 4096, "columns": 14336}


def _attention_probe(memory: int) -> Workload:
    """The attention of the production shape, by the kernel that the fast default uses."""
    length = 8192 if memory >= 24 * GIB or not memory else 2048
    settings = {"rows": 1, "heads": 32, "kv_heads": 8, "length": length, "width": 128}
    return Workload("attention_probe", kind="attention_probe", settings=settings, steps=20)


def _memory(memory: int, *, steps: int) -> Workload:
    """All that is free but for a tenth, in whole GiB; the model beside it is small."""
    pattern = max(GIB, int(PATTERN_SHARE * memory) // GIB * GIB - GIB)
    settings = {"model.compile": "off", "training.batch_size": 4, "training.context_length": 512}
    return Workload("memory", kind="memory", preset="demo", settings=settings, steps=steps, pattern_bytes=pattern)


def _fitting(sizes: Sequence[Mapping[str, Any]], memory: int, precision: str) -> Mapping[str, Any]:
    """The first of these sizes that fits, else the last: what then does not fit says so on the card."""
    for each in sizes:
        if not memory or _need(each, precision) <= SHARE * memory:
            return each
    return sizes[-1]


def _need(sizes: Mapping[str, Any], precision: str) -> int:
    config = load("llama", preset="production", overrides=dict(sizes)).config
    length = config.training.context_length
    need = estimated_memory(
        shapes.resolve(config.model, context_length=length),
        batch_size=1,
        context_length=length,
        dtype_name=precision,
        checkpointing=False,
        compiled=True,
    )
    return need.total


# ------------------------------------------------------------------------------------------------ configuration, data


def configuration(workload: Workload, data: Path, *, device: str, deterministic: bool = True) -> Loaded:
    """The run that a workload is the beginning of: its preset, on data that is always there."""
    settings: dict[str, Any] = {
        "training.max_steps": workload.steps,
        "training.grad_accum_nums": 1,
        "system.deterministic": deterministic,
        "system.device": device,
        "report.tensorboard": False,
        **_data(workload, data),
        **workload.settings,
    }
    return load(workload.family, preset=workload.preset, overrides=settings)


def _data(workload: Workload, data: Path) -> dict[str, Any]:
    if workload.family == "ad":
        return {"data.data_path": str(data / f"histories-{workload.preset}")}
    marked = workload.family == "mlm"
    return {
        "data.dataset_name": "builtin",
        "data.tokenizer_name": "wordpiece" if marked else "bytes",
        "data.max_train_samples": 100,  # documents: some thousand tokens each
        "data.cache_dir": str(data),
    }


def is_prepared(chosen: Sequence[Workload], data: Path) -> bool:
    """Whether all their data is there already, as far as can be said without torch."""
    from lockstep.engine import prepare

    made_of_data = [workload for workload in chosen if workload.kind in ("train", "memory")]
    return all(prepare.is_prepared(configuration(each, data, device="cpu").config) for each in made_of_data)


def prepare_all(chosen: Sequence[Workload], data: Path) -> None:
    """Make the data of all workloads, once, before any replica starts: those only read. Needs torch."""
    import torch

    from lockstep.engine.build import plan
    from lockstep.engine.prepare import prepare

    device = torch.device("cpu")
    for workload in chosen:
        if workload.kind in ("train", "memory"):
            planned = plan(configuration(workload, data, device="cpu"), device, trains=False)
            prepare(planned.config, planned.objective, vocab_limit=planned.shape.vocab_size)
