"""The audit: on the CPU every operation repeats its bits, and one that is made not to is named with its line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep.check import audit
from lockstep.check.audit import Audited, Compared, Place
from lockstep.check.errand import FILE
from tests.check.tiny import LLAMA, errand

CPU = torch.device("cpu")
SILU = F.silu


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation of every block draws from a generator that nobody sets back."""
    own = torch.Generator()

    def silu(x: torch.Tensor) -> torch.Tensor:
        return SILU(x) * torch.rand(x.shape, generator=own)

    monkeypatch.setattr(F, "silu", silu)


def test_nothing_differs_on_the_cpu(tmp_path: Path) -> None:
    found = audit.audit(LLAMA, errand(tmp_path), CPU)
    assert found.operations.count > 300
    assert found.blocks.count > 20
    for compared in (found.blocks, found.operations):
        assert compared == Compared(compared.count, 0, ())
    assert found.lines()[0] == "llama: fp32, attention native_flash, not compiled; one step, twice"
    assert "all" in found.lines()[1]


@pytest.mark.usefixtures("noisy")
def test_an_operation_that_does_not_repeat_is_named(tmp_path: Path) -> None:
    found = audit.audit(LLAMA, errand(tmp_path), CPU)
    first = found.operations.origins[0]
    assert (first.phase, first.module) == ("forward", "layers.0.mlp")
    assert first.operation.startswith("rand (aten.rand")
    assert "test_audit.py" in first.line
    assert "torch.rand(x.shape, generator=own)" in first.line
    assert len(found.operations.origins) == 2, "one in each of two blocks; all else only inherits it"
    assert found.operations.differ > 100
    assert found.blocks.origins[0] == Place("forward", "layers.0")
    shown = "\n".join(found.lines())
    assert "layers.0.mlp, rand (aten.rand" in shown
    assert "2 of them on equal inputs" in shown


def test_a_backward_that_does_not_repeat_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator()

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return gradient * torch.rand(gradient.shape, generator=own)

    monkeypatch.setattr(F, "silu", lambda x: Noisy.apply(SILU(x)))
    found = audit.audit(LLAMA, errand(tmp_path), CPU)
    first = found.operations.origins[0]
    assert (first.phase, first.module) == ("backward", "layers.1.mlp")
    assert "rand" in first.operation
    assert found.blocks.origins[0] == Place("backward", "layers.1")
    assert all(place.phase == "backward" for place in found.blocks.origins)


def test_what_cannot_be_watched_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_ready: object) -> None:
        raise RuntimeError("no rule for flex_attention")

    monkeypatch.setattr(audit, "_operations", refuse)
    found = audit.audit(LLAMA, errand(tmp_path), CPU)
    assert found.operations.obstacle == "no rule for flex_attention"
    assert "cannot be watched (no rule for flex_attention)" in found.lines()[2]


def test_two_passes_that_do_different_things() -> None:
    places = iter([["a"], ["a", "b"]])
    nothing = torch.zeros(0, 2, dtype=torch.int64)
    compared = audit._compared(
        lambda: [audit.Computed(Place("forward", name), nothing, nothing) for name in next(places)]
    )
    assert "other operations" in compared.obstacle


def test_many_are_cut_short() -> None:
    places = tuple(Place("backward", f"layers.{n}") for n in range(9))
    facts = {"attention": "cudnn", "compiled": True, "precision": "bf16"}
    lines = Audited("production", facts, Compared(20, 12, places), Compared(9, 0, ())).lines()
    assert "12 of 20 differ, 9 of them on equal inputs" in lines[1]
    assert lines[7].strip() == "and 4 more"


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pulse = dataclasses.replace(LLAMA, name="pulse", pulse_seconds=1.0)
    path = errand(tmp_path, LLAMA, pulse).write(tmp_path / FILE)
    assert audit.main([str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Audit on CPU")
    assert len(out) == 4
    assert audit.main([]) == 2
