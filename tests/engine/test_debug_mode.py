"""Debug mode in a run: layers that are dead are told, in every family; of sound ones nothing is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.models.layers import SwiGLU
from tests.engine.bad_steps import ALL_BUT_SLOWLY, OF_FAMILY
from tests.gates.training import run

pytestmark = pytest.mark.usefixtures("shared_cache")
TABLE = "Layers without a gradient"


@pytest.fixture
def debugged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, agents_data: Path
) -> Any:
    """What a run in debug mode says of its gradients."""
    monkeypatch.setattr(logging.getLogger("lockstep"), "propagate", True)

    def lines(family: str, **settings: Any) -> list[str]:
        own = {"data.data_path": str(agents_data)} if family == "ad" else {}
        run(tmp_path / "run", {**OF_FAMILY[family], **own, "debug.enabled": True, **settings}, family=family)
        return [record.getMessage() for record in caplog.records if record.name == "lockstep.engine.step"]

    return lines


@pytest.mark.parametrize("family", ALL_BUT_SLOWLY)
def test_a_sound_run_has_no_table(debugged: Any, family: str) -> None:
    assert [line for line in debugged(family) if TABLE in line] == []


def test_a_dead_layer(debugged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out of one block's perceptron is thrown away: it learns nothing, nor does the norm before it."""
    forward, calls = SwiGLU.forward, list[int]()

    def deaf(self: SwiGLU, x: Tensor) -> Tensor:
        calls.append(1)
        made = forward(self, x)
        return made if len(calls) % 2 else torch.zeros_like(made) * made  # of two blocks the second

    monkeypatch.setattr(SwiGLU, "forward", deaf)
    lines = debugged("llama", **{"training.grad_accum_nums": 1})
    assert lines[0] == f"{TABLE}: 4, with a far larger one than others: 0, of 21"
    dead = ("mlp_norm", "mlp.w1", "mlp.w2", "mlp.w3")
    assert [line.split() for line in lines[1:5]] == [[f"layers.1.{name}.weight", "dead"] for name in dead]
    assert len([line for line in lines if TABLE in line]) == 1, "once, as long as it stays so"


def test_without_debug_mode_nobody_looks(debugged: Any) -> None:
    """Control: and no device is asked."""
    assert debugged("llama", **{"debug.enabled": False, "training.max_steps": 2}) == []
