"""NaN on a real GPU: found by name with the kernels of training, replayed on the GPU and on the CPU, and no sync.

On a machine without pytest-timeout: pytest -c /dev/null --rootdir=. tests/gpu/test_cuda_nonfinite.py
"""

from __future__ import annotations

import gc
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.engine.build import Assembled, assemble, plan
from lockstep.engine.replay import replay
from lockstep.engine.train import rehearse, train
from lockstep.errors import MemoryShortageError, NonFiniteError
from lockstep.health.finding import Finding, from_json
from lockstep.models.layers import SwiGLU
from lockstep.rundir import RunDir
from lockstep.runtime import determinism
from lockstep.runtime.signals import StopRequest
from tests.gates.training import Recorder, flags, run
from tests.gpu.ready import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
    pytest.mark.usefixtures("shared_cache"),
]
DEVICE = "cuda"
KERNELS = {False: "cudnn", True: "flex"}  # deterministic -> attention
SETTINGS: dict[str, Any] = {
    "system.device": DEVICE, "data.dataset_name": "synthetic", "data.num_workers": 0, "training.eval_batches": 1,
    "training.precision": "bf16", "model.compile": "on", "report.sample_prompt": "",
}  # fmt: skip
NARROW: dict[str, Any] = {  # the debug preset in everything else
    **SETTINGS, "model.hidden_size": 256, "model.intermediate_size": 512, "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2, "model.head_dim": 64, "model.vocab_size": 512, "training.batch_size": 2,
    "training.context_length": 128, "training.learning_rate": 1e-4,
}  # fmt: skip


def flipped(*tensors: str) -> str:
    """Weights grow by 2^128 after step 1: compiled blocks skip hooks, but not what they are given."""
    return ";".join(f"flip_weight@step=1,tensor={tensor}.weight,bit=30" for tensor in tensors)


@dataclass(frozen=True)
class Case:
    """A fault in layer 2, and what must be said of it."""

    fault: str
    step: int
    phase: str
    module: str
    operation: str  # how it begins
    compiled: bool = True


CASES = {
    "activation": Case(flipped("layers.1.mlp.w1", "layers.1.mlp.w3"), 2, "forward", "layers.1.mlp", "mul "),
    "attention": Case(
        flipped("layers.1.attention.wq", "layers.1.attention.wk"), 2, "forward", "layers.1.attention",
        "_scaled_dot_product_",
    ),
    "hook": Case("nan_act@step=1,module=layers.1.mlp.w1", 1, "forward", "layers.1.mlp.w1", "fill ", compiled=False),
    "gradient": Case(
        "nan_grad@step=1,tensor=layers.1.attention.wo.weight", 1, "backward", "layers.1.attention.wo", "fill ",
    ),
    "weight": Case("nan_weight@step=1,tensor=layers.1.mlp.w2.weight,index=5", 2, "weights", "layers.1.mlp.w2", ""),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # a replay on the CPU may use all of it
    yield
    gc.collect()  # what an exception still holds
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def broken(folder: Path, fault: str, settings: dict[str, Any], *, deterministic: bool = False) -> tuple[Finding, Any]:
    """Train the debug preset until a fault ends it: what was found, and the model."""
    recorder, chosen = Recorder(), {**settings, "system.deterministic": deterministic}
    chosen["model.attention_backend"] = "auto" if deterministic else KERNELS[False]  # auto goes by the clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        with (
            determinism.mode(torch.device(DEVICE), deterministic=deterministic, threads=0),
            pytest.raises(NonFiniteError) as caught,
        ):
            run(folder, chosen, preset="debug", recorder=recorder)
    assert int(caught.value.exit_code) == 71
    assert recorder.parts
    return from_json(caught.value.finding), recorder.parts.stepper.model


def check_kernels(model: Any, *, deterministic: bool, compiled: bool) -> None:
    """That it ran as it was meant to run."""
    assert model.attention == KERNELS[deterministic]
    assert all((block._compiled_call_impl is not None) == compiled for block in model.layers)


