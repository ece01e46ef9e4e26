"""Items 62-66 and row 16: what is injected is found, exactly, in every family; and the bundle brings it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.replay import replay
from lockstep.errors import NonFiniteError
from lockstep.health.finding import Finding, from_json
from tests.gates.training import run

pytestmark = pytest.mark.usefixtures("shared_cache")

SMALL: dict[str, Any] = {
    "training.max_steps": 4, "training.batch_size": 2, "training.grad_accum_nums": 2, "training.eval_interval": 0,
    "training.eval_batches": 1, "training.save_interval": 0, "training.warmup_steps": 1, "data.num_workers": 0,
    "system.threads": 1,
}  # fmt: skip
TEXT: dict[str, Any] = {**SMALL, "training.context_length": 16}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "mlm": TEXT,
    "llada": TEXT,
    "ad": {**SMALL, "training.context_length": 40, "data.train_source_timesteps": 80, "training.gen_episodes": 0},
}
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
FAMILIES = list(OF_FAMILY)


@pytest.fixture(scope="session")
def agents_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the histories of a source learner are made, once."""
    return tmp_path_factory.mktemp("histories")


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Train with a fault until it stops the run; what was found."""

    def until(fault: str, family: str = "llama", **settings: Any) -> Finding:
        own = {} if family != "ad" else {"data.data_path": str(request.getfixturevalue("agents_data"))}
        monkeypatch.setenv("LOCKSTEP_FAULT", fault)
        with pytest.raises(NonFiniteError) as caught:
            run(tmp_path / "run", {**OF_FAMILY[family], **own, **settings}, family=family)
        monkeypatch.delenv("LOCKSTEP_FAULT")
        assert int(caught.value.exit_code) == 71
        return from_json(caught.value.finding)

    return until


def brought_back(finding: Finding, *, code: int = 0) -> str:
    """Replay what was kept of it, where it must come back; what is said of it."""
    done, was = replay(Path(finding.files["bundle"]), device="cpu")
    assert was.as_json() == finding.replace(files=was.files).as_json()
    assert done.exit_code == code, done.lines(was)
    assert done.reproduced == (code == 0)
    return done.verdict


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
    kinds = ("model:", "data:") if family == "llada" else ("model:",)  # one place of a row, which may be no target
    assert brought_back(finding).startswith(kinds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["nan_loss", pytest.param("inf_loss", marks=pytest.mark.slow)])
def test_a_loss(broken: Any, family: str, kind: str) -> None:
    finding = broken(f"{kind}@step=1", family)
    assert (finding.kind, finding.place.phase, finding.place.module) == (kind, "loss", "loss")
    assert finding.gradients == ()
    brought_back(finding)


@pytest.mark.parametrize("family", FAMILIES)
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
    assert said.startswith("hardware-suspect" if kind == "nan_weight" else "learning rate")


def test_a_weight_that_no_batch_reads(broken: Any) -> None:
    """The row of a token that does not occur: loss and gradients know nothing of it, a look in turn does."""
    settings = {"training.max_steps": 60, "training.batch_size": 1, "training.grad_accum_nums": 1}
    finding = broken("nan_weight@step=1,tensor=tok_embed.weight,index=32000", **settings)
    assert 2 <= finding.step <= 30
    assert (finding.kind, finding.place.module) == ("nan_weight", "tok_embed")
    assert finding.loss < 10
    brought_back(finding)


def test_an_input(broken: Any) -> None:
    """Only masked diffusion is given numbers that can be NaN."""
    finding = broken("nan_input@step=1,tensor=token_weights,index=0", "llada")
    assert (finding.kind, finding.place.phase) == ("nan_input", "input")
    assert "token_weights" in finding.place.module
    assert finding.notes == ("the batch in memory is not the one on disk",)
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


def test_fp16_that_finds_no_footing_tells_which_gradient(broken: Any) -> None:
    finding = broken("inf_grad@tensor=norm.weight", **{"training.precision": "fp16", "training.max_steps": 40})
    assert (finding.kind, finding.place.phase, finding.place.module) == ("overflow", "backward", "norm")


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
    assert finding.place.line.endswith("return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))")
    assert brought_back(finding).startswith("hardware-suspect: a value of layers.1.mlp.w1.weight is ")
