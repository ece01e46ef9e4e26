"""Out of memory in numbers: what an error says, and changes that are enough and never refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config.load import load, presets, to_dict
from lockstep.engine import fitting, shortage
from lockstep.engine.build import Plan, make_objective
from lockstep.engine.fitting import Remedy, Work, remedies
from lockstep.engine.present import memory_estimate
from lockstep.engine.train import as_built
from lockstep.kernels import cublaslt
from lockstep.models.shapes import resolve
from lockstep.runtime import env, hardware, memory_limits
from tests.conftest import Outcome
from tests.gates.training import flags

Cli = Callable[..., Outcome]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NOTHING: Mapping[str, Any] = {}
FAMILIES = ("llama", "mlm", "llada", "ad")
PLACES = [
    *((family, preset, CUDA) for family in FAMILIES for preset in presets(family)),
    *((family, "tiny", CPU) for family in FAMILIES),
]
SHARES = (1.0, 0.7, 0.4, 0.1)  # of the estimate: what there is
FLAG = re.compile(r"--([\w.-]+)(?: ([^\s-]\S*))?")
NAMES = {
    "mode": "system.mode", "gpus": "system.gpus", "gradient-checkpointing": "system.gradient_checkpointing",
    "precision": "training.precision",
}  # fmt: skip


def work(family: str, preset: str, changed: Mapping[str, Any] = NOTHING, *, device: torch.device = CUDA) -> Work:
    settings = {"training.precision": "bf16" if device == CUDA else "fp32", **changed}
    config = load(family, preset=preset, flags=flags(settings)).config
    shape = resolve(config.model, context_length=config.training.context_length)
    return Work(config, shape, device)


def settings_of(remedy: Remedy) -> dict[str, str]:
    """What its flags set."""
    found: dict[str, str] = {name: value or "true" for name, value in FLAG.findall(remedy.flags)}
    return {NAMES.get(name, name.replace("-", "_")): value for name, value in found.items()}


def then(before: Work, remedy: Remedy) -> int:
    """Bytes when the advice is followed, by the same estimate."""
    wanted = settings_of(remedy)
    shards = int(wanted.pop("system.gpus", before.world if "system.mode" in wanted else before.shards))
    config = load(before.config.family, preset="tiny", overrides=tree(before) | wanted_values(wanted)).config
    return replace(before, config=config, shards=shards).need().total


def tree(of: Work) -> dict[str, Any]:
    """Every setting by its dotted key."""
    sections = {name: value for name, value in to_dict(of.config).items() if isinstance(value, dict)}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def wanted_values(settings: dict[str, str]) -> dict[str, Any]:
    words = ("system.mode", "training.precision", "training.optimizer_states")
    return {key: value if key in words else json.loads(value) for key, value in settings.items()}


@pytest.mark.parametrize(("family", "preset", "device"), PLACES)
def test_what_is_advised_fits_and_keeps_the_batch(family: str, preset: str, device: torch.device) -> None:
    """For every preset of every family."""
    asked = work(family, preset, device=device)
    rows = asked.config.training.batch_size * asked.config.training.grad_accum_nums
    for share in SHARES:
        room = int(share * asked.need().total)
        for found in remedies(asked, room):
            assert then(asked, found) <= room, found
            wanted = settings_of(found)
            batch = int(wanted.get("training.batch_size", asked.config.training.batch_size))
            accumulated = int(wanted.get("training.grad_accum_nums", asked.config.training.grad_accum_nums))
            count = int(wanted.get("system.gpus", 1))
            assert batch * accumulated * count == rows or rows % count, found
            assert "system.mode" not in wanted or device == CUDA, "shards on one machine's memory save nothing"


def advised(asked: Work, room: float) -> list[str]:
    return [found.flags for found in remedies(asked, int(room))]


def test_the_order_of_the_changes() -> None:
    """Recomputing; then single rows; then both; only then less state, and shards on as few GPUs as are enough."""
    asked = work("llama", "production", {"training.batch_size": 2, "training.grad_accum_nums": 4})
    again, rows = "--gradient-checkpointing", "--training.batch-size 1 --training.grad-accum-nums 8"
    need = asked.need()
    assert next(remedies(asked, need.total - 1)).exact, "nothing else is changed: a saved state goes on as it is"
    assert advised(asked, need.total - 1) == [again]
    assert advised(asked, 1.12 * need.states) == [f"{again} {rows}"]
    two, four, eight = (advised(asked, share * need.states) for share in (0.95, 0.7, 0.55))
    small, sharded = "--training.optimizer-states bf16", "--mode fsdp --gpus"
    assert two == [f"{small} {again}", f"{sharded} 2 {again} --training.batch-size 1 --training.grad-accum-nums 4"]
    assert [len(four), four[0].startswith(f"{sharded} 4 ")] == [1, True]
    assert [len(eight), eight[0].startswith(f"{sharded} 8 ")] == [1, True]
    eight_gpus = Work(asked.config, asked.shape, CUDA, world=8)
    assert "--mode fsdp" in advised(eight_gpus, need.states), "those that are there already"
    assert not any("fsdp" in flags for flags in advised(Work(asked.config, asked.shape, CPU), 0.9 * need.states))
    assert advised(asked, 0.001 * need.states) == [], "nothing is enough"


def test_what_is_refused_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next change is, instead; and the change itself where it is allowed."""
    asked = work("llama", "demo", {"training.batch_size": 2})
    first, real = advised(asked, asked.need().total - 1), fitting.replaced

    def refuse(config: Any, values: dict[str, Any]) -> Any:
        if "system.gradient_checkpointing" in values:
            raise fitting.LockstepError("not here")
        return real(config, values)

    monkeypatch.setattr(fitting, "replaced", refuse)
    assert first == ["--gradient-checkpointing"]
    assert advised(asked, asked.need().total - 1)[0].startswith("--training.batch-size 1")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_advice_is_accepted_as_it_is_typed(family: str, in_dir: Path, lockstep: Cli) -> None:
    """`lockstep config validate FILE` takes every change that each family is told."""
    asked = work(family, "tiny")
    total = asked.need().total
    told = {flags for share in SHARES for flags in advised(asked, share * total)}
    assert len(told) >= 3
    (in_dir / "mine.json").write_text("{}")
    base = ("config", "validate", "mine.json", "--family", family, "--preset", "tiny")
    for text in told:
        done = lockstep(*base, *text.split())
        assert done.code == 0, done.text
    refused = lockstep(*base, "--training.batch-size", "0", "--training.grad-accum-nums", "4")
    assert refused.code == 2, "the control"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB", 20 << 30),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes. Error code 12", 1 << 30),
        ("Unable to allocate 1.50 PiB for an array with shape (7,)", 3 << 49),
        ("HIP out of memory. Tried to allocate 512.00 MiB.", 1 << 29),
        ("", None),
        ("no more memory", None),
    ],
)
def test_what_was_asked_for(text: str, count: int | None) -> None:
    assert shortage.requested_bytes(text) == count


