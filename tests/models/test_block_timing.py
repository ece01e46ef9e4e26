"""Timing a block: it is given what a run gives it, and leaves nothing. The clock itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.models import block_timing, build
from lockstep.models.block_timing import BlockWork, milliseconds
from lockstep.models.build import blank, compile_blocks, give_memory
from lockstep.models.options import EncoderOptions, LladaOptions, LlamaOptions, ModelOptions
from lockstep.models.shapes import resolve
from lockstep.runtime import gpu_clock
from lockstep.runtime.precision import Precision

CPU = torch.device("cpu")
LENGTH = 32
FAMILIES: dict[str, ModelOptions] = {
    "llama": LlamaOptions(model_path="lockstep/tiny", dropout=0.1),
    "llada": LladaOptions(model_path="lockstep/llada-tiny"),
    "lora": LladaOptions(model_path="lockstep/llada-tiny", lora_rank=4),
    "mlm": EncoderOptions(model_path="lockstep/mlm-tiny"),
    "bert": EncoderOptions(model_path="lockstep/mlm-tiny", architecture="bert"),
    "modern": EncoderOptions(model_path="lockstep/mlm-tiny", architecture="modern"),
}


def work_of(options: ModelOptions, **changed: Any) -> BlockWork:
    asked: dict[str, Any] = {"rows": 2, "dtype_name": "bf16", "attention": "native_math", "checkpointing": False}
    shape = resolve(options, context_length=LENGTH)
    usual = {**asked, "documents_apart": False, "sharded": False}
    return BlockWork(options, shape, length=LENGTH, **{**usual, **changed})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Any]]]:
    """What the compiler was given, graph by graph; it computes them as they are, which needs no C++ compiler."""
    seen: list[list[Any]] = []

    def note(graph: Any, inputs: list[Any]) -> Any:
        seen.append(inputs)
        return graph.forward

    def compiled(model: Any, device: torch.device, *, sharded: bool) -> None:
        compile_blocks(model, device, sharded=sharded, backend=note)

    monkeypatch.setattr(block_timing, "compile_blocks", compiled)
    build.forget_compiled()
    yield seen
    build.forget_compiled()


def by(watch: Callable[[Callable[[], object]], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that does the work once, and may look at it."""

    def clock(work: Callable[[], object], *, in_a_row: int) -> float:
        assert in_a_row > 1
        watch(work)
        work()
        return 1.0

    monkeypatch.setattr(gpu_clock, "milliseconds", clock)


