"""Sizes of models: found by name, in a folder or on the hub, by the kind the options ask for; and what they cost.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import ConfigError, NotFoundError
from lockstep.models import agent_shapes, encoder_shapes, llada_shapes, llama_shapes
from lockstep.models.agent_shapes import AgentShape
from lockstep.models.encoder_shapes import EncoderShape
from lockstep.models.llama_shapes import LlamaShape, RopeScaling
from lockstep.models.memory import ITEM_BYTES, Lora, Memory, check_lora, chunk_tokens, memory_bytes
from lockstep.models.reading import HF_DTYPES
from lockstep.registry import suggest
from lockstep.rundir import expanded

if TYPE_CHECKING:
    from lockstep.models.options import ModelOptions

__all__ = [
    "HF_DTYPES", "ITEM_BYTES", "KNOWN", "AgentShape", "AnyShape", "EncoderShape", "LlamaShape", "Lora", "Memory",
    "RopeScaling", "Shape", "chunk_tokens", "from_hf", "full_name", "is_own", "known", "memory_bytes",
    "names", "resolve", "with_tokens",
]  # fmt: skip

OWN = "lockstep/"  # names of shapes here, never of the hub
DOCUMENTED_WEIGHTS = "mlm_model.pth"  # of the result folder of masked-LM
ADAPTER_CONFIG = "adapter_config.json"  # of the peft package
AnyShape = LlamaShape | EncoderShape | AgentShape
KNOWN: dict[str, AnyShape] = {**llama_shapes.KNOWN, **llada_shapes.KNOWN, **encoder_shapes.KNOWN, **agent_shapes.KNOWN}
READERS: dict[str, Callable[..., AnyShape]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), LlamaShape.from_hf),
    "llada": llada_shapes.from_hf,
    **dict.fromkeys(encoder_shapes.MODEL_TYPES.values(), EncoderShape.from_hf),
    agent_shapes.MODEL_TYPE: AgentShape.from_hf,
}


class Shape(Protocol):
    """What the engine asks of the numbers that decide a model."""

    @property
    def model_type(self) -> str: ...  # of its config.json
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> tuple[int, ...]: ...

    def parameters(self) -> int:
        """How many numbers are trained."""
        ...

    def matmul_parameters(self) -> int:
        """Those that multiply a token."""
        ...

    def flops_per_token(self, context_length: int) -> float:
        """Forward and backward."""
        ...

    def layer_activation_bytes(self, item: int, *, compiled: bool) -> int:
        """What one layer keeps for the backward pass, per token."""
        ...

    def head_tokens(self, tokens: int) -> int:
        """How many of a micro-batch's tokens have logits."""
        ...

    def first_loss(self, std: float) -> float:
        """Of random weights, with an output matrix of that standard deviation."""
        ...

    def notices(self) -> tuple[str, ...]:
        """What its user should hear about these sizes."""
        ...

    def to_hf(self, *, dtype_name: str = "fp32") -> dict[str, Any]:
        """The config.json of transformers."""
        ...


def known(name: str) -> AnyShape | None:
    """The shape of that name, in any case, with or without its owner."""
    return KNOWN.get(full_name(name))


def full_name(name: str) -> str:
    """With the owner and the spelling of the known shape of that name; any other name as it is."""
    wanted = name.lower()
    return next((full for full in KNOWN if wanted in (full.lower(), full.lower().partition("/")[2])), name)


def is_own(name: str) -> bool:
    """Whether a name is one of ours, or meant to be."""
    return full_name(name).lower().startswith(OWN)


def names(options: type[ModelOptions]) -> tuple[str, ...]:
    """The known shapes that these options can ask for."""
    from lockstep.models.options import AgentOptions, EncoderOptions, LladaOptions

    if issubclass(options, EncoderOptions | AgentOptions):
        return tuple(encoder_shapes.KNOWN if issubclass(options, EncoderOptions) else agent_shapes.KNOWN)
    return tuple(llada_shapes.KNOWN if issubclass(options, LladaOptions) else llama_shapes.KNOWN)


def from_hf(tree: Mapping[str, Any], *, where: str = "config.json") -> AnyShape:
    """Read a config.json; refuses whatever the model would not compute exactly."""
    reader = READERS.get(str(tree.get("model_type")))
    if reader is None:
        raise ConfigError(
            f"model_type is {str(tree.get('model_type'))[:80]!r}, only {', '.join(READERS)} can be trained here",
            where=where,
            hint=f"model.model_path {suggest('', list(KNOWN))}",
        )
    return reader(tree, where=where)


