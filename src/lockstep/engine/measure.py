"""Measuring a trained model: its own validation rows once more, or how likely it finds an answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.load import from_saved
from lockstep.data.loader import validation_batches
from lockstep.engine.build import make_objective
from lockstep.engine.choices import speaking
from lockstep.engine.denoising import exchange
from lockstep.engine.evaluate import Judge, evaluate
from lockstep.engine.inference import load_run
from lockstep.engine.prepare import prepare
from lockstep.engine.resume import read_about
from lockstep.errors import ConfigError, DataError
from lockstep.objectives.diffusion import Diffusion
from lockstep.objectives.likelihood import log_likelihood
from lockstep.rundir import refuse_streamed
from lockstep.runtime import precision

if TYPE_CHECKING:
    from lockstep.contracts import Array
    from lockstep.data.tokenize import TokenizerFile

BUCKET = "loss_t_"  # and a tenth of t: measures of masked diffusion
SAMPLES = 128  # ways to hide an answer


@dataclass(frozen=True)
class Measured:
    """The measures of a checkpoint on the validation rows of its run."""

    checkpoint: Path
    rows: int
    measures: Mapping[str, float]

    def fields(self) -> dict[str, Any]:
        """For programs."""
        plain = {name: value if math.isfinite(value) else None for name, value in self.measures.items()}
        return {"checkpoint": str(self.checkpoint), "rows": self.rows, **plain}

    def lines(self) -> list[str]:
        """For people."""
        tenths = {name: value for name, value in self.measures.items() if name.startswith(BUCKET)}
        plain = {name: value for name, value in self.measures.items() if name not in tenths}
        at_most = {"loss", "perplexity", "bits_per_byte"} if tenths else set()
        return [
            f"{self.checkpoint}: {self.rows:,} validation rows",
            *(_line(name, value, " at most" if name in at_most else "") for name, value in plain.items()),
            *(["  loss of hidden tokens, by the share that is hidden"] if tenths else []),
            *(f"    {_tenth(name):<16} {value:,.4f}" for name, value in tenths.items()),
        ]


def _tenth(name: str) -> str:
    start = 10 * int(name.removeprefix(BUCKET))
    return f"{start:>2} to {start + 10:>3} %"


def _line(name: str, value: float, after: str = "") -> str:
    return f"  {name.replace('_', ' '):<18} {value:,.4f}{after}"


@dataclass(frozen=True)
class Scored:
    """How likely a model finds an answer; the bound below which its log p is not."""

    checkpoint: Path
    log_likelihood: float  # nats
    tokens: int
    samples: int

    def fields(self) -> dict[str, Any]:
        """For programs."""
        return {**dataclasses.asdict(self), "checkpoint": str(self.checkpoint), "per_token": self.per_token}

    @property
    def per_token(self) -> float:
        return self.log_likelihood / self.tokens

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.checkpoint}: log p(answer | prompt) of {self.tokens:,} tokens, {self.samples:,} samples",
            _line("log likelihood", self.log_likelihood, " at least"),
            _line("per token", self.per_token),
        ]


def measure_run(path: Path) -> Measured:
    """`lockstep eval RUN`: the same rows, masks and batches as the validation of the run itself."""
    trained = load_run(path, documents_apart=True)
    about = read_about(trained.checkpoint, trains=False)
    config = from_saved(about["config"])
    refuse_streamed(trained.checkpoint.resolve().parents[1], config.family)
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
    named = precision.resolve(precision.for_measuring(options.precision), device)
    found = dict(evaluate(Judge(trained.model, objective, precision.Precision(named, device)), batches))
    loss = found.pop("loss")
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    rows = sum(batch.rows for batch in batches)
    measures = {"loss": loss, "perplexity": perplexity}
    if isinstance(objective, Diffusion) and not objective.answers:
        tokens = prepared.validation.take(np.arange(rows))["tokens"].ravel()
        measures |= bits_per_byte(loss, tokens, prepared.tokenizer)
    return Measured(trained.checkpoint, rows, {**measures, **found})


def bits_per_byte(loss: float, tokens: Array, tokenizer: TokenizerFile) -> dict[str, float]:
    """The same whatever the tokenizer, so that models can be compared; ends of documents are no bytes."""
    size = len(tokenizer.decode(tokens.tolist()).encode("utf-8", "replace"))
    return {"bits_per_byte": loss * len(tokens) / math.log(2) / size} if size else {}


def measure_answer(
    path: Path, answer: str, *, prompt: str = "", samples: int = SAMPLES, cfg_scale: float = 0.0
) -> Scored:
    """`lockstep eval RUN --prompt P --answer A`: the bound of log p(A | P) of masked diffusion."""
    trained = load_run(path)
    objective, tokenizer = trained.objective, trained.tokenizer
    if not isinstance(objective, Diffusion):
        what = "a likelihood of one answer is for masked diffusion (family llada), and this run is of another"
        raise ConfigError(what, where="--answer", hint=f"lockstep eval {path}")
    before, scored = exchange(objective, tokenizer, prompt, answer)
    if not scored:
        raise ConfigError("the answer holds no token", where="--answer", hint="at least one character")
    samples = samples if len(scored) > 1 else 1
    found = log_likelihood(
        trained.model,
        before,
        scored,
        mask=objective.mask,
        bias_V=objective.logit_bias(trained.model),
        samples=samples,
        cfg_scale=cfg_scale,
    )
    return Scored(trained.checkpoint, found, len(scored), samples)