def _refused(status: int) -> RuntimeError:
    """As our own calls of cublasLt say it."""
    with pytest.raises(RuntimeError) as found:
        cublaslt._check(status)
    return found.value


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (_refused(3), True),
        (_refused(14), False),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("Tried to allocate 2.00 GiB"), False),
    ],
)
def test_what_is_a_shortage(error: BaseException, is_one: bool) -> None:
    assert shortage.is_shortage(error) is is_one


@pytest.mark.parametrize(("inner", "is_one"), [(torch.OutOfMemoryError("full"), True), (RuntimeError("bad"), False)])
def test_the_compiler_hides_no_shortage(inner: Exception, is_one: bool) -> None:
    """It tries kernels, which take memory, and tells of what went wrong in an error of its own."""
    from torch._inductor.exc import InductorError

    assert shortage.is_shortage(InductorError(inner, None)) is is_one


def test_the_numbers_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 8: what others have taken of the card cannot be had."""
    asked = work("llama", "production")
    total = asked.need().total

    def told(taken: int) -> shortage.MemoryShortageError:
        bounds = memory_limits.Bounds(total, int(1.2 * total), "the card has", taken=taken)
        monkeypatch.setattr(hardware, "memory_bounds", lambda _device: bounds)
        monkeypatch.setattr(hardware, "device_name", lambda _device: "NVIDIA Fake")
        return shortage.explain(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."), asked)

    alone, beside = told(0), told(int(0.2 * total))
    assert alone.figures == {
        "requested_bytes": 2 << 30, "peak_bytes": total, "limit_bytes": int(1.2 * total), "estimated_bytes": total,
    }  # fmt: skip
    assert "2.00 GiB asked for, peak " in alone.what
    assert alone.remedy.flags == "--gradient-checkpointing"
    assert settings_of(beside.remedy).keys() >= settings_of(alone.remedy).keys()
    assert then(asked, beside.remedy) <= 0.95 * total, "others have what is missing"


def test_workers_that_share_memory_have_less_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, asking = work("llama", "demo", device=CPU), MemoryError("Unable to allocate 60.0 MiB for an array")
    limit = asked.need().total

    def advice(shared: bool, workers: int) -> Remedy:
        bounds = memory_limits.Bounds(limit, limit, "all have", shared=shared)
        monkeypatch.setattr(hardware, "memory_bounds", lambda _device: bounds)
        return shortage.explain(asking, asked, workers=workers).remedy

    assert advice(True, 1) == advice(False, 2) != advice(True, 2)
    assert 2 * then(asked, advice(True, 2)) <= limit


@pytest.mark.parametrize(("shared", "workers"), [(False, 1), (True, 1), (True, 2)])
def test_what_is_advised_fits_although_the_first_of_many_requests_failed(
    shared: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for says little of what was still to come: the estimate knows it."""
    asked = work("llama", "tiny", {"training.batch_size": 4096, "training.context_length": 512}, device=CPU)
    limit = asked.need().total // 4
    bounds = memory_limits.Bounds(limit - (1 << 20), limit, "all have", shared=shared)
    monkeypatch.setattr(hardware, "memory_bounds", lambda _device: bounds)
    told = shortage.explain(MemoryError("Unable to allocate 60.0 MiB for an array"), asked, workers=workers)
    assert then(asked, told.remedy) * (workers if shared else 1) <= limit


