"""Row 16 at its figures: NaN and Inf at a random module, step and rank; the exact module named, and replayed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.replay import replay
from lockstep.errors import NonFiniteError
from lockstep.health.finding import Finding, from_json
from lockstep.models.build import lay_out
from lockstep.models.shapes import LlamaShape
from lockstep.runtime.group import Group
from tests.gates.training import run
from tests.ranks.data_parallel import SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

SETTINGS: dict[str, Any] = {
    **SMALL, "training.batch_size": 2, "training.max_steps": 8, "system.threads": 1, "training.eval_batches": 1,
}  # fmt: skip
TIMES = 20


def modules_and_tensors() -> tuple[list[str], list[str]]:
    shape = LlamaShape(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
        max_position_embeddings=8, rope_theta=1e4,
    )  # fmt: skip
    model = lay_out(shape, attention="native_flash")
    uncalled = ("", "layers", "output")  # the output matrix is multiplied chunk by chunk
    parts = [name for name, _ in model.named_modules() if name not in uncalled]
    return parts, [name for name, _ in model.named_parameters()]


def faults(kind: str, *, ranks: int = 1) -> list[tuple[str, int, str, str]]:
    """(fault, the step it shows at, phase, module), drawn with a seed of the kind."""
    draw, found = random.Random(kind), []
    parts, tensors = modules_and_tensors()
    for _ in range(TIMES):
        step, rank = draw.randrange(1, 6), draw.randrange(ranks)
        where = f"step={step},rank={rank}"
        if kind.endswith("_act"):
            module = draw.choice(parts)
            found.append((f"{kind}@{where},module={module}", step, "forward", module))
        elif kind.endswith("_loss"):
            found.append((f"{kind}@{where}", step, "loss", "loss"))
        else:
            tensor = draw.choice(tensors)
            phase, shows = ("weights", step + 1) if kind.endswith("_weight") else ("backward", step)
            found.append((f"{kind}@{where},tensor={tensor}", shows, phase, tensor.rpartition(".")[0]))
    return found


def found_after(group: Group | None, folder: Path, fault: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        try:
            run(folder, SETTINGS, group=group)
        except NonFiniteError as error:
            return dict(error.finding)
    return {}


def right(finding: Finding, step: int, phase: str, module: str) -> bool:
    place = finding.place
    if not place or (finding.step, place.phase, place.module) != (step, phase, module):
        return False
    done, _ = replay(Path(finding.files["bundle"]), device="cpu")
    return done.reproduced


@pytest.mark.parametrize("kind", ["nan_loss", "inf_loss", "inf_grad", "nan_act", "nan_weight", "nan_grad", "inf_act"])
def test_alone(tmp_path: Path, kind: str) -> None:
    wrong = [
        fault
        for number, (fault, *where) in enumerate(faults(kind))
        if not right(from_json(found_after(None, tmp_path / str(number), fault)), *where)
    ]
    assert wrong == []


def together(group: Group, folder: Path, drawn: list[tuple[str, int, str, str]]) -> list[dict[str, Any]]:
    return [found_after(group, folder / str(number), fault) for number, (fault, *_) in enumerate(drawn)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["nan_loss", "inf_grad", "nan_act", "nan_weight"])
def test_two_ranks(ranks: Pool, tmp_path: Path, kind: str) -> None:
    drawn = faults(kind, ranks=2)
    first, second = ranks(2, together, tmp_path, drawn, timeout_seconds=500)
    assert first == second
    wrong = [
        fault
        for (fault, *where), saved in zip(drawn, first, strict=True)
        if not right(from_json(saved), *where) or f"rank={saved['rank']}," not in f"{fault},"
    ]
    assert wrong == []