def resolve(options: ModelOptions, *, context_length: int, token: str | None = None) -> AnyShape:
    """The shape that `model.*` asks for: named, read from a folder or the hub; then overridden key by key."""
    from lockstep.models.options import AgentOptions, EncoderOptions, LladaOptions, LlamaOptions

    base = _base(options, token)
    shape: AnyShape | None = None
    fits = isinstance(options, LladaOptions) or base.model_type == "llama"  # of the others each is a family's own
    if isinstance(options, LlamaOptions | LladaOptions) and isinstance(base, LlamaShape) and fits:
        shape = llama_shapes.overridden(options, base, context_length=context_length)
        check_lora(Lora.of(options), shape)
    elif isinstance(options, EncoderOptions) and isinstance(base, EncoderShape):
        shape = encoder_shapes.overridden(options, base, context_length=context_length)
    elif isinstance(options, AgentOptions) and isinstance(base, AgentShape):
        shape = agent_shapes.overridden(options, base, context_length=context_length)
    if shape is None:
        raise ConfigError(
            f"{options.model_path!r} is of type {base.model_type!r}: another family trains it",
            where="model.model_path",
            hint=suggest("", list(names(type(options)))),
        )
    if options.init != "random":
        _check_pretrained(options, base, shape)
    return shape


def with_tokens(shape: AnyShape, *, separator: int, specials: Mapping[str, int], mask: int | None = None) -> AnyShape:
    """The same with the ids of the tokenizer it was trained with, for its users; `mask` is the objective's."""
    if isinstance(shape, AgentShape):
        return shape
    if isinstance(shape, EncoderShape):
        return replace(shape, pad=specials.get("pad"), bos=specials.get("cls"), eos=(specials.get("sep", separator),))
    if shape.layout != "llada":
        return replace(shape, eos=(separator,))
    return replace(shape, eos=(separator,), mask=specials.get("mask", shape.mask) if mask is None else mask)


def _check_pretrained(options: ModelOptions, base: AnyShape, shape: AnyShape) -> None:
    """Weights that exist have the sizes they have; our own shapes have none.

    A LLaDA that begins with weights of another kind may need one row more than they have: for the mask.
    """
    from lockstep.models.options import LladaOptions

    path = options.model_path
    if is_own(path) and not expanded(path).is_dir():
        raise ConfigError(
            f"{path!r} is a shape without weights",
            where="model.init",
            hint="model.init=random, or model.model_path=FOLDER with weights",
        )
    grown = isinstance(options, LladaOptions) and shape.vocab_size > base.vocab_size
    free = {*shape.free_sizes, *(("vocab_size",) if grown else ())}
    for name in (field.name for field in fields(shape) if field.name not in free):
        if getattr(shape, name) != getattr(base, name):
            raise ConfigError(
                f"{name} {getattr(shape, name)} differs from the pretrained weights' {getattr(base, name)}",
                where="model.init",
                hint="leave the size out, or model.init random",
            )
    if options.init == "pretrained" and shape.num_layers != base.num_layers:
        raise ConfigError(
            f"num_layers {shape.num_layers}, but the pretrained model has {base.num_layers}",
            where="model.num_layers",
            hint="model.init pretrained-truncated keeps the first layers only",
        )
    if shape.num_layers > base.num_layers:
        raise ConfigError(
            f"num_layers {shape.num_layers} is above the pretrained model's {base.num_layers}", where="model.num_layers"
        )


def _base(options: ModelOptions, token: str | None) -> AnyShape:
    from lockstep.runtime.hub import CONFIG_FILE, download, looks_like_id, read_json, say_what_is_not_run

    model_path = options.model_path
    folder = expanded(model_path, where="model.model_path")
    if (folder / CONFIG_FILE).is_file():
        say_what_is_not_run(model_path, folder / CONFIG_FILE)
        return from_hf(read_json(folder / CONFIG_FILE), where=str(folder / CONFIG_FILE))
    if (shape := known(model_path)) is not None:
        return shape
    if (folder / DOCUMENTED_WEIGHTS).is_file():
        from lockstep.models import microbert

        return microbert.shape_of(folder / DOCUMENTED_WEIGHTS, heads=options.num_attention_heads)
    if folder.is_dir():
        is_adapter = (folder / ADAPTER_CONFIG).is_file()
        raise NotFoundError(
            f"the folder has neither {CONFIG_FILE} nor {DOCUMENTED_WEIGHTS}",
            where=model_path,
            hint="an adapter is no model: lockstep export RUN --to hf writes both as one" if is_adapter else "",
        )
    if folder.is_file():
        raise NotFoundError(f"{model_path!r} is a file", where="model.model_path", hint=f"{folder.parent}, its folder")
    if is_own(model_path) or not looks_like_id(model_path):
        raise NotFoundError(
            f"no model {model_path!r}: not a known shape, not a folder",
            where="model.model_path",
            hint=suggest(model_path, list(names(type(options)))),
        )
    return from_hf(read_json(download(model_path, CONFIG_FILE, token=token)), where=model_path)
