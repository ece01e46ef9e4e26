"""From options and a shape to a model with weights, on its device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.kernels import products
from lockstep.models import attention, float8, hf, initialise, lora, microbert
from lockstep.models.agent import Agent
from lockstep.models.encoder import Encoder
from lockstep.models.llama import Llama
from lockstep.models.options import DecoderOptions, ModelOptions
from lockstep.models.shapes import DOCUMENTED_WEIGHTS, AgentShape, AnyShape, EncoderShape, LlamaShape, full_name
from lockstep.runtime import hub, precision

Model = Llama | Encoder | Agent
VARIANTS = 32
NAMING_CALLS = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")  # by sdpa_kernel
PRECISIONS = set[str]()  # of the compiled models of this process


@dataclass(frozen=True)
class Kernels:
    """What the checkpoint to go on from was computed with: `auto` keeps it. Earlier versions chose by timing."""

    attention: str
    compiled: bool


@dataclass(frozen=True)
class Built:
    """A model ready to train, and what its user should hear about it."""

    model: Model
    notices: tuple[str, ...]
    attention: str
    compiled: bool


def build(  # noqa: PLR0913 - everything a model depends on, by name
    options: ModelOptions,
    shape: AnyShape,
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
    before: Kernels | None = None,
) -> Built:
    """The model that `options` describe: laid out without memory, compiled block by block, given memory, filled.

    `shard` cuts it before it gets any memory: a rank never holds more than its part. `before`: what a run that goes on
    was computed with.
    """
    drops = isinstance(shape, AgentShape) and shape.attention_dropout > 0
    kernel, attention_notice = _attention(
        options.attention_backend,
        before.attention if before else "",
        use_flash=options.use_flash_attention,
        device_type=device.type,
        deterministic=deterministic,
        documents_apart=documents_apart,
        dtype_name=precision.without_float8(dtype_name),
        head_dim=shape.head_dim,
        windowed=isinstance(shape, EncoderShape) and any(shape.window(layer) for layer in range(shape.num_layers)),
        drops=drops,
    )
    if kernel in attention.NO_DROPOUT and drops:
        attention_notice += "; native_math in training, for model.attention_dropout"
    compiled, compile_notice = options.compiles(on_gpu=device.type == "cuda", debug=debug), ""
    if options.compile == "auto" and before and before.compiled != compiled:
        compiled = before.compiled
        compile_notice = f"compile: {'on' if compiled else 'off'} (auto; as in the checkpoint)"
    model, float8_notice = _blank(options, shape, attention=kernel, dtype_name=dtype_name, checkpointing=checkpointing)
    if float8_notice and not compiled:
        float8_notice += "; slow, because nothing is compiled"
    if compiled:
        keep_traces(dtype_name)
        compile_blocks(model, device, sharded=shard is not None)
    if shard is not None:
        shard(model)
    give_memory(model, device, sharded=shard is not None)
    model.rebuild_buffers()
    weights_notice = _fill(model, options, seed=seed, token=token)
    if added := lora.wanted(options):
        lora.initialise_additions(model, seed=seed)
        weights_notice += f", frozen; additions of rank {added.lora_rank} learn"
        if options.init == "random":
            weights_notice += ": to nothing that is known yet (model.init=pretrained)"
    notices = (*shape.notices(), float8_notice, weights_notice, attention_notice, compile_notice)
    return Built(model, tuple(filter(None, notices)), kernel, compiled)


def _attention(backend: str, before: str, **facts: Any) -> tuple[str, str]:
    """attention.resolve; `auto` keeps the kernel of the checkpoint to go on from, where that still runs."""
    by_rule = attention.resolve(backend, **facts)
    if backend == "auto" and before in attention.BY_AUTO and before != by_rule[0]:
        with contextlib.suppress(ConfigError):
            kernel, _ = attention.resolve(before, **facts)
            return kernel, f"attention: {kernel} (auto; as in the checkpoint)"
    return by_rule


def _blank(
    options: ModelOptions, shape: AnyShape, *, attention: str, dtype_name: str, checkpointing: bool
) -> tuple[Model, str]:
    """A model that has no memory yet, with the layers that its precision and its additions ask for; words on float8."""
    with torch.device("meta"):
        model = lay_out(shape, attention=attention, dropout=options.dropout, checkpointing=checkpointing)
    if dtype_name == "fp64":
        model.double()
    notice = float8.convert(model) if dtype_name == "fp8" else ""
    added = lora.wanted(options)
    if added and isinstance(model, Llama):
        lora.attach(model, added, dtype_name=precision.without_float8(dtype_name))
    return model, notice


def give_memory(model: nn.Module, device: torch.device, *, sharded: bool) -> None:
    """What `to_empty` does; where nothing lies in shards without importing SymPy, for seconds, to copy strides."""
    if sharded:
        model.to_empty(device=device)
    else:
        model._apply(lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=device))


def keep_traces(dtype_name: str) -> None:
    """Let the compiler's cache hold what it has traced of blocks that name their attention kernel, for the next run.

    The names stand in the graph, which is the key, as calls that torch does not list as safe (pytorch issue 194007):
    every run would trace forward and backward anew. Into the key goes the precision too, which some versions forget.
    As blocks compile when they first run, it is known only where a process has models of one: else nothing is kept.
    """
    import torch._inductor.config as inductor

    PRECISIONS.add(dtype_name)
    marked = {name: key for name, key in inductor.unsafe_marked_cacheable_functions.items() if name not in NAMING_CALLS}
    if len(PRECISIONS) == 1:
        marked |= dict.fromkeys(NAMING_CALLS, f"{torch.__version__} {dtype_name}")
    inductor.unsafe_marked_cacheable_functions = marked


def compile_blocks(model: Model, device: torch.device, *, sharded: bool, **how: Any) -> None:
    """In place, for that device. Equal blocks compile once, and the loop over them stays Python.

    Blocks of one class may differ by norm and window, each trained and evaluated, with and without documents apart:
    more variants of one function than the compiler allows by itself, and it fails where it should give up.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    functorch.force_non_lazy_backward_lowering = True  # a GPU's thread, which makes it later, has settings of its own
    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    if products.is_for(device):
        from lockstep.kernels import graph_pass

        graph_pass.install()
    if isinstance(model, Agent):
        how.setdefault("dynamic", False)  # all regions but the last are equally long: two lengths, each as it is
    torch.compiler.set_stance("default")  # masked diffusion that was trained here before may have left another
    for block in model.layers:
        if not sharded:
            block.compile(fullgraph=True, **how)
        else:  # the forward alone: what gathers the shards around it cannot be compiled
            block.forward = torch.compile(block.forward, fullgraph=True, **how)
    if model.norm is not None and not sharded:
        model.norm.compile(fullgraph=True, **how)  # between the last block and the head: one kernel instead of six
    if isinstance(model, Agent) and not sharded:
        model.tok_embed.compile(fullgraph=True, **how)  # narrow blocks take no longer than eager look-ups before them


