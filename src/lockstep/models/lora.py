"""LoRA (Hu et al. 2021): W x + alpha / rank * B A x, where only A and B learn, on the matrices of LLaMA's blocks.

Whatever does not learn is kept in the numbers the step computes in: an 8B model in bf16 takes 16 GB instead of 32, has
no gradients and no moments. Norms stay fp32, they are small. B begins at zero, so the first step sees the model as it
was; A is drawn as all our weights are, by (seed, name, place), in the spread that the peft package uses.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep import rundir
from lockstep.errors import OutputError
from lockstep.models import float8, initialise
from lockstep.models.hf_names import their_names
from lockstep.models.llama import Llama
from lockstep.models.memory import LORA_MATRICES, lora_targets
from lockstep.models.options import LladaOptions, ModelOptions
from lockstep.models.shapes import ADAPTER_CONFIG, LlamaShape
from lockstep.runtime.parallel import flat_offset, local, whole

logger = logging.getLogger(__name__)

ADDITIONS = (".lora_a", ".lora_b")
STORED = {"bf16": torch.bfloat16}  # precision -> what frozen matrices are kept in, where that is not its fp32
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
PEFT_KINDS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}


class LoraLinear(nn.Module):
    """A frozen matrix and its addition: `weight` and `bias` as before, `lora_a` (rank, in), `lora_b` (out, rank)."""

    def __init__(self, plain: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.product = float8.linear if isinstance(plain, float8.Float8Linear) else F.linear
        self.scale = alpha / rank
        like: dict[str, Any] = {"device": plain.weight.device, "dtype": plain.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(rank, plain.in_features, **like))
        self.lora_b = nn.Parameter(torch.empty(plain.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_a.to(x.dtype))
        return self.product(x, self.weight, self.bias) + F.linear(low, self.lora_b.to(x.dtype)) * self.scale


def wanted(options: ModelOptions) -> LladaOptions | None:
    """The options, if they ask for additions."""
    return options if isinstance(options, LladaOptions) and options.lora_rank else None


def attach(model: Llama, options: LladaOptions, *, dtype_name: str) -> None:
    """Freeze a model that has no memory yet, and give its matrices their additions."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module, name in _places(model, lora_targets(options.lora_targets)):
        setattr(module, name, LoraLinear(getattr(module, name), rank=options.lora_rank, alpha=_alpha(options)))
    stored = STORED.get(dtype_name)
    for parameter in model.parameters():
        if stored and parameter.ndim > 1 and not parameter.requires_grad:
            parameter.data = parameter.data.to(stored)


def _alpha(options: LladaOptions) -> float:
    return 2.0 * options.lora_rank if options.lora_alpha is None else options.lora_alpha


def _places(model: Llama, targets: tuple[str, ...]) -> Iterator[tuple[nn.Module, str]]:
    for block in model.layers:
        for target in targets:
            owner, _, name = LORA_MATRICES[target].partition(".")
            yield block.get_submodule(owner), name


@torch.no_grad()
def initialise_additions(model: nn.Module, *, seed: int) -> None:
    """A random, B zero; of a model in shards each rank fills its own."""
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_b"):
            local(parameter).zero_()
        elif name.endswith(".lora_a"):
            spread = 1 / math.sqrt(3 * parameter.shape[1])
            initialise.fill(local(parameter), seed=seed, name=name, std=spread, offset=flat_offset(parameter))


# --------------------------------------------------------------------------------------------- merging


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole fp32 weight of each parameter as a plain model has them. Of shards: all ranks must ask."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if name.endswith(ADDITIONS):
            continue
        weight = whole(parameter.detach())
        weight = weight if weight.dtype == torch.float64 else weight.float()
        owner = modules[name.rpartition(".")[0]]
        if isinstance(owner, LoraLinear) and name.endswith(".weight"):
            low, high = whole(owner.lora_a.detach()), whole(owner.lora_b.detach())
            weight = weight + (high @ low) * owner.scale
        yield name, weight


@torch.no_grad()
def merge(model: Llama) -> Llama:
    """The same function as a plain model in fp32, in the place of the given one."""
    weights = merged(model)
    for name, weight in weights:
        path, _, kind = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, kind, nn.Parameter(weight))
    for block in model.layers:
        for path in LORA_MATRICES.values():
            parent, _, name = path.partition(".")
            module = block.get_submodule(path)
            if isinstance(module, LoraLinear):
                setattr(block.get_submodule(parent), name, _plain(module))
    return model


def _plain(module: LoraLinear) -> nn.Linear:
    rows, width = module.weight.shape
    with torch.device("meta"):
        linear = nn.Linear(width, rows, bias=module.bias is not None)
    linear.weight, linear.bias = module.weight, module.bias
    return linear


# --------------------------------------------------------------------------------------------- the form of peft


def adapter_config(options: LladaOptions, shape: LlamaShape) -> dict[str, Any]:
    """What peft reads. The matrices as a pattern: in LLaDA's files the output matrix ends as one of a block does."""
    matrices = [LORA_MATRICES[target] for target in lora_targets(options.lora_targets)]
    first = [their_names(shape, f"layers.0.{matrix}.weight")[0].removesuffix(".weight") for matrix in matrices]
    before, _, _ = first[0].partition(".0.")
    inner = "|".join(re.escape(name.removeprefix(f"{before}.0.")) for name in first)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": options.model_path,
        "r": options.lora_rank,
        "lora_alpha": _alpha(options),
        "lora_dropout": 0.0,
        "target_modules": rf"{re.escape(before)}\.\d+\.({inner})",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def adapter_name(shape: LlamaShape, name: str) -> str:
    """layers.0.attention.wq.lora_a -> base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight."""
    path, _, kind = their_names(shape, name)[0].rpartition(".")
    return f"{PEFT_PREFIX}{path}.{PEFT_KINDS[kind]}"


def write_adapter(additions: Mapping[str, Tensor], options: LladaOptions, shape: LlamaShape, folder: Path) -> None:
    """A folder that peft loads onto the base model; all of it or nothing."""
    tensors = {adapter_name(shape, name): tensor.detach().cpu().contiguous() for name, tensor in additions.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError("exists and is not empty", where=str(folder), hint="another folder")
    try:
        with rundir.publishing(folder) as new:
            rundir.write_json(new / ADAPTER_CONFIG, adapter_config(options, shape))
            save_file(tensors, new / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        known = error if isinstance(error, OSError) else OSError(str(error))
        raise rundir.io_error(known, folder, doing="exporting the adapter") from error
