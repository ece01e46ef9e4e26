"""LoRA on our blocks: what learns, what it is kept in, merging, and the form of the peft package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import ConfigError, NotFoundError, OutputError
from lockstep.models import lora
from lockstep.models.build import Built, build
from lockstep.models.hf_names import their_names
from lockstep.models.llama import Llama
from lockstep.models.options import LladaOptions
from lockstep.models.shapes import LlamaShape, resolve

CPU = torch.device("cpu")
WIDTHS = {"attention.wq": (64, 64), "attention.wk": (64, 32), "mlp.w1": (64, 176), "mlp.w2": (176, 64)}


def options(**values: Any) -> LladaOptions:
    return LladaOptions.model_validate({"model_path": "lockstep/llada-tiny", "lora_rank": 4, **values})


def built(asked: LladaOptions, precision: str = "fp32") -> tuple[Built, LlamaShape, Llama]:
    shape = resolve(asked, context_length=16)
    made = build(
        asked, shape, device=CPU, dtype_name=precision, seed=1, checkpointing=False, deterministic=False, debug=False
    )
    assert isinstance(shape, LlamaShape)
    assert isinstance(made.model, Llama)
    return made, shape, made.model


def with_something_learnt(model: nn.Module) -> None:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_b"):
            nn.init.normal_(parameter, std=0.05)


def ids() -> torch.Tensor:
    return torch.randint(0, 500, (2, 16), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("precision", "kept"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_only_additions_learn_and_the_rest_is_kept_small(precision: str, kept: torch.dtype) -> None:
    made, _, model = built(options(), precision)
    assert any("frozen; additions of rank 4" in line for line in made.notices)
    wide = torch.float64 if precision == "fp64" else torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith(lora.ADDITIONS), name
        assert parameter.dtype == (kept if parameter.ndim > 1 and not parameter.requires_grad else wide), name
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for matrix, (width, rows) in WIDTHS.items():
        assert shapes[f"layers.1.{matrix}.lora_a"] == (4, width)
        assert shapes[f"layers.1.{matrix}.lora_b"] == (rows, 4)


def test_it_begins_as_the_model_it_was_with_a_of_the_right_spread() -> None:
    _, _, model = built(options())
    _, _, plain = built(options(lora_rank=0))
    assert torch.equal(model(ids()), plain(ids()))
    down = model.get_parameter("layers.0.mlp.w2.lora_a")
    assert float(down.detach().std()) == pytest.approx((3 * 176) ** -0.5, rel=0.1)
    assert not torch.equal(down, model.get_parameter("layers.1.mlp.w2.lora_a"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.no_grad()
def test_merged_it_is_the_same_function(precision: str) -> None:
    _, shape, model = built(options(lora_alpha=2.0), precision)
    with_something_learnt(model)
    names = [name for name, _ in lora.merged(model)]
    half = precision == "bf16"
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        expected = model(ids()).float()
    before = built(options(lora_rank=0))[2](ids())
    found = lora.merge(model)(ids())
    assert float((found - expected).abs().max()) < (0.02 if half else 1e-5)
    assert float((before - expected).abs().max()) > 0.1, "the additions must matter"
    plain = built(options(lora_rank=0))[2]
    assert names == [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters()


def test_recomputing_changes_no_gradient() -> None:
    """Activation checkpointing beside additions: how 8B is trained on a small card."""
    gradients: list[list[torch.Tensor]] = []
    for checkpointing in (False, True):
        model = built(options())[2]
        with_something_learnt(model)
        model.checkpointing = checkpointing
        learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients.append(list(torch.autograd.grad(model(ids(), ids()), learnt)))
    assert len(gradients[0]) == 2 * 7 * 2
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert all(bool(gradient.any()) for gradient in gradients[0])


def test_targets() -> None:
    _, _, model = built(options(lora_targets="v, q"))
    added = {name.split(".", 2)[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert added == {f"attention.{matrix}.lora_{part}" for matrix in ("wq", "wv") for part in "ab"}
    for wrong in ("q,head", ","):
        with pytest.raises(ConfigError, match="lora_targets") as caught:
            built(options(lora_targets=wrong))
        assert "q,k,v,o,gate,up,down" in caught.value.hint
    with pytest.raises(ConfigError, match="lora_targets"):
        built(options(lora_targets="head", lora_rank=0))
    with pytest.raises(ConfigError, match="above the model's width"):
        built(options(lora_rank=4096))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / lora.ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(NotFoundError) as caught:
        resolve(LladaOptions(model_path=str(tmp_path)), context_length=8)
    assert "--to hf" in caught.value.hint


class Node(nn.Module):
    """A module with whatever children its paths say: what LLaDA's own code would have built."""

    def put(self, path: str, module: nn.Module) -> None:
        first, _, rest = path.partition(".")
        if not rest:
            self.add_module(first, module)
            return
        if first not in dict(self.named_children()):
            self.add_module(first, Node())
        child = self.get_submodule(first)
        assert isinstance(child, Node)
        child.put(rest, module)


