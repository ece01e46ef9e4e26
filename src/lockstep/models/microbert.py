"""The weights of an encoder under the documented roots of `mlm_model.pth`: embedding., encoder., mlm_head.

A plain dictionary of tensors, no `module.` before the names, the tied output matrix written out as `mlm_head.weight`.
No tensor tells how many heads there are, so the sizes travel in the metadata that torch keeps beside a state_dict.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.errors import ConfigError, DataError
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import EPS, EncoderShape
from lockstep.models.shapes import from_hf
from lockstep.runtime import torch_file
from lockstep.runtime.parallel import local, offset

ROOTS = {
    "tok_embed.": "embedding.word_embeddings.",
    "pos_embed.": "embedding.position_embeddings.",
    "type_embed.": "embedding.token_type_embeddings.",
    "embed_norm.": "embedding.layer_norm.",
    "layers.": "encoder.layers.",
    "norm.": "encoder.norm.",
    "head.": "mlm_head.",
}
EMBEDDING, TIED = "tok_embed.weight", "mlm_head.weight"
LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def seed_name(name: str) -> str:
    """The documented name of our parameter: layers.0.mlp.w1.weight -> encoder.layers.0.mlp.w1.weight."""
    ours, theirs = next(pair for pair in ROOTS.items() if name.startswith(pair[0]))
    return theirs + name.removeprefix(ours)


def seed_names(model: Encoder, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All weights under their documented names; `weights` where they were gathered from shards."""
    weights = dict(model.named_parameters()) if weights is None else weights
    found = OrderedDict((seed_name(name), weights[name].detach()) for name, _ in model.named_parameters())
    found[TIED] = weights[EMBEDDING].detach()
    vars(found)["_metadata"] = {"": {"version": 1, "config": model.shape.to_hf()}}
    return found


def read(file: Path) -> dict[str, Tensor]:
    """The tensors of such a file, and its metadata; nothing in it is ever executed."""
    state: Any = torch_file.read(file)
    if not isinstance(state, dict) or not all(isinstance(each, Tensor) for each in cast("Any", state).values()):
        raise DataError("not a dictionary of tensors", where=str(file))
    return cast("dict[str, Tensor]", state)


def shape_of(file: Path, *, heads: int | None) -> EncoderShape:
    """The sizes of the model in such a file; `heads` is asked for where the file does not tell."""
    state = read(file)
    about = getattr(state, "_metadata", {}).get("", {}).get("config")
    if about is not None:
        told = from_hf(about, where=str(file))
        assert isinstance(told, EncoderShape)
        return told
    sizes = {name: tensor.shape for name, tensor in torch_file.unwrapped(state, where=str(file)).items()}
    words, inner = (sizes.get(name) for name in ("embedding.word_embeddings.weight", "encoder.layers.0.mlp.w2.weight"))
    if words is None or inner is None or (len(words), len(inner)) != (2, 2):
        raise DataError(
            "the names or sizes of the tensors are not those of an encoder that lockstep trains",
            where=str(file),
            hint="only weights that lockstep has written can be read; others as safetensors with a config.json",
        )
    if heads is None:
        raise ConfigError(
            f"{file} does not tell how many heads the model has",
            where="model.num_attention_heads",
            hint="model.num_attention_heads=N",
        )
    kinds, places = (sizes.get(f"embedding.{name}_embeddings.weight") for name in ("token_type", "position"))
    architecture = "bert" if kinds else "prenorm" if places else "modern"
    layers = 1 + max(int(found[1]) for name in sizes if (found := LAYER.match(name)))
    positions = places[0] if places else 8192
    shape = EncoderShape(architecture, words[0], words[1], inner[1], layers, heads, positions, EPS[architecture])
    return replace(shape, types=kinds[0]) if kinds else shape


@torch.no_grad()
def load_seed(
    model: Encoder, state: Mapping[str, Tensor], *, where: str = "mlm_model.pth", truncated: bool = False
) -> None:
    """The way back: fills the model, or its part on this rank, or names what does not fit."""
    wanted = {seed_name(name): parameter for name, parameter in model.named_parameters()}
    state = torch_file.unwrapped(state, where=where)
    if truncated:
        state = {name: each for name, each in state.items() if name in wanted or not LAYER.match(name)}
    if wrong := sorted({*wanted, TIED} ^ set(state)):
        raise DataError(f"{len(wrong)} names differ from the model's: {', '.join(wrong[:4])}", where=where)
    for name, parameter in wanted.items():
        if parameter.shape != state[name].shape:
            shapes = f"{tuple(state[name].shape)}, the model needs {tuple(parameter.shape)}"
            raise DataError(f"{name} is {shapes}", where=where)
    if not torch.equal(state[TIED], state[seed_name(EMBEDDING)]):
        raise DataError(f"{TIED} differs from the embedding, but the model is tied", where=where)
    for name, parameter in wanted.items():
        here, first = local(parameter), offset(parameter)[0]
        here.copy_(state[name][first : first + here.shape[0]])
