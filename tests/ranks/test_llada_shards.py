"""A LLaDA in shards has the bits of the whole: imported under any names, with new rows, its head at places only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.models import hf
from lockstep.models.build import build
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import LlamaShape
from lockstep.models.options import LladaOptions
from lockstep.models.shapes import resolve
from lockstep.runtime.group import Group
from lockstep.runtime.parallel import Sharded, is_sharded, whole
from tests.ranks.pool import Pool

pytestmark = pytest.mark.ranks

CPU = torch.device("cpu")
ROWS = 37
SHAPES = {
    "llada": LlamaShape(ROWS, 20, 36, 3, 2, 2, 10, 16, 1e4, layout="llada", bidirectional=True, mask=36),
    "llama": LlamaShape(ROWS, 20, 36, 3, 2, 1, 10, 16, 1e4, tied=True),
    "qwen2": LlamaShape(ROWS, 20, 36, 3, 2, 1, 10, 16, 1e4, layout="qwen2", qkv_bias=True),
    "qwen3": LlamaShape(ROWS, 20, 36, 3, 2, 1, 10, 16, 1e4, layout="qwen3", qk_norm=True),
}


def begun(folder: str, rows: int, shard: Any = None) -> Any:
    options = LladaOptions.model_validate({"model_path": folder, "init": "pretrained", "vocab_size": rows})
    return build(
        options, resolve(options, context_length=16), device=CPU, dtype_name="fp64", seed=7, checkpointing=False,
        deterministic=False, debug=False, shard=shard,
    ).model  # fmt: skip


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of two micro-batches as every rank has them, the second with nothing hidden."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, ROWS - 1, (3, 16), generator=generator)
    bias = torch.zeros(model.shape.vocab_size)
    bias[-1] = -torch.inf
    places = torch.arange(0, 48, 4)
    for chosen in (places, places[:0]):
        weights = torch.linspace(1, 100, len(chosen)).double()
        model(inputs, inputs.flatten()[chosen], weights, places_M=chosen, logit_bias_V=bias).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def differing(group: Group, folder: str, rows: int) -> list[str]:
    """Parameters whose weights are not the bits of the whole model's, or whose gradients are not its sum."""
    sharded, alone = begun(folder, rows, Sharded("fsdp", group, CPU).shard), begun(folder, rows)
    theirs = dict(alone.named_parameters())
    found = [name for name, ours in sharded.named_parameters() if not torch.equal(whole(ours.detach()), theirs[name])]
    assert all(is_sharded(parameter) for parameter in sharded.parameters())
    ours, expected = gradients(sharded), gradients(alone)
    for name, gradient in expected.items():
        error = (whole(ours[name]) - group.world * gradient).norm() / gradient.norm().clamp_min(1e-9)
        if float(error) > 1e-9:
            found.append(f"gradient of {name}")
    return found


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 52) for name in SHAPES),
        *(pytest.param(name, ROWS, marks=() if name == "llada" else pytest.mark.slow) for name in SHAPES),
    ],
)
def test_imported_weights_are_cut_as_they_are_read(ranks: Pool, tmp_path: Path, name: str, rows: int) -> None:
    """Three ranks: of 37 rows, and of 52, where the last rank has new ones only and the second some."""
    source = Llama(SHAPES[name], attention="native_math")
    initialise(source, seed=3, std=0.2)
    hf.export(source, SHAPES[name], tmp_path / name, dtype="bf16", max_shard_bytes=4000)
    assert ranks(3, differing, str(tmp_path / name), rows) == [[]] * 3


def one_mean_off(group: Group, folder: str) -> list[str]:
    """The fault: each rank has a mean of its own."""
    real = hf._mean_row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "_mean_row", lambda file, name, rows: real(file, name, rows - group.rank))
        return differing(group, folder, 52)


def test_a_mean_that_differs_between_ranks_is_seen(ranks: Pool, tmp_path: Path) -> None:
    source = Llama(SHAPES["llada"], attention="native_math")
    initialise(source, seed=3, std=0.2)
    hf.export(source, source.shape, tmp_path / "m", dtype="fp32")
    found = ranks(3, one_mean_off, str(tmp_path / "m"))
    assert any("tok_embed.weight" in each for each in found)