def as_llada(plain: Llama, shape: LlamaShape) -> Node:
    """The matrices of a plain model under LLaDA's names."""
    root = Node()
    for name, parameter in plain.named_parameters():
        if parameter.ndim == 2:
            linear = nn.Linear(parameter.shape[1], parameter.shape[0], bias=False)
            linear.weight = nn.Parameter(parameter.detach().clone())
            root.put(their_names(shape, name)[0].removesuffix(".weight"), linear)
    return root


def exported(tmp_path: Path, **values: Any) -> tuple[Llama, LlamaShape, Path]:
    asked = options(**values)
    _, shape, model = built(asked)
    with_something_learnt(model)
    additions = {name: tensor for name, tensor in model.named_parameters() if name.endswith(lora.ADDITIONS)}
    lora.write_adapter(additions, asked, shape, tmp_path / "adapter")
    return model, shape, tmp_path / "adapter"


def test_an_adapter_has_the_names_of_peft(tmp_path: Path) -> None:
    model, shape, folder = exported(tmp_path, lora_targets="q,down", lora_alpha=6.0)
    tensors = load_file(folder / lora.ADAPTER_WEIGHTS)
    path = "base_model.model.model.transformer.blocks"
    assert set(tensors) == {
        f"{path}.{layer}.{matrix}.lora_{part}.weight"
        for layer in range(2) for matrix in ("q_proj", "ff_out") for part in "AB"
    }  # fmt: skip
    assert torch.equal(tensors[f"{path}.1.ff_out.lora_A.weight"], model.get_parameter("layers.1.mlp.w2.lora_a"))
    config = json.loads((folder / lora.ADAPTER_CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 6.0, "none")
    with pytest.raises(OutputError, match="not empty"):
        lora.write_adapter({}, options(), shape, folder)


@pytest.mark.slow
def test_peft_itself_reads_and_merges_it(tmp_path: Path) -> None:
    """Onto modules called as LLaDA's are; the output matrix, also an ff_out, stays as it is."""
    peft = pytest.importorskip("peft", reason="the real peft reads our adapters")
    model, shape, folder = exported(tmp_path, lora_alpha=6.0)
    base = as_llada(built(options(lora_rank=0))[2], shape)
    with_adapter = peft.PeftModel.from_pretrained(base, str(folder))
    merged = dict(with_adapter.merge_and_unload().named_parameters())
    expected = {their_names(shape, name)[0]: weight for name, weight in lora.merged(model) if weight.ndim == 2}
    assert set(merged) == set(expected)
    assert max(float((merged[name] - expected[name]).abs().max()) for name in expected) < 1e-6
    untouched = dict(as_llada(built(options(lora_rank=0))[2], shape).named_parameters())
    changed = {name for name in expected if not torch.equal(merged[name], untouched[name])}
    assert len(changed) == 7 * shape.num_layers
