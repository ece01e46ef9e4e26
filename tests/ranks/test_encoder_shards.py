"""An encoder in shards has the bits of the whole: first weights, imported weights, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.models import hf
from lockstep.models.build import build
from lockstep.models.microbert import seed_names
from lockstep.models.options import EncoderOptions
from lockstep.models.shapes import resolve
from lockstep.runtime.group import Group
from lockstep.runtime.parallel import Sharded, is_sharded, offset, whole
from tests.ranks.pool import Pool

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
ARCHITECTURES = ("prenorm", "bert", "modern")
SIZES = {
    "num_layers": 3,
    "hidden_size": 20,
    "num_attention_heads": 2,
    "vocab_size": 37,
    "init_std": 0.2,
    "dropout": 0.0,
}


def made(shard: Any = None, **values: Any) -> Any:
    options = EncoderOptions.model_validate({"model_path": "lockstep/mlm-tiny", **SIZES, **values})
    return build(
        options, resolve(options, context_length=16), device=CPU, dtype_name="fp64", seed=7, checkpointing=False,
        deterministic=False, debug=False, shard=shard,
    ).model  # fmt: skip


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of two micro-batches as every rank has them, the second without any target."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(5, 37, (3, 16), generator=generator)
    documents = (torch.arange(16) >= 9).int().expand(3, -1) + 1
    places = torch.arange(0, 48, 4)
    for chosen in (places, places[:0]):
        model(inputs, inputs.flatten()[chosen], places_M=chosen, documents_BL=documents).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differing(group: Group, values: dict[str, Any]) -> list[str]:
    """Parameters whose weights are not the bits of the whole model's, or whose gradients are not its sum."""
    sharded, alone = made(Sharded("fsdp", group, CPU).shard, **values), made(**values)
    theirs = dict(alone.named_parameters())
    found = [name for name, ours in sharded.named_parameters() if not torch.equal(whole(ours.detach()), theirs[name])]
    assert all(is_sharded(parameter) for parameter in sharded.parameters())
    ours, expected = gradients(sharded), gradients(alone)
    for name, gradient in expected.items():
        error = (whole(ours[name]) - group.world * gradient).norm() / gradient.norm().clamp_min(1e-9)
        if float(error) > 1e-9:
            found.append(f"gradient of {name}")
    return found


def test_shards_are_the_whole(ranks: Pool) -> None:
    for architecture in ARCHITECTURES:
        assert ranks(3, differing, {"architecture": architecture}) == [[]] * 3


def test_imported_weights_are_cut_as_they_are_read(ranks: Pool, tmp_path: Path) -> None:
    """Three ranks, twenty rows of each of BERT's query, key and value: cuts fall inside and between them."""
    for architecture in ARCHITECTURES:
        source = made(architecture=architecture).float()
        hf.export(source, source.shape, tmp_path / architecture, dtype="fp32")
        values = {"model_path": str(tmp_path / architecture), "init": "pretrained"}
        assert ranks(3, differing, values) == [[]] * 3


def test_a_result_folder_is_cut_too(ranks: Pool, tmp_path: Path) -> None:
    """mlm_model.pth, as the documented scripts leave it."""
    torch.save(seed_names(made(architecture="prenorm").float()), tmp_path / "mlm_model.pth")
    assert ranks(3, differing, {"model_path": str(tmp_path), "init": "pretrained"}) == [[]] * 3


def one_row_off(group: Group, values: dict[str, Any]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "offset", lambda parameter: (max(0, offset(parameter)[0] - is_sharded(parameter)),))
        return differing(group, values)


def test_a_wrong_cut_is_seen(ranks: Pool, tmp_path: Path) -> None:
    source = made(architecture="bert").float()
    hf.export(source, source.shape, tmp_path / "bert", dtype="fp32")
    found = ranks(3, one_row_off, {"model_path": str(tmp_path / "bert"), "init": "pretrained"})
    assert any("tok_embed.weight" in names for names in found)
