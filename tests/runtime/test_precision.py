"""In which numbers a step computes: what auto means, what is refused, and the loss scale of fp16."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.runtime import precision
from lockstep.runtime.precision import Precision, resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def has_bf16(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A card that has bf16 in hardware, or only emulates it."""
    card = {"bf16": True}
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: card["bf16"] or including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    return card


def test_auto(has_bf16: dict[str, bool]) -> None:
    assert resolve("auto", CPU) == "fp32"
    assert resolve("auto", GPU) == "bf16"
    has_bf16["bf16"] = False
    assert resolve("auto", GPU) == "fp32", "emulation is not support"


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_named_one_is_kept(name: str, has_bf16: dict[str, bool]) -> None:
    assert resolve(name, CPU) == name
    assert resolve(name, GPU) == name


def test_refusals_name_the_key_and_the_way_out(has_bf16: dict[str, bool]) -> None:
    has_bf16["bf16"] = False
    with pytest.raises(ConfigError, match="Tesla V100 has no bf16") as caught:
        resolve("bf16", GPU)
    assert "fp16" in caught.value.hint
    assert resolve("fp16", GPU) == "fp16"


def test_float8_is_refused_where_no_products_of_it_are(monkeypatch: pytest.MonkeyPatch) -> None:
    card: dict[str, tuple[int, int]] = {"capability": (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card["capability"])

    def refusal(device: torch.device) -> str:
        with pytest.raises(ConfigError, match=r"training\.precision: fp8: ") as caught:
            resolve("fp8", device)
        assert caught.value.hint == "--precision bf16"
        return str(caught.value)

    assert "it needs a GPU" in refusal(CPU)
    assert "a card has compute capability 8.6" in refusal(GPU)
    card["capability"] = (8, 9)
    assert resolve("fp8", GPU) == "fp8"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "of another kind" in refusal(GPU)


def test_what_is_left_of_float8_after_training() -> None:
    kinds = ("fp32", "bf16", "fp16", "fp64", "fp8")
    assert [precision.for_measuring(kind) for kind in kinds] == ["fp32", "bf16", "fp16", "fp32", "bf16"]
    assert [precision.without_float8(kind) for kind in kinds] == ["fp32", "bf16", "fp16", "fp64", "bf16"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.bfloat16)],
)
def test_the_context_computes_in_its_dtype(name: str, dtype: torch.dtype) -> None:
    mode = Precision(name, CPU)
    with mode.context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (mode.scaler is not None) == (name == "fp16")


def test_the_scale_halves_on_overflow_and_doubles_after_2000_good_steps() -> None:
    scaler = Precision("fp16", CPU).scaler
    assert scaler is not None
    good, overflow = torch.zeros(()), torch.ones(())
    scaler.update(overflow)
    assert scaler.state_dict() == {"scale": precision.FIRST_SCALE / 2, "growth_tracker": 0}
    scaler.update(good)
    assert scaler.state_dict() == {"scale": precision.FIRST_SCALE / 2, "growth_tracker": 1}
    scaler.load_state_dict({"scale": 8.0, "growth_tracker": precision.GROWTH_INTERVAL - 1})
    scaler.update(good)
    assert scaler.state_dict() == {"scale": 16.0, "growth_tracker": 0}
