"""Validation: the same rows and the same loss, however the global batch is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.config.load import load
from lockstep.engine.build import assemble, plan
from lockstep.engine.evaluate import evaluate
from lockstep.engine.parts import Parts
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
