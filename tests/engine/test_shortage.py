"""Out of memory in numbers: what an error says, and the change that saves enough and is never refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load, presets, to_dict
from lockstep.engine import shortage
from lockstep.engine.fitting import GPUS
from lockstep.engine.shortage import Remedy, Work
from lockstep.kernels import cublaslt
from lockstep.models.shapes import resolve
from lockstep.runtime import hardware, memory_limits
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
SHARES = (0.0, 0.3, 0.6, 0.9)  # of the estimate: what is missing
FLAG = re.compile(r"--([\w.-]+)(?: ([^\s-]\S*))?")
NAMES = {"mode": "system.mode", "gpus": "system.gpus", "gradient-checkpointing": "system.gradient_checkpointing"}


def work(family: str, preset: str, changed: Mapping[str, Any] = NOTHING, *, device: torch.device = CUDA) -> Work:
    settings = {"training.precision": "bf16" if device == CUDA else "fp32", **changed}
    config = load(family, preset=preset, flags=flags(settings)).config
    shape = resolve(config.model, context_length=config.training.context_length)
    return Work(config, shape, device)


def settings_of(remedy: Remedy) -> dict[str, str]:
    """What its flags set."""
    found: dict[str, str] = {name: value or "true" for name, value in FLAG.findall(remedy.flags)}
    return {NAMES.get(name, name.replace("-", "_")): value for name, value in found.items()}


def saves(before: Work, remedy: Remedy) -> int:
    """Bytes that the advice saves when it is followed, by the same estimate."""
    wanted = settings_of(remedy)
    shards = int(wanted.pop("system.gpus", before.world if "system.mode" in wanted else before.shards))
    config = load(before.config.family, preset="tiny", overrides=tree(before) | wanted_values(wanted)).config
    shape = resolve(config.model, context_length=config.training.context_length)
    return before.need().total - before.need(config, shape, shards).total


def tree(of: Work) -> dict[str, Any]:
    """Every setting by its dotted key."""
    sections = {name: value for name, value in to_dict(of.config).items() if isinstance(value, dict)}
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def wanted_values(settings: dict[str, str]) -> dict[str, Any]:
    return {key: json.loads(value) if key != "system.mode" else value for key, value in settings.items()}


@pytest.mark.parametrize(("family", "preset", "device"), PLACES)
def test_what_is_advised_saves_enough_and_keeps_the_batch(family: str, preset: str, device: torch.device) -> None:
    """For every preset of every family: the first sentence is a promise of the estimate, or says what it lacks."""
    asked = work(family, preset, device=device)
    rows = asked.config.training.batch_size * asked.config.training.grad_accum_nums
    for share in SHARES:
        missing = int(share * asked.need().total)
        found = shortage.remedy(asked, missing=missing)
        lacks = "are missing" in found.words
        if not found.flags:
            assert lacks, found
            continue
        assert (saves(asked, found) >= missing) != lacks, found
        wanted = settings_of(found)
        batch = int(wanted.get("training.batch_size", asked.config.training.batch_size))
        accumulated = int(wanted.get("training.grad_accum_nums", asked.config.training.grad_accum_nums))
        count = int(wanted.get("system.gpus", 1))
        assert batch * accumulated * count == rows or rows % count, found
        assert "system.mode" not in wanted or device == CUDA, "shards on one machine's memory save nothing"


def test_the_order_of_the_knobs() -> None:
    """Fewer rows; then recomputing; then shorter rows; then shards: each only when those before are not enough."""
    eight = work("llama", "demo", {"training.batch_size": 8, "training.grad_accum_nums": 4})
    assert shortage.remedy(eight).flags == "--training.batch-size 4 --training.grad-accum-nums 8"
    one = work("llama", "production", {"training.batch_size": 1})
    assert shortage.remedy(one) == Remedy("--gradient-checkpointing", shortage.remedy(one).words, exact=True), (
        "nothing else is changed: a saved state goes on as it is"
    )
    both = work("llama", "production", {"training.batch_size": 1, "system.gradient_checkpointing": True})
    assert shortage.remedy(both).flags == "--training.context-length 6144"
    saved = {count: both.need().total - both.need(shards=count).total for count in GPUS}
    for count, more in ((2, 0), (4, 1 << 20)):
        found = shortage.remedy(both, missing=saved[2] + more)
        assert (
            found.flags == f"--training.batch-size 1 --training.grad-accum-nums {4 // count} --mode fsdp --gpus {count}"
        )
    eight_gpus = Work(both.config, both.shape, CUDA, world=8)
    assert shortage.remedy(eight_gpus, missing=saved[2]).flags == "--mode fsdp", "those that are there already"
    on_cpu = shortage.remedy(Work(both.config, both.shape, CPU), missing=saved[2])
    assert ("fsdp" in on_cpu.flags, "are missing: fewer model.num_layers" in on_cpu.words) == (False, True)


def test_rows_that_cannot_be_halved_are_divided_as_they_can() -> None:
    """7 rows, 3 times: 21 are 3 x 7 and 1 x 21."""
    odd = work("llama", "demo", {"training.batch_size": 7, "training.grad_accum_nums": 3})
    assert shortage.remedy(odd).flags == "--training.batch-size 3 --training.grad-accum-nums 7"


def test_what_is_refused_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rung is, instead; and the rung itself where it is allowed."""
    asked = work("llama", "demo", {"training.batch_size": 1})
    first = shortage.remedy(asked).flags
    real = shortage.replaced

    def refuse(config: Any, values: dict[str, Any]) -> Any:
        if "system.gradient_checkpointing" in values and len(values) == 1:
            raise shortage.LockstepError("not here")
        return real(config, values)

    monkeypatch.setattr(shortage, "replaced", refuse)
    assert first == "--gradient-checkpointing" != shortage.remedy(asked).flags


