"""Sizes of models: found by name, in a folder or on the hub, by the kind the options ask for; and what they cost.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import ConfigError, NotFoundError
from lockstep.models import encoder_shapes, llama_shapes
from lockstep.models.encoder_shapes import EncoderShape
from lockstep.models.llama_shapes import LlamaShape, RopeScaling
from lockstep.models.reading import HF_DTYPES
from lockstep.registry import suggest

if TYPE_CHECKING:
    from lockstep.models.options import ModelOptions

__all__ = [
    "HF_DTYPES", "ITEM_BYTES", "KNOWN", "AnyShape", "EncoderShape", "LlamaShape", "Memory", "RopeScaling", "Shape",
    "chunk_tokens", "from_hf", "full_name", "known", "memory_bytes", "names", "resolve", "with_tokens",
]  # fmt: skip

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
DOCUMENTED_WEIGHTS = "mlm_model.pth"  # of the result folder of masked-LM
AnyShape = LlamaShape | EncoderShape
KNOWN: dict[str, AnyShape] = {**llama_shapes.KNOWN, **encoder_shapes.KNOWN}
READERS: dict[str, type[AnyShape]] = {
    "llama": LlamaShape,
    **dict.fromkeys(encoder_shapes.MODEL_TYPES.values(), EncoderShape),
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


def names(options: type[ModelOptions]) -> tuple[str, ...]:
    """The known shapes that these options can ask for."""
    kind = _kind(options)
    return tuple(name for name, shape in KNOWN.items() if isinstance(shape, kind))


def from_hf(tree: Mapping[str, Any], *, where: str = "config.json") -> AnyShape:
    """Read a config.json; refuses whatever the model would not compute exactly."""
    reader = READERS.get(str(tree.get("model_type")))
    if reader is None:
        raise ConfigError(
            f"model_type is {str(tree.get('model_type'))[:80]!r}, only {', '.join(READERS)} can be trained here",
            where=where,
            hint=f"model.model_path {suggest('', list(KNOWN))}",
        )
    return reader.from_hf(tree, where=where)


def resolve(options: ModelOptions, *, context_length: int, token: str | None = None) -> AnyShape:
    """The shape that `model.*` asks for: named, read from a folder or the hub; then overridden key by key."""
    from lockstep.models.options import EncoderOptions, LlamaOptions

    base = _base(options, token)
    shape: AnyShape | None = None
    if isinstance(options, LlamaOptions) and isinstance(base, LlamaShape):
        shape = llama_shapes.overridden(options, base, context_length=context_length)
    elif isinstance(options, EncoderOptions) and isinstance(base, EncoderShape):
        shape = encoder_shapes.overridden(options, base, context_length=context_length)
    if shape is None:
        raise ConfigError(
            f"{options.model_path!r} is of type {base.model_type!r}: another family trains it",
            where="model.model_path",
            hint=suggest("", list(names(type(options)))),
        )
    if options.init != "random":
        _check_pretrained(options, base, shape)
    return shape


def with_tokens(shape: AnyShape, *, separator: int, specials: Mapping[str, int]) -> AnyShape:
    """The same with the ids of the tokenizer it was trained with, for those who will use it."""
    if isinstance(shape, LlamaShape):
        return replace(shape, eos=(separator,))
    return replace(shape, pad=specials.get("pad"), bos=specials.get("cls"), eos=(specials.get("sep", separator),))


def _kind(options: type[ModelOptions]) -> type[AnyShape]:
    from lockstep.models.options import EncoderOptions

    return EncoderShape if issubclass(options, EncoderOptions) else LlamaShape


def _check_pretrained(options: ModelOptions, base: AnyShape, shape: AnyShape) -> None:
    """Weights that exist have the sizes they have; our own shapes have none."""
    path = options.model_path
    if full_name(path).startswith("lockstep/") and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"{path!r} is a shape without weights",
            where="model.init",
            hint="model.init=random, or model.model_path=FOLDER with weights",
        )
    for name in (field.name for field in fields(shape) if field.name not in shape.free_sizes):
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
    folder = Path(model_path).expanduser()
    if (folder / CONFIG_FILE).is_file():
        say_what_is_not_run(model_path, folder / CONFIG_FILE)
        return from_hf(read_json(folder / CONFIG_FILE), where=str(folder / CONFIG_FILE))
    if (shape := known(model_path)) is not None:
        return shape
    if (folder / DOCUMENTED_WEIGHTS).is_file():
        from lockstep.models import microbert

        return microbert.shape_of(folder / DOCUMENTED_WEIGHTS, heads=options.num_attention_heads)
    if folder.is_dir():
        raise NotFoundError(f"the folder has neither {CONFIG_FILE} nor {DOCUMENTED_WEIGHTS}", where=model_path)
    if folder.is_file():
        raise NotFoundError(f"{model_path!r} is a file", where="model.model_path", hint=f"{folder.parent}, its folder")
    if not looks_like_id(model_path):
        raise NotFoundError(
            f"no model {model_path!r}: not a known shape, not a folder",
            where="model.model_path",
            hint=suggest(model_path, list(names(type(options)))),
        )
    return from_hf(read_json(download(model_path, CONFIG_FILE, token=token)), where=model_path)


# --------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """An estimate of what one GPU must hold, in bytes, by cause."""

    weights: int
    gradients: int
    moments: int  # AdamW
    copies: int  # of the weights in half precision, made by autocast
    activations: int  # kept for the backward pass
    head: int  # logits of one chunk and their gradient

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> int:
        return self.states + self.copies + self.activations + self.head


def memory_bytes(
    shape: Shape, *, batch_size: int, context_length: int, dtype_name: str, checkpointing: bool, compiled: bool
) -> Memory:
    """Memory of training with AdamW over fp32 weights: 16 bytes a parameter, and what a micro-batch leaves behind."""
    count, tokens, item = shape.parameters(), batch_size * context_length, ITEM_BYTES[dtype_name]
    layer, word = tokens * shape.layer_activation_bytes(item, compiled=compiled), max(4, item)
    residual = tokens * shape.hidden_size * item
    kept = shape.num_layers * residual + layer if checkpointing else shape.num_layers * layer
    chunk = min(shape.head_tokens(tokens), chunk_tokens(shape.vocab_size))
    return Memory(
        weights=word * count,
        gradients=word * count,
        moments=2 * word * count,
        copies=0 if item >= 4 else item * shape.matmul_parameters(),
        activations=kept + 3 * residual,
        head=chunk * shape.vocab_size * (2 * word + item),
    )


def chunk_tokens(vocab_size: int) -> int:
    """How many tokens' logits exist at once: 2048 for large vocabularies, more for small ones."""
    return max(2048, (1 << 25) // vocab_size)
