"""Items 62-66 and row 16: what is injected is found, exactly, in every family; and the bundle brings it back."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.engine import autopsy
from lockstep.engine.autopsy import scale_of
from lockstep.engine.step import Stepper
from lockstep.health.finding import Finding
from lockstep.models import attention
from lockstep.runtime.precision import Precision
from tests.engine.bad_steps import ALL_BUT_SLOWLY, FAMILIES, OF_FAMILY, brought_back
from tests.gates.training import run

pytestmark = pytest.mark.usefixtures("shared_cache")

MODULES = {  # of each family, from the first to the last
    "llama": [
        "tok_embed",
        "layers.0.attention.wq",
        "layers.0.mlp_norm",
        "layers.1.attention",
        "layers.1.mlp.w2",
        "norm",
    ],
    "mlm": ["tok_embed", "embed_norm", "layers.0.attention.wqkv", "layers.1.mlp.w1", "layers.1", "head.dense"],
    "llada": ["tok_embed", "layers.0.attention.wo", "layers.1.mlp.w1", "layers.1.mlp.w3", "norm"],
    "ad": ["tok_embed", "layers.0.attention.wqkv", "layers.1.mlp.w2", "norm", "output"],
}
PARAMETERS = {
    "llama": "layers.1.mlp.w3",
    "mlm": "layers.0.mlp.w1",
    "llada": "layers.0.attention.wq",
    "ad": "layers.1.attention.wo",
}


def activations() -> Iterator[Any]:
    for family, modules in MODULES.items():
        for number, module in enumerate(modules):
            usual = number in (0, 3)
            yield pytest.param(family, "nan_act", module, marks=() if usual else pytest.mark.slow)
            yield pytest.param(family, "inf_act", module, marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "kind", "module"), list(activations()))
def test_an_activation_is_found_by_name(broken: Any, family: str, kind: str, module: str) -> None:
    finding = broken(f"{kind}@step=1,module={module}", family)
    assert finding.reproduced
    assert finding.place is not None
    assert (finding.step, finding.place.phase, finding.place.module) == (1, "forward", module)
    assert finding.place.operation.startswith("fill")
    assert len(finding.row_ids) == 4
    assert brought_back(finding).startswith("model:")


@pytest.mark.parametrize("family", ALL_BUT_SLOWLY)
@pytest.mark.parametrize("kind", ["nan_loss", pytest.param("inf_loss", marks=pytest.mark.slow)])
def test_a_loss(broken: Any, family: str, kind: str) -> None:
    finding = broken(f"{kind}@step=1", family)
    assert (finding.kind, finding.place.phase, finding.place.module) == (kind, "loss", "loss")
    assert finding.gradients == ()
    brought_back(finding)


@pytest.mark.parametrize("family", ALL_BUT_SLOWLY)
@pytest.mark.parametrize("kind", ["inf_grad", pytest.param("nan_grad", marks=pytest.mark.slow)])
def test_a_gradient(broken: Any, family: str, kind: str) -> None:
    """Also with clipping off, where nobody would look at the norm."""
    module = PARAMETERS[family]
    finding = broken(f"{kind}@step=1,tensor={module}.weight", family, **{"training.max_grad_norm": 0.0})
    assert (finding.kind, finding.place.phase, finding.place.module) == (kind, "backward", module)
    (table,) = finding.gradients
    assert table.name == f"{module}.weight"
    assert (table.nans or table.infs) == table.elements
    brought_back(finding)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["nan_weight", pytest.param("inf_weight", marks=pytest.mark.slow)])
def test_a_weight(broken: Any, family: str, kind: str) -> None:
    module = PARAMETERS[family]
    finding = broken(f"{kind}@step=1,tensor={module}.weight,index=5", family)
    assert (finding.step, finding.kind) == (2, kind)
    assert (finding.place.phase, finding.place.module) == ("weights", module)
    assert [(table.name, table.bad) for table in finding.weights] == [(f"{module}.weight", 1)]
    said = brought_back(finding)
    assert said.startswith("hardware-suspect" if kind == "nan_weight" else "model:")


def test_one_matrix_for_embedding_and_output(broken: Any) -> None:
    """Tied: it has one name, whichever use of it goes wrong."""
    tied = {"model.tie_word_embeddings": True}
    finding = broken("nan_grad@step=1,tensor=tok_embed.weight", **tied)
    assert (finding.place.phase, finding.place.module, len(finding.gradients)) == ("backward", "tok_embed", 1)
    brought_back(finding)


def test_a_weight_that_no_batch_reads(broken: Any) -> None:
    """The row of a token that does not occur: loss and gradients know nothing of it, a look in turn does."""
    settings = {"training.max_steps": 60, "training.batch_size": 1, "training.grad_accum_nums": 1}
    finding = broken("nan_weight@step=1,tensor=tok_embed.weight,index=32000", **settings)
    assert 2 <= finding.step <= 30
    assert (finding.kind, finding.place.module) == ("nan_weight", "tok_embed")
    assert finding.loss < 10
    brought_back(finding)


def test_an_input(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only masked diffusion is given numbers that can be NaN."""
    launch = Stepper.launch

    def launch_spoilt(self: Stepper, step: int, batches: Any) -> Any:
        if step == 1:
            batches[0].tensors["token_weights"].view(-1)[0] = math.nan
        return launch(self, step, batches)

    monkeypatch.setattr(Stepper, "launch", launch_spoilt)
    finding = broken("", "llada")
    assert (finding.kind, finding.place.phase) == ("nan_input", "input")
    assert "token_weights" in finding.place.module
    assert brought_back(finding).startswith("data:")


