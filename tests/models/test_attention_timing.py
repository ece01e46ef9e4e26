"""Timing attention: what is timed, and which of two is called faster. The clock itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import pytest

from lockstep.models.attention_timing import AHEAD, fastest, layer_of
from lockstep.models.shapes import KNOWN


def test_layers_of_every_family() -> None:
    asked = {"rows": 2, "length": 64, "dtype_name": "bf16"}
    llama = layer_of(KNOWN["lockstep/tiny"], **asked)
    assert llama
    assert (llama.causal, llama.rows, llama.length) == (True, 2, 64)
    assert llama.heads % llama.kv_heads == 0
    for name, causal in (("lockstep/llada-tiny", False), ("lockstep/mlm-tiny", False)):
        layer = layer_of(KNOWN[name], **asked)
        assert layer
        assert layer.causal is causal
    assert layer_of(KNOWN["lockstep/ad-tiny"], **asked) is None
    assert layer_of(KNOWN["lockstep/tiny"], rows=2, length=64, dtype_name="fp32") is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"cudnn": 14.5, "native_flash": 30.9}, "cudnn"),
        ({"cudnn": 30.9, "native_flash": 14.5}, "native_flash"),
        ({"cudnn": 10.0 * AHEAD, "native_flash": 10.0}, "cudnn"),
        ({"cudnn": 10.0 * AHEAD + 0.01, "native_flash": 10.0}, "native_flash"),
        ({"a": 3.0, "b": 2.0, "c": 1.0}, "c"),
        ({"a": 1.0}, "a"),
    ],
)
def test_the_first_unless_another_is_clearly_faster(times: dict[str, float], expected: str) -> None:
    assert fastest(times) == expected
