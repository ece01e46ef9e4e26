"""Validation: the same rows and the same loss, however the global batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.load import load
from lockstep.engine import evaluate as evaluate_module
from lockstep.engine.build import assemble, plan
from lockstep.engine.evaluate import evaluate
from lockstep.engine.parts import Parts
from lockstep.models.build import compile_blocks, forget_compiled
from lockstep.rundir import RunDir
from lockstep.runtime.signals import StopRequest

pytestmark = pytest.mark.usefixtures("shared_cache")


def assembled(folder: Path, batch_size: int, accumulated: int, eval_batches: int = 2) -> Parts:
    """A tiny run at its first step, the same weights each time."""
    settings = {"batch_size": batch_size, "grad_accum_nums": accumulated, "eval_batches": eval_batches}
    flags = [(f"training.{name}", str(value)) for name, value in settings.items()]
    planned = plan(load("llama", preset="tiny", flags=flags), torch.device("cpu"))
    made = assemble(planned, RunDir(folder), point=None, sinks=[], stop=StopRequest())
    made.loader.close()
    return made.parts


def test_validation_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    whole, cut = assembled(tmp_path, 8, 1), assembled(tmp_path, 2, 4)
    assert [batch.rows for batch in whole.validation] == [8] * 2
    assert [batch.rows for batch in cut.validation] == [2] * 8
    expected = evaluate(whole.stepper, whole.validation)
    assert evaluate(cut.stepper, cut.validation) == pytest.approx(expected, rel=1e-6)
    fewer = assembled(tmp_path, 2, 4, eval_batches=1)  # negative control: other rows, another loss
    assert evaluate(fewer.stepper, fewer.validation)["loss"] != pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize("sharded", [False, True])
def test_a_shorter_last_batch_changes_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """It is compiled for its own rows: no graph for any number of them, which a run that goes on would not have yet."""
    parts = assembled(tmp_path, 4, 1, eval_batches=1000)
    batches = [*parts.validation[:2], parts.validation[-1]]
    assert [(batch.rows, batch.is_short) for batch in batches] == [(4, False), (4, False), (batches[-1].rows, True)]
    any_number: list[bool] = []  # of rows, of each graph

    def noted(graph: Any, inputs: Sequence[Any]) -> Any:
        any_number.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph.forward

    compile_blocks(parts.stepper.model, torch.device("cpu"), sharded=sharded, backend=noted)
    try:
        first = evaluate(parts.stepper, batches)
        graphs = list(any_number)
        assert graphs == [False] * (2 if sharded else 4)  # blocks and, where it is not in shards, the norm
        assert [evaluate(parts.stepper, batches) for _ in range(2)] == [first, first]
        assert any_number == graphs
        forget_compiled()
        monkeypatch.setattr(evaluate_module, "_compiled_as_it_is", nullcontext)
        evaluate(parts.stepper, batches)
        assert True in any_number  # the control: the compiler's own way
    finally:
        forget_compiled()