@pytest.mark.parametrize(
    "fault", ["nan_act@step=1,module=norm,once=1", "nan_loss@step=1,once=1", "inf_grad@step=1,once=1"]
)
def test_what_does_not_happen_again_is_blamed_on_the_hardware(broken: Any, fault: str) -> None:
    finding = broken(fault)
    assert not finding.reproduced
    assert finding.place is None
    assert finding.ranks == (0,)
    assert brought_back(finding, code=1).startswith("hardware-suspect")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_other_numbers_and_with_less_memory(broken: Any, precision: str, checkpointing: bool, debug: bool) -> None:
    settings = {"training.precision": precision, "system.gradient_checkpointing": checkpointing, "debug.enabled": debug}
    finding = broken("nan_act@step=1,module=layers.1.mlp.w1", **settings, **{"model.dropout": 0.1})
    assert (finding.place.phase, finding.place.module) == ("forward", "layers.1.mlp.w1")
    brought_back(finding)


@pytest.mark.parametrize("family", ALL_BUT_SLOWLY)
def test_fp16_that_finds_no_footing_tells_which_gradient(broken: Any, family: str) -> None:
    """Item 66 in each family: 20 overflows in a row are counted, not one step more is made, nothing is updated."""
    module = PARAMETERS[family]
    settings = {"training.precision": "fp16", "training.max_steps": 40, "training.grad_accum_nums": 1}
    finding = broken(f"inf_grad@tensor={module}.weight", family, **settings)
    assert (finding.kind, finding.place.phase, finding.place.module) == ("overflow", "backward", module)
    assert (finding.step, finding.history[-1]["loss_scale"]) == (17, 0.5), "65536, halved until it is below 1"
    scales = [each["loss_scale"] for each in finding.history]
    assert all(after == before / 2 for before, after in pairwise(scales))
    assert len({each["lr"] for each in finding.history}) == 1, "the schedule stands still"