@pytest.mark.parametrize("family", FAMILIES)
def test_the_advice_is_accepted_as_it_is_typed(family: str, in_dir: Path, lockstep: Cli) -> None:
    """`lockstep config validate FILE` takes every rung of the ladder of each family."""
    asked = work(family, "tiny")
    total = asked.need().total
    advised = {shortage.remedy(asked, missing=int(share * total)).flags for share in SHARES} - {""}
    assert len(advised) >= 3
    (in_dir / "mine.json").write_text("{}")
    base = ("config", "validate", "mine.json", "--family", family, "--preset", "tiny")
    for text in advised:
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
    assert alone.remedy.flags == "--training.batch-size 1 --training.grad-accum-nums 8"
    assert settings_of(beside.remedy).keys() > settings_of(alone.remedy).keys(), "more is missing"
    assert saves(asked, beside.remedy) > (2 << 30) + 0.05 * total


def test_workers_that_share_memory_save_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, asking = work("llama", "demo", device=CPU), MemoryError("Unable to allocate 60.0 MiB for an array")
    peak = 1 << 30

    def advice(shared: bool, workers: int) -> str:
        bounds = memory_limits.Bounds(peak, math.ceil(peak / 0.95), "all have", shared=shared)
        monkeypatch.setattr(hardware, "memory_bounds", lambda _device: bounds)
        return shortage.explain(asking, asked, workers=workers).remedy.flags

    assert advice(True, 1) == advice(False, 4) != advice(True, 4)
    assert advice(True, 4) == "--training.batch-size 4 --training.grad-accum-nums 2"


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
    then = asked.need().total - saves(asked, told.remedy)
    assert then * workers <= limit
    assert told.remedy.flags.startswith("--training.batch-size"), "the mildest knob is enough"


def test_what_is_said_of_a_worker_that_the_kernel_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacked the host's memory: on the CPU a smaller batch helps, and enough of it; on a GPU none does."""
    large = {"training.batch_size": 4096, "training.context_length": 512}
    on_cpu = work("llama", "tiny", large, device=CPU)
    limit = on_cpu.need().total // 4
    monkeypatch.setattr(hardware, "memory_bounds", lambda _device: memory_limits.Bounds(0, limit, "", shared=True))
    for workers in (1, 2):
        told = shortage.foreseen(on_cpu, workers=workers)
        assert told["estimated_bytes"] == on_cpu.need().total
        assert (on_cpu.need().total - saves(on_cpu, Remedy(**told["remedy"]))) * workers <= limit
    on_gpu = shortage.foreseen(work("llama", "tiny", large, device=CUDA))
    assert on_gpu["remedy"]["flags"] == ""
    assert on_gpu["estimated_bytes"] is None
