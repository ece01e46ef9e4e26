"""First weights: a pure function of (seed, name, place)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from lockstep.models.initialise import BYTES_STD, GAMMA, fill, initialise, stream_key
from lockstep.models.llama import Llama
from lockstep.models.shapes import KNOWN

MASK = (1 << 64) - 1


def drawn(count: int, *, seed: int = 1, name: str = "w", std: float = 1.0, offset: int = 0) -> Tensor:
    out = torch.empty(count)
    fill(out, seed=seed, name=name, std=std, offset=offset)
    return out


def by_hand(seed: int, name: str, index: int) -> int:
    """The same number with Python's own integers."""
    z = (stream_key(seed, name) + (index + 1) * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return sum(z.to_bytes(8, "little")) - 1020


def test_it_is_the_stated_formula() -> None:
    scale = torch.tensor(0.02 / math.sqrt(8 * 65535 / 12), dtype=torch.float32)
    for offset in (0, 5, 1 << 33):
        expected = torch.tensor([by_hand(7, "layers.0.mlp.w1.weight", offset + i) for i in range(500)]) * scale
        assert torch.equal(drawn(500, seed=7, name="layers.0.mlp.w1.weight", std=0.02, offset=offset), expected)


def test_it_is_normal_enough() -> None:
    w = drawn(1_000_000).double()
    assert abs(float(w.mean())) < 4e-3  # 4 standard errors
    assert abs(float(w.std()) - 1) < 3e-3
    assert abs(float((w**3).mean())) < 0.01
    assert float((w**4).mean() / w.var() ** 2) == pytest.approx(3 - 0.15, abs=0.02)
    assert float(w.abs().max()) < 1020 / 209 + 0.01
    inside = [float((w.abs() < k).double().mean()) for k in (1, 2, 3)]
    assert inside == pytest.approx([0.6827, 0.9545, 0.9973], abs=0.01)


@pytest.mark.parametrize("other", [{"seed": 2}, {"name": "v"}, {"offset": 1}, {"offset": 1 << 20}])
def test_other_seeds_names_and_places_are_independent(other: dict[str, int | str]) -> None:
    a, b = drawn(200_000), drawn(200_000, **other)
    assert abs(float((a * b).mean())) < 0.01
    assert not torch.equal(a, b)


def test_neighbours_are_independent() -> None:
    w = drawn(400_000)
    for lag in (1, 2, 64, 4096):
        assert abs(float((w[:-lag] * w[lag:]).mean())) < 0.008


def test_shards_equal_the_whole_at_any_cut() -> None:
    whole = drawn(100_003)  # crosses the chunks of the CPU
    for pieces in (2, 3, 7):
        cuts = [len(whole) * i // pieces for i in range(pieces + 1)]
        parts = [drawn(b - a, offset=a) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


def test_double_precision_is_the_same_draw() -> None:
    wide = torch.empty(1000, dtype=torch.float64)
    fill(wide, seed=1, name="w", std=1.0)
    assert torch.allclose(wide.float(), drawn(1000), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_same_draw_rounded_once(dtype: torch.dtype) -> None:
    """Frozen weights are kept so; integers in bf16, which are not exact, would give others."""
    half, whole = torch.empty(40_000, dtype=dtype), torch.empty(40_000)  # crosses the chunks of the CPU
    for tensor in (half, whole):
        fill(tensor, seed=1, name="w", std=0.02)
    assert torch.equal(half, whole.to(dtype))
    scale = 0.02 / BYTES_STD
    in_half = (whole / scale).round().to(torch.bfloat16) * scale
    assert not torch.equal(half.bfloat16(), in_half.bfloat16())


def test_a_model_gets_the_stds_it_asked_for() -> None:
    model = Llama(KNOWN["lockstep/tiny"], attention="native_math")
    initialise(model, seed=3, std=0.05, head_std=0.01, depth_scaled=True)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        expected = 0.01 if name == "output.weight" else 0.025 if name.endswith(("wo.weight", "w2.weight")) else 0.05
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name
    first = {name: parameter.clone() for name, parameter in model.named_parameters()}
    initialise(model, seed=3, std=0.05, head_std=0.01, depth_scaled=True)
    assert all(torch.equal(first[name], parameter) for name, parameter in model.named_parameters())