@pytest.mark.parametrize("family", ALL_BUT_SLOWLY)
def test_a_single_fp16_overflow_is_skipped(family: str, tmp_path: Path, agents_data: Path, monkeypatch: Any) -> None:
    """Control: the run goes on, with half the scale and the learning rate it had."""
    own = {"data.data_path": str(agents_data)} if family == "ad" else {}
    monkeypatch.setenv("LOCKSTEP_FAULT", f"inf_grad@step=1,tensor={PARAMETERS[family]}.weight")
    settings = {**OF_FAMILY[family], **own, "training.precision": "fp16", "training.max_steps": 3}
    parts, recorder = run(tmp_path, settings, family=family)
    assert [record.skipped for record in recorder.records] == [False, True, False]
    assert recorder.records[1].lr == recorder.records[2].lr
    assert recorder.records[2].loss_scale == recorder.records[1].loss_scale / 2
    assert (parts.progress.step, parts.progress.skipped) == (3, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("checkpointing", [True, False])
def test_compiled_blocks(broken: Any, checkpointing: bool) -> None:
    """Two large weights overflow where they meet: found with the kernels of training, named without them."""
    settings = {"model.compile": "on", "system.gradient_checkpointing": checkpointing}
    large = (f"flip_weight@step=1,tensor=layers.1.mlp.{name}.weight,bit=30" for name in ("w1", "w3"))
    finding = broken(";".join(large), **settings)
    assert (finding.step, finding.place.block, finding.place.eager) == (2, "layers.1", True)
    assert (finding.place.phase, finding.place.module) == ("forward", "layers.1.mlp")
    assert finding.place.operation == "mul (aten.mul.Tensor)"
    assert finding.place.line.endswith("return F.silu(gate) * up")
    assert brought_back(finding).startswith("model: layers.1.mlp does it in every way that was tried")


@pytest.mark.parametrize(
    "fault", ["nan_act@step=1,module=layers.1.mlp.w1", "nan_grad@step=1,tensor=layers.1.mlp.w1.weight"]
)
def test_flex_attention_hides_no_operation(broken: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Its kernel is always compiled, and refuses to run where operations are watched: stood in for here."""
    watched = list[bool]()

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, **_how: Any) -> torch.Tensor:
        watched.append(bool(torch.utils._python_dispatch._get_current_dispatch_mode()))  # pyright: ignore[reportAttributeAccessIssue]
        assert not watched[-1], "not to be watched"
        with attention.plainly():
            return attention.attend(q, k, v, backend="flex", mask=block_mask)

    monkeypatch.setattr(attention, "_compiled_flex", lambda: kernel)
    monkeypatch.setattr(attention, "obstacle", lambda *_: "")
    finding = broken(fault, **{"model.attention_backend": "flex", "model.compile": "off"})
    assert finding.place.module == "layers.1.mlp.w1"
    assert finding.place.operation.startswith("fill")
    assert watched
    assert not any(watched)
    brought_back(finding)


def test_the_loss_scale_of_the_step_and_then_the_one_it_has_now() -> None:
    precision = Precision("fp16", torch.device("cpu"))
    stepper: Any = SimpleNamespace(precision=precision)
    assert precision.scaler is not None
    before = precision.scaler.state_dict()
    with scale_of(stepper, 8.0):
        assert precision.scaler.scale.item() == 8.0
    assert precision.scaler.state_dict() == before != {**before, "scale": 8.0}


def test_dumped_gradients_are_those_the_optimizer_would_see(broken: Any, tmp_path: Path) -> None:
    """Under fp16 they are 65536 times as large while they are made."""
    settings = {"training.precision": "fp16", "debug.enabled": True, "training.checkpoint_dir": str(tmp_path / "kept")}
    finding = broken("nan_loss@step=1", **settings)
    gradients = pickle.loads(Path(finding.files["debug"]).read_bytes())["gradients"]  # noqa: S301 - our own
    norm = sum(float((gradient.astype("float64") ** 2).sum()) for gradient in gradients.values()) ** 0.5
    assert norm == pytest.approx(finding.grad_norm, rel=1e-3)


def test_the_rows_that_are_named_are_those_of_the_step(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each id leads to the tokens that the bundle holds."""
    told: list[Any] = []
    examine = autopsy.examine

    def listening(parts: Any, bad: Any) -> Finding:
        finding = examine(parts, bad)
        tokens = torch.cat([batch.tensors["tokens"] for batch in bad.batches])
        found = torch.from_numpy(parts.table.take(np.array(finding.row_ids))["tokens"]).long()
        told.extend(torch.equal(one, other) for one, other in zip(found, tokens.long(), strict=True))
        return finding

    monkeypatch.setattr(autopsy, "examine", listening)
    broken("nan_loss@step=2")
    assert told == [True] * 4
