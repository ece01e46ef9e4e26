"""`lockstep eval` of a run: the same rows and the same bits as its own last validation, whatever the family."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from lockstep.contracts import Batch, Sum
from lockstep.engine.evaluate import Judge, evaluate
from lockstep.engine.measure import Measured
from lockstep.report.logs import close_logging
from lockstep.runtime import precision

Run = Callable[..., Any]
SHORT = [
    "--max-steps",
    "2",
    "--eval-interval",
    "0",
    "--save-interval",
    "0",
    "--tensorboard",
    "false",
    "--device",
    "cpu",
]


@pytest.mark.parametrize("documents", ["separated", "masked"])
def test_a_llama_is_measured_as_its_run_did(lockstep: Run, in_dir: Path, shared_cache: Path, documents: str) -> None:
    assert lockstep("train", "llama", "tiny", *SHORT, "--name", "a", f"data.documents={documents}").code == 0
    close_logging()  # `eval` is a process of its own
    events = [json.loads(line) for line in Path("runs/a/events.jsonl").read_text().splitlines()]
    own = [event for event in events if event["kind"] == "eval"][-1]
    found = json.loads(lockstep("eval", "a", "--json").out)
    assert (found["loss"], found["accuracy"]) == (own["val_loss"], own["val_accuracy"])
    assert found["perplexity"] == math.exp(found["loss"])
    shown = lockstep("eval", "latest")
    assert shown.code == 0
    assert f"{found['rows']} validation rows" in shown.out
    assert "perplexity" in shown.out


class Few:
    """An objective whose measures are given."""

    terms: ClassVar[dict[str, float]] = {"loss": 1.0}

    def __init__(self, **weights: int) -> None:
        self.weights = weights

    def evaluate(self, *_: object) -> dict[str, Sum]:
        return {name: Sum(torch.tensor(2.0 * weight), weight) for name, weight in self.weights.items()}


def test_what_there_was_nothing_of_has_no_measure() -> None:
    """0 would be the best of all losses, and the worst of all accuracies."""
    batches = [Batch({}, {"loss": 3}, rows=1, tokens=4)] * 2
    cpu = precision.Precision("fp32", torch.device("cpu"))

    def measures(**weights: int) -> Any:
        objective: Any = Few(**weights)
        return evaluate(Judge(torch.nn.Identity(), objective, cpu), batches)

    assert measures(loss=3, accuracy_random=0) == {"loss": 2.0}
    assert math.isnan(measures(loss=0, accuracy=0)["loss"])
    assert json.dumps(Measured(Path("x"), 8, measures(loss=0)).fields(), allow_nan=False)