def check_replays(finding: Finding) -> None:
    """The same place on the GPU and the same module on the CPU, each with exit code 0."""
    for device in (DEVICE, "cpu"):
        torch.compiler.reset()
        done, was = replay(Path(finding.files["bundle"]), device=device)
        print(device, *done.lines(was), sep="\n  ")
        assert done.exit_code == 0, done.lines(was)
        now, then = done.outcomes[0].place, finding.place
        assert now
        assert then
        assert (now.phase, now.module) == (then.phase, then.module)
        if device == DEVICE:
            assert (now.operation, now.block) == (then.operation, then.block)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [*((name, False) for name in CASES), *((name, True) for name in CASES if name != "attention")],
)
def test_layer_2(tmp_path: Path, name: str, deterministic: bool) -> None:
    """Not flex attention as the guilty one: what it makes of infinities may be finite."""
    case = CASES[name]
    finding, model = broken(tmp_path, case.fault, NARROW, deterministic=deterministic)
    check_kernels(model, deterministic=deterministic, compiled=case.compiled)
    place = finding.place
    assert place
    assert finding.reproduced
    assert (finding.step, place.phase, place.module) == (case.step, case.phase, case.module)
    if place.phase == "forward":
        assert (place.block, place.eager) == ("layers.1", True)
    assert place.operation.startswith(case.operation), place.text()
    check_replays(finding)


