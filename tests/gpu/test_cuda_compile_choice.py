"""`model.compile: auto` on a real GPU: what is printed is true and kept, and leaves neither memory nor other bits."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import clocked
from lockstep.engine.build import Assembled
from lockstep.engine.compile_choice import SLOWER
from lockstep.models import block_timing
from lockstep.models.block_timing import BlockWork, milliseconds
from lockstep.models.options import EncoderOptions, LladaOptions, LlamaOptions, ModelOptions
from lockstep.models.shapes import resolve
from lockstep.runtime import determinism, hardware, measured
from tests.gates.training import run
from tests.gpu.ready import CUDA, MARKS, ready

pytestmark = MARKS
FOUR_ROWS = {"training.batch_size": 4, "training.grad_accum_nums": 1}
NARROW = {
    "model.hidden_size": 256, "model.intermediate_size": 512, "model.num_attention_heads": 4, "model.head_dim": 64,
    "model.num_key_value_heads": 2, "model.vocab_size": 512, "training.context_length": 512,
}  # fmt: skip
TINY: dict[str, Any] = {
    "system.device": "cuda", "training.batch_size": 4, "training.grad_accum_nums": 2, "training.max_steps": 6,
    "training.context_length": 128, "training.save_interval": 3, "training.eval_interval": 3, "model.dropout": 0.1,
    "debug.digest_interval": 1, "data.num_workers": 0, "training.precision": "bf16",
    "model.attention_backend": "native_math",
}  # fmt: skip
ON = re.compile(r"compile: on \(auto; a block takes ([\d.e+-]+) ms, ([\d.e+-]+) as it is; measured (\S+)\)")
OFF = re.compile(r"compile: off \(auto; a block takes ([\d.e+-]+) ms, ([\d.e+-]+) compiled; measured (\S+)\)")
MADE: dict[str, tuple[ModelOptions, str, dict[str, Any]]] = {
    "llama": (LlamaOptions(model_path="lockstep/tiny", head_dim=64), "cudnn", {}),
    "documents": (LlamaOptions(model_path="lockstep/tiny", head_dim=64), "flex", {"documents_apart": True}),
    "llada": (LladaOptions(model_path="lockstep/llada-tiny"), "native_flash", {"checkpointing": True}),
    "lora": (LladaOptions(model_path="lockstep/llada-tiny", lora_rank=8), "native_flash", {"sharded": True}),
    "mlm": (EncoderOptions(model_path="lockstep/mlm-tiny"), "native_flash", {}),
    "modern": (EncoderOptions(model_path="lockstep/mlm-tiny", architecture="modern"), "native_math",
               {"dtype_name": "fp32"}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared_cache: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.compiler.reset()
    hardware.let_go(CUDA)
    yield
    hardware.let_go(CUDA)


def begun(folder: Path, settings: dict[str, Any]) -> tuple[Assembled, str, float]:
    """A run up to its first step, what it says of the compiler, and how long that took."""
    since = time.perf_counter()
    made = ready(folder, {**FOUR_ROWS, **settings})
    taken = time.perf_counter() - since
    return made, next((notice for notice in made.built.notices if notice.startswith("compile")), ""), taken


def work_of(options: ModelOptions, attention: str, *, length: int = 512, **changed: Any) -> BlockWork:
    usual = {"rows": 4, "dtype_name": "bf16", "checkpointing": False, "documents_apart": False, "sharded": False}
    shape = resolve(options, context_length=length)
    return BlockWork(options, shape, length=length, attention=attention, **{**usual, **changed})


def held() -> int:
    """Bytes that are in use, without the room that cuBLAS takes once for all its products."""
    torch._C._cuda_clearCublasWorkspaces()
    hardware.let_go(CUDA)
    return torch.cuda.memory_allocated(CUDA)


@pytest.mark.parametrize("settings", [NARROW, {}], ids=["256 wide", "4096 wide"])
def test_what_is_printed_is_true_and_is_remembered(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings: list[tuple[BlockWork, bool, float]] = []
    seconds: list[float] = []

    def timed(work: BlockWork, device: torch.device, *, compiled: bool) -> float:
        since = time.perf_counter()
        taken = milliseconds(work, device, compiled=compiled)
        seconds.append(time.perf_counter() - since)
        timings.append((work, compiled, taken))
        return taken

    monkeypatch.setattr(block_timing, "milliseconds", timed)
    made, line, whole = begun(tmp_path / "one", settings)
    print(f"{line}; to measure took {seconds[0]:.1f} s compiled, {seconds[1]:.1f} s as it is; start {whole:.1f} s")
    assert [compiled for _, compiled, _ in timings] == [True, False]
    compiled, plain = (taken for _, _, taken in timings)
    chosen = compiled <= SLOWER * plain
    told = (ON if chosen else OFF).fullmatch(line)
    assert told, line
    assert told.groups() == (*(f"{each:.3g}" for each in ((compiled, plain) if chosen else (plain, compiled))), "now")
    assert made.built.compiled is chosen
    blocks: Any = made.parts.stepper.model.layers
    assert all((block._compiled_call_impl is not None) == chosen for block in blocks)
    if not settings:
        assert chosen, "wide blocks are memory-bound between their products"
    work = timings[0][0]
    again = [milliseconds(work, CUDA, compiled=way) for way in (True, False)]
    print("once more", again)
    assert again == pytest.approx([compiled, plain], rel=0.5 if settings else 0.2), "a clock that repeats itself"
    monkeypatch.setattr(block_timing, "milliseconds", lambda *_, **__: pytest.fail("it is known"))
    del made, blocks
    hardware.let_go(CUDA)
    _, second, taken = begun(tmp_path / "two", settings)
    assert second == line.replace("measured now", f"measured {measured.today()}")
    print(f"the second start took {taken:.1f} s")


@pytest.mark.parametrize("case", MADE)
def test_every_kind_of_block_can_be_timed_and_leaves_nothing(case: str) -> None:
    options, attention, changed = MADE[case]
    work = work_of(options.model_copy(update={"dropout": 0.1}), attention, **changed)
    state, before = torch.cuda.get_rng_state(CUDA), held()
    found = {compiled: milliseconds(work, CUDA, compiled=compiled) for compiled in (True, False)}
    print(case, found)
    assert all(0 < taken < 1000 for taken in found.values())
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
    assert held() <= before + (1 << 20)


def test_a_block_that_does_not_fit_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real shortage: it is no reason not to train, and the run has the memory that it would have had."""
    before = held()
    large = work_of(LlamaOptions(num_layers=1), "cudnn", length=8192, rows=4096)  # 275 GB in bf16
    for compiled in (True, False):
        with pytest.raises(torch.OutOfMemoryError):
            milliseconds(large, CUDA, compiled=compiled)
        assert held() <= before + (1 << 20)
    real = milliseconds
    monkeypatch.setattr(block_timing, "milliseconds", lambda _, *where, **how: real(large, *where, **how))
    made, line, _ = begun(tmp_path, NARROW)
    assert made.built.compiled, "as without a clock"
    assert not line


