"""Item 122 and row 16 with several ranks: the guilty one is named, with its module and rows, and all end together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.replay import replay
from lockstep.errors import NonFiniteError
from lockstep.health.finding import from_json
from lockstep.models.layers import SwiGLU
from lockstep.runtime.group import Group
from tests.gates.training import run
from tests.ranks.data_parallel import SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

SETTINGS: dict[str, Any] = {
    **SMALL, "training.max_steps": 4, "training.batch_size": 2, "training.grad_accum_nums": 2, "system.threads": 1,
}  # fmt: skip


def broken(group: Group, folder: Path, settings: dict[str, Any], fault: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, finding, words) of a rank of a run that a fault ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        try:
            run(folder, {**SETTINGS, **settings}, group=group)
        except NonFiniteError as error:
            return int(error.exit_code), dict(error.finding), str(error)
    return 0, {}, "ended well"


def root(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
    """Finite forward; its gradient at 0 is not."""
    y = self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))
    return y + ((y - y).abs() + 0).sqrt() * 0


def broken_backward(group: Group, folder: Path, settings: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    """A real cause, on rank 1 only, in its third step."""
    forward, calls = SwiGLU.forward, [0]

    def sometimes(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return root(self, x) if calls[0] > 12 and group.rank == 1 else forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwiGLU, "forward", sometimes)
        return broken(group, folder, settings, "")


CASES = [  # mode, fault, phase, module
    ("ddp", "nan_act@rank=1,step=2,module=layers.1.mlp.w1", "forward", "layers.1.mlp.w1"),
    ("fsdp", "nan_act@rank=1,step=2,module=layers.1.mlp.w1", "forward", "layers.1.mlp.w1"),
    ("ddp", "inf_grad@rank=1,step=2,tensor=layers.0.attention.wo.weight", "backward", "layers.0.attention.wo"),
    ("ddp", "nan_weight@rank=1,step=1,tensor=layers.1.mlp.w2.weight", "weights", "layers.1.mlp.w2"),
    ("fsdp", "nan_grad@rank=1,step=2,tensor=layers.1.mlp.w3.weight", "backward", "layers.1.mlp.w3"),
    ("fsdp", "nan_weight@rank=1,step=1,tensor=layers.1.mlp.w2.weight", "weights", "layers.1.mlp.w2"),
    ("fsdp", "inf_act@rank=1,step=2,module=tok_embed", "forward", "tok_embed"),
    ("fsdp", "nan_loss@rank=1,step=2", "loss", "loss"),
    ("ddp", "nan_act@rank=1,step=2,module=norm", "forward", "norm"),
]


@pytest.mark.parametrize(
    ("mode", "fault", "phase", "module"),
    [pytest.param(*case, marks=() if number < 3 else pytest.mark.slow) for number, case in enumerate(CASES)],
)
def test_the_guilty_rank_and_its_module(
    ranks: Pool, tmp_path: Path, mode: str, fault: str, phase: str, module: str
) -> None:
    first, second = ranks(2, broken, tmp_path, {"system.mode": mode}, fault)
    assert first == second, "all ranks say the same"
    code, saved, words = first
    assert code == 71
    finding = from_json(saved)
    assert (finding.step, finding.ranks, finding.rank, finding.reproduced) == (2, (1,), 1, True)
    assert finding.place is not None
    assert (finding.place.phase, finding.place.module) == (phase, module)
    assert " on rank 1; " in words
    assert f"first in {module} ({phase}" in words
    bundle = Path(finding.files["bundle"])
    assert bundle.parts[-3] == "n0-GPU1"
    if "nan_grad" in fault and mode == "fsdp":
        return  # the fault spoils the part of a gradient that one rank holds: alone nobody holds a part
    done, _ = replay(bundle, device="cpu")
    assert done.reproduced, done.lines(finding)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_gradient_that_one_rank_makes(ranks: Pool, tmp_path: Path, mode: str) -> None:
    """In shards the sum is bad on every rank: only what flows back inside a rank tells whose it is."""
    first, second = ranks(2, broken_backward, tmp_path, {"system.mode": mode})
    assert first == second
    finding = from_json(first[1])
    assert (finding.kind, finding.ranks, finding.rank) == ("nan_grad", (1,), 1)
    assert finding.place is not None
    assert (finding.place.phase, finding.place.block) == ("backward", "layers.1")
    assert finding.place.module == "layers.1.mlp"
    assert ".sqrt()" in finding.place.line


def broken_with_blame(group: Group, folder: Path, fault: str) -> tuple[bool, dict[str, Any]]:
    """(whether it says that it began elsewhere, its finding) of a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        with pytest.raises(NonFiniteError) as caught:
            run(folder, SETTINGS, group=group)
    return caught.value.elsewhere, dict(caught.value.finding)


@pytest.mark.slow
def test_of_two_bad_ranks_one_speaks(ranks: Pool, tmp_path: Path) -> None:
    """Each has its own place; the launcher must not put one's words into the other's mouth."""
    fault = "nan_act@rank=0,step=1,module=norm;inf_act@rank=1,step=1,module=layers.0.mlp.w1"
    first, second = ranks(2, broken_with_blame, tmp_path / "run", fault)
    assert (first[0], second[0]) == (False, True)
    assert first[1] == second[1]
    finding = from_json(first[1])
    assert (finding.ranks, finding.rank, finding.place and finding.place.module) == ((0, 1), 0, "norm")


def test_a_flip_that_does_not_come_back_names_its_rank(ranks: Pool, tmp_path: Path) -> None:
    """Known from before the gradients were exchanged: the one chance there was."""
    for kind in ("nan_grad", "nan_loss"):
        first, second = ranks(2, broken, tmp_path / kind, {}, f"{kind}@rank=1,step=2,once=1")
        assert first == second
        finding = from_json(first[1])
        assert (finding.reproduced, finding.ranks) == (False, (1,))
        assert "hardware-suspect" in first[2]