def test_what_is_said_of_a_worker_that_the_kernel_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacked the host's memory: on the CPU a smaller batch helps, and enough of it; on a GPU none does."""
    large = {"training.batch_size": 4096, "training.context_length": 512}
    on_cpu = work("llama", "tiny", large, device=CPU)
    limit = on_cpu.need().total // 4
    monkeypatch.setattr(hardware, "memory_bounds", lambda _device: memory_limits.Bounds(0, limit, "", shared=True))
    for workers in (1, 2):
        told = shortage.foreseen(on_cpu, workers=workers)
        assert told["estimated_bytes"] == on_cpu.need().total
        assert then(on_cpu, Remedy(**told["remedy"])) * workers <= limit
    on_gpu = shortage.foreseen(work("llama", "tiny", large, device=CUDA))
    assert on_gpu["remedy"]["flags"] == ""
    assert on_gpu["estimated_bytes"] is None


def test_what_is_said_of_memory_is_of_what_runs() -> None:
    """A run may go on without the compiler, as its checkpoint did: that needs more."""
    asked = work("llama", "production")
    plan = Plan(asked.config, CUDA, asked.shape, make_objective(asked.config), "")
    needs = {compiled: memory_estimate(asked.config, asked.shape, compiled=compiled) for compiled in (True, False)}
    assert needs[False].total > needs[True].total, "control"
    for compiled, need in needs.items():
        assembled: Any = SimpleNamespace(built=SimpleNamespace(compiled=compiled))
        found = as_built(plan, assembled)
        assert fitting.work_of(found, env.detect()).need() == need