def flat(value: Any) -> list[Any]:
    return [each for part in value for each in flat(part)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("documents", [False, True])
def test_the_block_is_given_what_a_run_gives_it(family: str, documents: bool) -> None:
    """The whole model, with its own vocabulary and rows, is the reference."""
    options = FAMILIES[family]
    work = work_of(options, documents_apart=documents)
    whole, _ = blank(options, work.shape, attention="native_math", dtype_name="bf16", checkpointing=False)
    give_memory(whole, CPU, sharded=False)
    whole.rebuild_buffers()
    torch.manual_seed(3)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.02)
    inputs = torch.randint(work.shape.vocab_size, (2, LENGTH))
    asked: list[tuple[Any, ...]] = []
    whole.layers[0].register_forward_pre_hook(lambda _, handed: asked.append(handed))
    with Precision("bf16", CPU).context():
        whole(inputs, **({"documents_BL": torch.ones_like(inputs)} if documents else {}))
        model = work.model(CPU)
        given, rest = block_timing._given(model, work, CPU)
    assert type(model.layers[0]) is type(whole.layers[0]), "and the block is there again"
    assert given.requires_grad
    theirs, *others = asked[0]
    assert (given.shape, given.dtype, given.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    assert not torch.equal(given, torch.zeros_like(given)), "numbers as a model has them"
    assert len(flat(rest)) == len(flat(tuple(others)))
    for ours, their in zip(flat(rest), flat(tuple(others)), strict=True):
        assert torch.equal(ours, their) if isinstance(ours, Tensor) else ours == their
    sizes = {name: (item.shape, item.dtype, item.requires_grad) for name, item in model.layers[0].named_parameters()}
    assert sizes == {name: (item.shape, item.dtype, item.requires_grad)
                     for name, item in whole.layers[0].named_parameters()}  # fmt: skip


def test_a_timing_draws_no_random_number_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before, during = torch.get_rng_state(), list[Tensor]()

    def watch(work: Callable[[], object]) -> None:
        work()
        during.append(torch.get_rng_state())

    by(watch, monkeypatch)
    milliseconds(work_of(FAMILIES["llama"]), CPU, compiled=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(during[0], before), "control: dropout draws"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_blocks_are_timed_as_they_are_and_compiled(
    checkpointing: bool, sharded: bool, monkeypatch: pytest.MonkeyPatch, graphs: list[list[Any]]
) -> None:
    by(lambda work: work(), monkeypatch)
    work = work_of(FAMILIES["llama"], checkpointing=checkpointing, sharded=sharded)
    assert milliseconds(work, CPU, compiled=False) == 1.0
    assert not graphs
    assert milliseconds(work, CPU, compiled=True) == 1.0
    assert len(graphs) == 1, "compiled once; neither the last norm nor the embedding is called"


@pytest.mark.parametrize("forgets", [True, False])
def test_what_was_timed_is_not_compiled_for_other_sizes(
    forgets: bool, monkeypatch: pytest.MonkeyPatch, graphs: list[list[Any]]
) -> None:
    """The run's own rows are numbers to the compiler, as if nothing had been timed; the control makes them variable."""
    by(lambda work: work(), monkeypatch)
    if not forgets:
        monkeypatch.setattr(block_timing, "forget_compiled", lambda: None)
    for rows in (2, 4):
        milliseconds(work_of(FAMILIES["llama"], rows=rows), CPU, compiled=True)
    assert len(graphs) == 2
    varies = [any(isinstance(each, torch.SymInt) for each in inputs) for inputs in graphs]
    assert varies == [False, not forgets]


@pytest.mark.parametrize("compiled", [False, True])
def test_no_memory_is_held(compiled: bool, monkeypatch: pytest.MonkeyPatch, graphs: list[list[Any]]) -> None:
    made: list[weakref.ref[Any]] = []
    model = BlockWork.model

    def noted(self: BlockWork, device: torch.device) -> Any:
        found = model(self, device)
        made.extend(map(weakref.ref, found.parameters()))
        return found

    monkeypatch.setattr(BlockWork, "model", noted)
    by(lambda work: work(), monkeypatch)
    milliseconds(work_of(FAMILIES["mlm"]), CPU, compiled=compiled)
    graphs.clear()
    gc.collect()
    assert made
    assert [name() for name in made if name() is not None] == []


def test_all_that_decides_a_time_is_said() -> None:
    options = FAMILIES["llama"]
    work = work_of(options)
    told = json.dumps(work.deciding())
    more = replace(work.shape, num_layers=32, vocab_size=128_256)
    assert json.dumps(replace(work, shape=more).deciding()) == told, "their blocks are the same"
    others = [
        replace(work, rows=3), replace(work, length=16), replace(work, dtype_name="fp16"),
        replace(work, attention="cudnn"), replace(work, checkpointing=True), replace(work, documents_apart=True),
        replace(work, sharded=True), replace(work, shape=replace(work.shape, hidden_size=512)),
        replace(work, options=options.model_copy(update={"dropout": 0.0})), work_of(FAMILIES["llada"]),
        work_of(FAMILIES["lora"]), work_of(LladaOptions(model_path="lockstep/llada-tiny", lora_rank=8)),
    ]  # fmt: skip
    assert len({told, *(json.dumps(other.deciding()) for other in others)}) == 1 + len(others)