def forget_compiled() -> None:
    """What the compiler has learnt in this process: sizes that it takes for variable, kernels that it keeps."""
    if "torch._dynamo" in sys.modules:  # it takes seconds to load, and has learnt nothing before
        torch.compiler.reset()
        torch.compiler.set_stance("default")  # masked diffusion leaves another


def lay_out(shape: AnyShape, *, attention: str, dropout: float = 0.0, checkpointing: bool = False) -> Model:
    """The model of a shape, its weights not filled yet."""
    if isinstance(shape, LlamaShape):
        return Llama(shape, attention=attention, dropout=dropout, checkpointing=checkpointing)
    if isinstance(shape, AgentShape):
        return Agent(shape, attention=attention, dropout=dropout, checkpointing=checkpointing)
    return Encoder(shape, attention=attention, dropout=dropout, checkpointing=checkpointing)


def _fill(model: Model, options: ModelOptions, *, seed: int, token: str | None) -> str:
    if options.init == "random":
        initialise.initialise(
            model,
            seed=seed,
            std=options.init_std,
            head_std=options.head_init_std,
            depth_scaled=isinstance(options, DecoderOptions) and options.depth_scaled_init,
        )
        return f"weights: random, seed {seed}, standard deviation {options.init_std:g}"
    folder = hub.weights_folder(full_name(options.model_path), token=token)
    truncated, documented = options.init == "pretrained-truncated", folder / DOCUMENTED_WEIGHTS
    if isinstance(model, Encoder) and documented.is_file() and not (folder / hub.CONFIG_FILE).is_file():
        microbert.load_seed(model, microbert.read(documented), where=str(documented), truncated=truncated)
        new = 0
    else:
        new = hf.import_weights(model, folder, truncated=truncated)
    grown = f"; {new} new rows of the vocabulary begin as the mean of the others" if new else ""
    if truncated:
        kept = model.shape.num_layers
        return (
            f"weights: pretrained-truncated, the first {kept} layers of {folder}: not a language model any more{grown}"
        )
    return f"weights: pretrained, {folder}{grown}"
