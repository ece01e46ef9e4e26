"""Runs that train additions to frozen weights: only the additions are saved, the weights are read again and compared.

A checkpoint holds the digest of the frozen weights as they were in training; whoever goes on from it, samples or
exports reads the weights from where the run's settings say and refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import RunConfig
from lockstep.engine.checkpoint import MODEL
from lockstep.engine.resume import read_about
from lockstep.engine.shards import Stored
from lockstep.engine.state import digest_of, trained
from lockstep.errors import ConfigError, DataError
from lockstep.models import lora
from lockstep.models.build import Model
from lockstep.models.build import build as build_model
from lockstep.models.llama import Llama
from lockstep.models.shapes import AnyShape, LlamaShape
from lockstep.runtime import hub
from lockstep.runtime.precision import without_float8

BASE = "base_digest"


def about_base(model: nn.Module) -> dict[str, str]:
    """What a checkpoint says of weights that it does not hold; nothing where all are trained. All ranks must ask."""
    frozen = [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return {BASE: digest_of(frozen)} if frozen else {}


def check_base(about: Mapping[str, Any], now: Mapping[str, Any], *, checkpoint: Path, model_path: str) -> None:
    """Refuse additions that were trained on other weights: together they would be no model at all."""
    saved, found = about.get(BASE), now.get(BASE)
    if saved == found:
        return
    if saved is None or found is None:
        what = "holds all weights, and this run trains additions only" if saved is None else "holds additions only"
        raise ConfigError(f"the checkpoint {what}", where=str(checkpoint), hint="model.lora_rank as it was")
    raise DataError(
        f"the frozen weights have changed: digest {str(saved)[:12]} when the additions were trained, {found[:12]} now",
        where=f"model.model_path {model_path}",
        hint="the folder or the revision of the model as it was then",
    )


def has_additions(config: RunConfig) -> bool:
    """Whether a run of this configuration saves additions only."""
    return lora.wanted(config.model) is not None


def load_model(
    config: RunConfig, shape: AnyShape, checkpoint: Path, place: torch.device, *, documents_apart: bool = False
) -> Model:
    """The frozen weights of a run with its additions, as they were trained."""
    model = build_model(
        config.model.model_copy(update={"compile": "off", "attention_backend": "auto"}),
        shape,
        device=place,
        dtype_name=without_float8(config.training.precision),
        seed=config.system.seed,
        checkpointing=False,
        deterministic=False,
        debug=False,
        documents_apart=documents_apart,
        token=hub.token_of(config.data.hf_token),
    ).model
    about = read_about(checkpoint, trains=False)
    check_base(about, about_base(model), checkpoint=checkpoint, model_path=config.model.model_path)
    weights = Stored(checkpoint, MODEL)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(weights[name])
    return model


def load_merged(
    config: RunConfig, shape: AnyShape, checkpoint: Path, place: torch.device, *, documents_apart: bool = False
) -> Model:
    """The same as a plain model in fp32."""
    model = load_model(config, shape, checkpoint, place, documents_apart=documents_apart)
    assert isinstance(model, Llama)
    return lora.merge(model)


def export_adapter(config: RunConfig, shape: AnyShape, checkpoint: Path, folder: Path) -> Path:
    """`lockstep export RUN --to peft`: the additions alone, in the form of the peft package."""
    options = lora.wanted(config.model)
    if options is None or not isinstance(shape, LlamaShape):
        raise ConfigError(
            "this run trained all weights: there is no adapter",
            where=str(checkpoint),
            hint="lockstep export RUN --to hf",
        )
    additions = {name: tensor for name, tensor in Stored(checkpoint, MODEL).items() if name.endswith(lora.ADDITIONS)}
    lora.write_adapter(additions, options, shape, folder)
    return folder
