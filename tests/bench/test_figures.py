"""Rates and shares by hand: the production shape is counted as the peers count it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lockstep.bench.anatomy import PARTS, Anatomy
from lockstep.bench.figures import Figures, Flops, Subject, p95
from lockstep.bench.show import table
from lockstep.config.load import load
from lockstep.models.shapes import AnyShape, resolve


def shape(family: str, preset: str, length: int, **overrides: Any) -> AnyShape:
    model = load(family, preset=preset, overrides=overrides).config.model
    return resolve(model, context_length=length)


def test_the_production_shape_is_counted_as_torchtitan_does() -> None:
    found = Flops.of(shape("llama", "production", 8192), 8192)
    assert found.palm / 1e9 == pytest.approx(9.997, abs=0.001)
    assert found.causal / 1e9 == pytest.approx(9.192, abs=0.001)


def test_attention_is_halved_only_where_it_is_causal() -> None:
    for family in ("mlm", "llada"):
        both = Flops.of(shape(family, "tiny", 64), 64)
        assert both.palm == both.causal
    agent = shape("ad", "tiny", 80)
    counted = Flops.of(agent, 80)
    assert counted.causal == agent.flops_per_token(80)
    assert counted.palm - counted.causal == pytest.approx(agent.flops_per_token(80) - agent.flops_per_token(0))


def test_rows_that_skip_the_head_are_not_counted() -> None:
    diffusion = shape("llada", "tiny", 64)
    some, every = Flops.of(diffusion, 64, head_share=0.5), Flops.of(diffusion, 64)
    assert every.palm - some.palm == 0.5 * 6 * diffusion.vocab_size * diffusion.hidden_size
    causal = shape("llama", "tiny", 64)
    assert Flops.of(causal, 64, head_share=0.5) == Flops.of(causal, 64)


def figures(**changes: Any) -> Figures:
    subject = Subject("llama", "tiny", {}, "m", 10, "b", "bf16", "cudnn", True, "H200", on_gpu=True)
    parts = Anatomy(500.0, {**dict.fromkeys(PARTS, 0.0), PARTS[0]: 400.0, "other": 60.0, "gaps": 40.0}, {"odd": 60.0})
    usual = Figures(
        subject, step_seconds=[0.4, 0.5, 0.6], rows_per_step=4, tokens_per_step=32768, flops=Flops(10e9, 9e9),
        peak_flops=989e12, measured_flops=790e12, memory_bytes=40 << 30, estimated_bytes=42 << 30,
        compile_seconds=30.0, anatomy=parts,
    )  # fmt: skip
    return replace(usual, **changes)


def test_shares_by_hand() -> None:
    found = figures()
    assert found.tokens_per_second == 65536
    assert found.mfu_palm == pytest.approx(65536 * 10e9 / 989e12)
    assert found.mfu_causal == pytest.approx(65536 * 9e9 / 989e12)
    assert found.of_measured_peak == pytest.approx(65536 * 9e9 / 790e12)
    assert found.estimate_off == pytest.approx(0.05)
    assert p95(list(range(1, 101))) == 95
    assert p95([3.0]) == 3.0


def test_the_table_and_the_json_say_the_same() -> None:
    text, tree = "\n".join(table(figures())), json.loads(json.dumps(figures().as_json()))
    assert "65,536" in text
    assert "66.3 % of 989 TFLOP/s peak" in text
    assert "40.00 GiB, 42.00 estimated (+5.0 %)" in text
    assert "other: 60.000 ms odd" in text
    shares = [
        line.split()[-2:] for line in text.splitlines() if line.startswith(("  matrix", "  gaps", "  sum", "  step"))
    ]
    assert shares == [["400.000", "80.0"], ["40.000", "8.0"], ["460.000", "92.0"], ["500.000", "100.0"]], "of the step"
    assert tree["mfu_palm"] == pytest.approx(0.6626, abs=1e-4)
    assert tree["anatomy"]["sum_of_parts_ms"] == 460.0
    assert tree["anatomy"]["parts_ms"]["gaps"] == 40.0


def test_where_no_peak_is_known_none_is_told() -> None:
    plain = figures(peak_flops=None, subject=replace(figures().subject, on_gpu=False))
    text = "\n".join(table(plain))
    assert "mfu" not in text
    assert "of_measured_peak" in text
    assert "%)" not in text
    assert plain.as_json()["mfu_palm"] is None