def second_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's MLP: finite forward, its gradient at 0 is not."""
    plain, begin, made = SwiGLU.forward, SwiGLU.__init__, itertools.count()

    def count(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self.second = next(made) % 2 == 1

    def root(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = plain(self, x)
        return y + (y - y).abs().sqrt() if self.second else y

    monkeypatch.setattr(SwiGLU, "__init__", count)
    monkeypatch.setattr(SwiGLU, "forward", root)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_a_gradient_that_a_compiled_block_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    second_root(monkeypatch)
    finding, model = broken(tmp_path, "", NARROW, deterministic=deterministic)
    check_kernels(model, deterministic=deterministic, compiled=True)
    place = finding.place
    assert place
    assert (finding.step, finding.kind, place.phase, place.block) == (0, "nan_grad", "backward", "layers.1")
    assert place.module == "layers.1.mlp"
    assert place.operation.startswith("SqrtBackward")
    assert ".sqrt()" in place.line
    check_replays(finding)


@pytest.mark.timeout(900)
def test_the_debug_preset_as_it_is(tmp_path: Path) -> None:
    """Two layers of the 8B shape, 512 tokens, bf16, compiled, cuDNN: the issue's own figure."""
    case = CASES["activation"]
    finding, model = broken(tmp_path, case.fault, SETTINGS)
    check_kernels(model, deterministic=False, compiled=True)
    del model
    place = finding.place
    assert place
    assert (finding.step, place.phase, place.module, place.block) == (2, "forward", "layers.1.mlp", "layers.1")
    assert place.operation.startswith("mul ")
    assert place.eager
    check_replays(finding)
    shutil.rmtree(tmp_path, ignore_errors=True)  # 24 GB


def test_a_flip_that_does_not_come_back(tmp_path: Path) -> None:
    finding, _ = broken(tmp_path, "nan_grad@step=1,tensor=layers.1.mlp.w1.weight,once=1", NARROW)
    assert not finding.reproduced
    assert finding.place is None
    done, _ = replay(Path(finding.files["bundle"]), device=DEVICE)
    assert done.exit_code == 1
    assert done.verdict.startswith("hardware-suspect")


# --------------------------------------------------------------------------------------------------------------- fp16


def test_an_overflow_in_fp16_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, the scale is halved, the schedule waits; a step without a fault is the control."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "inf_grad@step=4,tensor=norm.weight")
    parts, recorder = run(tmp_path, {**NARROW, "training.precision": "fp16", "training.max_steps": 8}, preset="debug")
    records, rates = recorder.records, parts.stepper.rates.tolist()
    assert len(records) == 8
    assert records[4].skipped
    assert not records[5].skipped
    assert records[5].loss_scale == records[4].loss_scale / 2
    applied = 0
    for record in records:
        assert record.lr == pytest.approx(rates[applied], rel=1e-6)
        applied += not record.skipped
    assert int(parts.stepper.optimizer.applied.item()) == applied
    assert applied < 8


def test_fp16_that_finds_no_footing_ends(tmp_path: Path) -> None:
    settings = {**NARROW, "training.precision": "fp16", "training.max_steps": 40}
    finding, _ = broken(tmp_path, "inf_grad@tensor=norm.weight", settings)
    assert finding.place
    assert (finding.kind, finding.place.phase, finding.place.module) == ("overflow", "backward", "norm")
    assert finding.step <= 20
    assert replay(Path(finding.files["bundle"]), device=DEVICE)[0].exit_code == 0


# ---------------------------------------------------------------------------------------------------------- no sync


def assembled(folder: Path, settings: dict[str, Any]) -> Assembled:
    """A run, rehearsed: all kernels are compiled."""
    device = torch.device(DEVICE)
    planned = plan(load("llama", preset="debug", flags=flags({**NARROW, **settings})), device)
    made = assemble(planned, RunDir(folder), point=None, sinks=[], stop=StopRequest())
    rehearse(made.parts, planned)
    return made


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_detection_waits_for_nothing(tmp_path: Path, precision: str) -> None:
    """Two steps are queued, flags and all, and nobody waits. Debug mode, which does wait, is the control."""
    made = assembled(tmp_path, {"debug.enabled": False, "training.precision": precision})
    stepper, waiting = made.parts.stepper, None
    try:
        given = [[each.to(stepper.device) for each in next(made.parts.batches)] for _ in range(3)]
        stepper.launch(0, given[0]).read()
        waiting = assembled(tmp_path / "debug", {"debug.enabled": True, "training.precision": precision})
        waiting.parts.stepper.launch(0, given[0]).read()
        with no_waiting():
            pending = [stepper.launch(step, given[step]) for step in (1, 2)]
            with pytest.raises(RuntimeError, match="synchroniz"):
                waiting.parts.stepper.launch(1, given[1])
            with pytest.raises(RuntimeError, match="synchroniz"):
                stepper.halted.item()
    finally:
        for each in (made, waiting):
            if each:
                each.loader.close()
    readings = [each.read() for each in pending]
    assert not any(reading.fatal for reading in readings)
    with torch.no_grad():
        next(iter(stepper.model.parameters())).fill_(float("nan"))
    assert stepper.launch(3, given[0]).read().fatal  # what was not waited for is seen all the same


# ------------------------------------------------------------------------------------------------------ out of memory


def test_out_of_memory_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 8, for real: activations that the card refuses."""
    monkeypatch.setenv("GPU_RANK", "0")
    settings = {
        **NARROW, "model.compile": "off", "training.batch_size": 512, "training.context_length": 512,
        "training.max_steps": 4, "run.out": str(tmp_path), "run.name": "full",
    }  # fmt: skip
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(MemoryShortageError) as caught:
            train(load("llama", preset="debug", flags=flags(settings)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    record = json.loads((tmp_path / "full" / "failure.json").read_text())
    print(json.dumps({key: value for key, value in record.items() if key != "trace"}, indent=1))
    assert record["kind"] == "memory"
    assert record["requested_bytes"] > 0
    assert 0 < record["peak_bytes"] <= record["limit_bytes"]
    assert record["limit_bytes"] <= torch.cuda.get_device_properties(0).total_memory
    assert "GiB" in record["cause"]
    assert "batch" in record["next"]
    assert len(str(caught.value).splitlines()) <= 5
