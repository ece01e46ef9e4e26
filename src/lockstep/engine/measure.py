"""Measuring a trained model: its own validation rows once more, or what it is worth for labelled text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config.load import from_dict
from lockstep.data.loader import validation_batches
from lockstep.engine.build import make_objective
from lockstep.engine.choices import speaking
from lockstep.engine.downstream import Comparison, How, compare, encode
from lockstep.engine.evaluate import Judge, evaluate
from lockstep.engine.inference import load_run, untrained
from lockstep.engine.labelled import Labelled
from lockstep.engine.prepare import prepare
from lockstep.engine.resume import read_about
from lockstep.errors import ConfigError, DataError
from lockstep.runtime import precision


@dataclass(frozen=True)
class Measured:
    """The measures of a checkpoint on the validation rows of its run."""

    checkpoint: Path
    rows: int
    measures: Mapping[str, float]
    suspicion: str = ""  # why the measures cannot be right, if the objective says so

    def fields(self) -> dict[str, Any]:
        """For programs."""
        said = {"suspicion": self.suspicion} if self.suspicion else {}
        plain = {name: value if math.isfinite(value) else None for name, value in self.measures.items()}
        return {"checkpoint": str(self.checkpoint), "rows": self.rows, **plain, **said}

    def lines(self) -> list[str]:
        """For people."""
        shown = [f"  {name.replace('_', ' '):<18} {value:,.4f}" for name, value in self.measures.items()]
        return [
            f"{self.checkpoint}: {self.rows:,} validation rows",
            *shown,
            *([f"Warning: {self.suspicion}"] if self.suspicion else []),
        ]


def measure_run(path: Path) -> Measured:
    """`lockstep eval RUN`: the same rows, masks and batches as the validation of the run itself."""
    trained = load_run(path, documents_apart=True)
    about = read_about(trained.checkpoint)
    config = from_dict(about["config"])
    options = config.training
    prepared = prepare(config, make_objective(config), vocab_limit=trained.shape.vocab_size)
    if prepared.key != about["data_key"]:
        raise DataError(
            "the text of this run is not what it was: other rows would be measured",
            where=str(trained.checkpoint),
            hint="the files as they were, or lockstep train on the new ones",
        )
    objective = speaking(make_objective(config), prepared.tokenizer)
    batches = validation_batches(
        prepared.validation,
        objective,
        micro_rows=options.batch_size,
        rows=options.eval_batches * int(about["batch_rows"]),
        seed=config.system.seed,
    )
    device = next(trained.model.parameters()).device
    named = precision.resolve(options.precision if options.precision != "fp64" else "fp32", device)
    found = dict(evaluate(Judge(trained.model, objective, precision.Precision(named, device)), batches))
    doubts = getattr(objective, "suspicion", None)
    suspicion = doubts(found) if doubts else ""
    loss = found.pop("loss")
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    rows = sum(batch.rows for batch in batches)
    return Measured(trained.checkpoint, rows, {"loss": loss, "perplexity": perplexity, **found}, suspicion)


def measure_labels(path: Path, labelled: Labelled, how: How) -> Comparison:
    """`lockstep eval RUN --labels FILE`: pretrained against random first weights."""
    trained = load_run(path, documents_apart=True)
    if not hasattr(trained.model, "hidden"):
        raise ConfigError(
            "labelled text is for encoders (family mlm), and this run has none",
            where="--labels",
            hint=f"lockstep eval {path}",
        )
    config = from_dict(read_about(trained.checkpoint)["config"])
    rows = encode(labelled.texts, trained.tokenizer, longest=config.training.context_length)
    return compare(trained.model, partial(untrained, trained), rows, labelled, how)
