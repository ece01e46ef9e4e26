"""From options and a shape to a model with weights, on its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.models import attention, hf, initialise
from lockstep.models.llama import Llama
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import LlamaShape
from lockstep.runtime import hub


@dataclass(frozen=True)
class Built:
    """A model ready to train, and what its user should hear about it."""

    model: Llama
    notices: tuple[str, ...]
    attention: str
    compiled: bool


def build(  # noqa: PLR0913 - everything a model depends on, by name
    options: LlamaOptions,
    shape: LlamaShape,
    *,
    device: torch.device,
    dtype_name: str,
    seed: int,
    checkpointing: bool,
    deterministic: bool,
    debug: bool,
    documents_apart: bool = False,
    token: str | None = None,
    shard: Callable[[nn.Module], None] | None = None,
) -> Built:
    """The model that `options` describe: laid out without memory, compiled block by block, given memory, filled.

    `shard` cuts it before it gets any memory: a rank never holds more than its part.
    """
    kernel, attention_notice = attention.resolve(
        options.attention_backend,
        use_flash=options.use_flash_attention,
        device_type=device.type,
        dtype_name=dtype_name,
        deterministic=deterministic,
        head_dim=shape.head_dim,
        documents_apart=documents_apart,
    )
    with torch.device("meta"):
        model = Llama(shape, attention=kernel, dropout=options.dropout, checkpointing=checkpointing)
    if dtype_name == "fp64":
        model.double()
    compiled = options.compile == "on" or (options.compile == "auto" and device.type == "cuda" and not debug)
    for block in model.layers if compiled else ():  # equal blocks compile once, and the loop over them stays Python
        if shard is None:
            block.compile(fullgraph=True)
        else:  # the forward alone: what gathers the shards around it cannot be compiled
            block.forward = torch.compile(block.forward, fullgraph=True)
    if shard is not None:
        shard(model)
    model.to_empty(device=device)
    model.rebuild_buffers()
    weights_notice = _fill(model, options, seed=seed, token=token)
    return Built(model, (weights_notice, attention_notice), kernel, compiled)


def _fill(model: Llama, options: LlamaOptions, *, seed: int, token: str | None) -> str:
    if options.init == "random":
        initialise.initialise(
            model,
            seed=seed,
            std=options.init_std,
            head_std=options.head_init_std,
            depth_scaled=options.depth_scaled_init,
        )
        return f"weights: random, seed {seed}, standard deviation {options.init_std:g}"
    folder = hub.weights_folder(options.model_path, token=token)
    truncated = options.init == "pretrained-truncated"
    hf.import_weights(model, folder, truncated=truncated)
    if truncated:
        kept = model.shape.num_layers
        return f"weights: pretrained-truncated, the first {kept} layers of {folder}: not a language model any more"
    return f"weights: pretrained, {folder}"