@pytest.mark.parametrize("given", ["on", "off"])
def test_bits_are_those_of_a_run_that_was_given_what_was_found(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of fewer rows was compiled and timed: no trace of it; and a resumed run goes on bit for bit."""
    real, timed = milliseconds, list[tuple[int, bool]]()

    def wanted(work: BlockWork, device: torch.device, *, compiled: bool) -> float:
        real(work, device, compiled=compiled)
        timed.append((work.rows, compiled))
        return 1.0 if compiled == (given == "on") else 2.0

    monkeypatch.setattr(block_timing, "milliseconds", wanted)
    monkeypatch.setattr(clocked, "MOST_TOKENS", 256)  # two of the four rows
    with determinism.mode(CUDA, deterministic=True, threads=0):  # the kernels; the run does not say that it must
        _, found = run(tmp_path / "auto", TINY)
        torch.compiler.reset()
        parts, plain = run(tmp_path / "plain", {**TINY, "model.compile": given})
        torch.compiler.reset()
        begun = tmp_path / "auto" / "checkpoints" / "step_00000003"
        later, resumed = run(tmp_path / "again", TINY, point=begun)
    assert timed == [(2, True), (2, False)], "once"
    assert parts.about["compiled"] is later.about["compiled"] is (given == "on")
    bits = [[(each.step, each.loss.hex(), each.digest) for each in one.records] for one in (found, plain, resumed)]
    assert bits[0] == bits[1]
    assert bits[2] == bits[0][3:]
