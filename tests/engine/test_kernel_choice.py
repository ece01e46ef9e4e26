"""`model.attention_backend: auto` on a pretended GPU: the clock decides, the cache remembers, a checkpoint wins."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load, to_dict
from lockstep.engine.build import Plan, make_objective
from lockstep.engine.kernel_choice import Chooser
from lockstep.models import attention, attention_timing, shapes
from lockstep.models.attention_timing import Layer
from lockstep.runtime import hardware, measured
from lockstep.runtime.group import Group
from tests.gates.training import flags

CARD = "NVIDIA Fake"


@dataclass
class Gpu:
    """What is pretended: how long each kernel takes, which cannot run, and what was timed."""

    times: dict[str, float] = field(default_factory=lambda: {"cudnn": 14.5, "native_flash": 30.9})
    broken: dict[str, str] = field(default_factory=dict)
    timed: list[tuple[str, Layer]] = field(default_factory=list)


class Two(Group):
    """This rank, and another that can run only these kernels."""

    def __init__(self, others: list[str]) -> None:
        super().__init__()
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, self.others]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    pretend = Gpu()

    def milliseconds(kernel: str, layer: Layer, _device: torch.device) -> float:
        pretend.timed.append((kernel, layer))
        return pretend.times[kernel]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(attention, "has_package", lambda name: name == "triton")
    monkeypatch.setattr(attention, "probe", lambda backend, *_: pretend.broken.get(backend, ""))
    monkeypatch.setattr(attention_timing, "milliseconds", milliseconds)
    monkeypatch.setattr(hardware, "total_memory_bytes", lambda _: 80 << 30)
    return pretend


def choose(
    saved: dict[str, Any] | None = None,
    *,
    family: str = "llama",
    group: Group | None = None,
    facts: dict[str, Any] | None = None,
    backend: str = "auto",
    **settings: Any,
) -> tuple[str, str]:
    usual = {"training.precision": "bf16", "training.context_length": 8192, "training.batch_size": 8}
    preset = {"llama": "production"}.get(family, "tiny")
    config = load(family, preset=preset, flags=flags({**usual, **settings})).config
    shape = shapes.resolve(config.model, context_length=config.training.context_length)
    plan = Plan(config, torch.device("cuda"), shape, make_objective(config), "")
    about = {"device_name": CARD, "config": to_dict(config), "versions": {"torch": "2.13.0"}}
    known = {
        "use_flash": config.model.use_flash_attention, "device_type": "cuda", "dtype_name": config.training.precision,
        "deterministic": bool(config.system.deterministic), "head_dim": shape.head_dim, **(facts or {}),
    }  # fmt: skip
    return Chooser(plan, group or Group(), saved or {}, about)(backend, **known)


def test_the_fastest_is_chosen_and_the_figures_are_told(gpu: Gpu) -> None:
    assert choose() == ("cudnn", "attention: cudnn (auto; 14.5 ms a layer, native_flash 30.9; measured now)")
    layer = Layer(rows=4, length=8192, heads=32, kv_heads=8, head_dim=128, causal=True, dtype_name="bf16")
    assert gpu.timed == [("cudnn", layer), ("native_flash", layer)], "at most 32,768 tokens are timed"
    gpu.times = {"cudnn": 9.0, "native_flash": 6.0}
    later = f"attention: cudnn (auto; 14.5 ms a layer, native_flash 30.9; measured {measured.today()})"
    assert choose() == ("cudnn", later), "as kept: nothing is timed again"
    assert len(gpu.timed) == 2
    assert choose(**{"training.context_length": 4096})[0] == "native_flash", "another shape is timed anew"
    gpu.times = {"cudnn": 10.3, "native_flash": 10.0}
    assert choose(**{"training.context_length": 2048})[0] == "cudnn", "what is hardly faster changes nothing"


def test_a_damaged_entry_is_measured_again(gpu: Gpu) -> None:
    choose()
    path = measured.place()
    assert path
    for wrong in ('"milliseconds": []', '"milliseconds": {"cudnn": "x"}', '"milliseconds": 3'):
        text = path.read_text()
        at = text.index('"milliseconds": {')
        path.write_text(text[:at] + wrong + text[text.index("}", at) + 1 :])
        assert choose()[1].endswith("measured now)")
        assert choose()[1].endswith(f"measured {measured.today()})")


def test_a_kernel_that_cannot_be_timed_is_not_chosen_and_ends_nothing(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = {"cudnn"}

    def milliseconds(kernel: str, _layer: Layer, _device: torch.device) -> float:
        if kernel in failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return gpu.times[kernel]

    monkeypatch.setattr(attention_timing, "milliseconds", milliseconds)
    assert choose() == ("native_flash", "attention: native_flash (auto; 30.9 ms a layer; measured now)")
    assert caplog.messages == ["attention: cudnn was not timed: CUDA out of memory. Tried to allocate 2.00 GiB"]
    failing.add("native_flash")
    assert choose()[0] == "cudnn", "as without a clock"
    failing.clear()
    assert choose()[1] == "attention: cudnn (auto; 14.5 ms a layer, native_flash 30.9; measured now)", "not kept"


def test_both_ways_and_encoders_are_timed_at_their_own_shape(gpu: Gpu) -> None:
    choose(family="llada", **{"training.context_length": 1024})
    choose(family="mlm", **{"training.context_length": 1024, "model.max_position_embeddings": 1024})
    assert [layer.causal for _, layer in gpu.timed] == [False] * 4
    assert {layer.kv_heads == layer.heads for _, layer in gpu.timed[2:]} == {True}


def test_float8_leaves_attention_in_bf16_which_is_timed(gpu: Gpu) -> None:
    line = choose(facts={"dtype_name": "bf16"}, **{"training.precision": "fp8"})[1]
    assert line.endswith("measured now)")
    assert {layer.dtype_name for _, layer in gpu.timed} == {"bf16"}


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        ({"system.deterministic": True}, {}, "flex"),
        ({"training.precision": "fp32"}, {}, "flex"),
        ({}, {"documents_apart": True}, "flex"),
        ({"model.use_flash_attention": False}, {}, "native_math"),
        ({"training.context_length": 256}, {}, "cudnn"),
    ],
)
def test_where_no_clock_decides(gpu: Gpu, settings: dict[str, Any], facts: dict[str, Any], expected: str) -> None:
    """Bits that must repeat, masks, one kernel only, short rows: the fixed order, said as ever."""
    name, line = choose(facts=facts, **settings)
    assert name == expected
    assert "measured" not in line
    assert gpu.timed == []


def test_a_kernel_that_was_named_is_not_measured(gpu: Gpu) -> None:
    assert choose(backend="native_flash") == ("native_flash", "attention: native_flash, as asked")
    assert choose(facts={"device_type": "cpu"})[0] == "native_flash"
    assert gpu.timed == []


def test_a_run_that_goes_on_keeps_its_kernel(gpu: Gpu) -> None:
    config = {"system": {"deterministic": False}}
    saved = {"device_name": CARD, "attention": "native_flash", "config": config}
    kept = ("native_flash", "attention: native_flash (auto; as in the checkpoint)")
    assert choose(saved) == kept
    assert gpu.timed == []
    assert choose({**saved, "device_name": "another"})[0] == "cudnn", "other bits anyway"
    assert choose({**saved, "attention": "gone"})[0] == "cudnn"
    assert choose({**saved, "config": {"system": {"deterministic": True}}})[0] == "cudnn"
    gpu.broken = {"native_flash": "no such engine"}
    assert choose(saved)[0] == "cudnn", "it cannot run any more"
    deterministic = {"system.deterministic": True}
    then = {**saved, "config": {"system": {"deterministic": True}}}
    assert choose(then, **deterministic)[0] == "flex", "broken"
    gpu.broken = {}
    assert choose(then, **deterministic)[0] == "native_flash", "it repeats its bits, and was used"


def test_only_what_every_rank_can_run_is_compared(gpu: Gpu) -> None:
    assert choose(group=Two(["cudnn", "native_flash", "flex", "native_math"]))[0] == "cudnn"
    gpu.timed.clear()
    saved = {"device_name": CARD, "attention": "native_flash", "config": {"system": {"deterministic": False}}}
    name, _ = choose(saved, group=Two(["cudnn", "native_math"]))
    assert name == "cudnn"
    assert gpu.timed == []
