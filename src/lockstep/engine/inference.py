"""Using a trained model: load it from a run, let it speak, hand it to others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep import registry, rundir
from lockstep.config.load import from_dict
from lockstep.contracts import Objective, SampleOptions, Tokenizer
from lockstep.data.tokenize import load_tokenizer
from lockstep.engine.checkpoint import MODEL, verify
from lockstep.engine.choices import speaking
from lockstep.engine.resume import point_of_run, read_about
from lockstep.engine.shards import Stored
from lockstep.errors import ConfigError
from lockstep.models import hf
from lockstep.models.build import build as build_model
from lockstep.models.llama import Llama
from lockstep.models.shapes import LlamaShape
from lockstep.runtime.hardware import pick_device


@dataclass(frozen=True)
class Trained:
    """A model with what belongs to it."""

    model: Llama
    tokenizer: Tokenizer
    objective: Objective
    shape: LlamaShape
    checkpoint: Path


def load_run(path: Path, *, device: str = "auto") -> Trained:
    """The model of a run (its newest good checkpoint) or of one checkpoint folder."""
    checkpoint = path if (path / rundir.MANIFEST).is_file() else point_of_run(path).checkpoint
    verify(checkpoint)
    about = read_about(checkpoint)
    config = from_dict(about["config"])
    shape = LlamaShape.from_hf(about["shape"])
    plain = config.model.model_copy(update={"init": "random", "compile": "off", "attention_backend": "auto"})
    place = pick_device(device, 0)
    built = build_model(
        plain, shape, device=place, dtype_name="fp32", seed=0, checkpointing=False, deterministic=False, debug=False
    )
    _fill(built.model, Stored(checkpoint, MODEL))
    tokenizer = load_tokenizer(checkpoint)
    objective = speaking(registry.load("objectives", config.objective.name, "build")(config.objective), tokenizer)
    return Trained(built.model.eval(), tokenizer, objective, shape, checkpoint)


@torch.no_grad()
def _fill(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def continue_text(
    model: nn.Module, objective: Objective, tokenizer: Tokenizer, prompt: str, options: SampleOptions | None = None
) -> str:
    """The prompt and what the model adds to it, up to the end of the document."""
    options = options or SampleOptions()
    ids = [int(token) for token in tokenizer.encode([prompt])[0]]
    if not ids:
        raise ConfigError("the prompt holds no token", hint="a prompt of at least one character")
    was_training = model.training
    model.eval()
    try:
        added = objective.sample(model, ids, options)
    finally:
        model.train(was_training)
    return prompt + _continuation(tokenizer, prompt, ids, [token for token in added if token != tokenizer.separator])


def _continuation(tokenizer: Tokenizer, prompt: str, ids: list[int], added: list[int]) -> str:
    """What was added, with the blank before it if there is one: tokenizers of words leave it out at the beginning."""
    before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *added])
    if not whole.startswith(before):
        return tokenizer.decode(added)
    return whole[len(before) :].lstrip() if prompt[-1].isspace() and not before[-1:].isspace() else whole[len(before) :]


def sample_run(path: Path, prompt: str, options: SampleOptions) -> str:
    """`lockstep sample RUN "prompt"`."""
    trained = load_run(path)
    stop = (trained.tokenizer.separator,)
    drawn = SampleOptions(options.tokens, options.temperature, options.top_k, options.seed, stop)
    return continue_text(trained.model, trained.objective, trained.tokenizer, prompt, drawn)


def export_run(path: Path, folder: Path, dtype: str = "fp32") -> Path:
    """`lockstep export RUN --to hf`: a folder that transformers loads."""
    trained = load_run(path, device="cpu")
    shape = dataclasses.replace(trained.shape, eos=(trained.tokenizer.separator,))
    tokenizer_file = trained.checkpoint / "tokenizer.json"
    hf.export(trained.model, shape, folder, dtype=dtype, tokenizer_file=tokenizer_file)
    return folder
