"""Sizes of LLaMA models: the ones known by name, the ones in a config.json, and what they cost. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.errors import ConfigError, NotFoundError
from lockstep.registry import suggest

if TYPE_CHECKING:
    from lockstep.models.options import LlamaOptions

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
HF_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class RopeScaling:
    """The llama3 rule: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low: float
    high: float
    original: int  # tokens of context before the scaling


@dataclass(frozen=True)
class LlamaShape:
    """Every number that decides the tensors and the maths of a LLaMA."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tied: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def parameters(self) -> int:
        """How many numbers are trained."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embedding = self.vocab_size * self.hidden_size
        return self.num_layers * self._layer_matmul() + norms + embedding * (1 if self.tied else 2)

    def matmul_parameters(self) -> int:
        """Those that multiply a token: all but the norms and the look-up; the head counts also when tied."""
        return self.num_layers * self._layer_matmul() + self.vocab_size * self.hidden_size

    def flops_per_token(self, context_length: int) -> float:
        """Forward and backward, causality not discounted: 6 N_matmul + 12 L d_attention T (as PaLM, torchtitan)."""
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * context_length
        return float(6 * self.matmul_parameters() + attention)

    def _layer_matmul(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def to_hf(self, *, dtype_name: str = "fp32") -> dict[str, Any]:
        """The config.json of transformers; rotary settings in the spelling of version 4 and of version 5."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if (scaling := self.rope_scaling) is not None:
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original,
            }
        eos = None if not self.eos else self.eos[0] if len(self.eos) == 1 else list(self.eos)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope if scaling is not None else None,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.bos,
            "eos_token_id": eos,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "use_cache": True,
            "dtype": HF_DTYPES[dtype_name],
            "torch_dtype": HF_DTYPES[dtype_name],
        }

    @classmethod
    def from_hf(cls, tree: Mapping[str, Any], *, where: str = "config.json") -> LlamaShape:
        """Read such a config.json; refuses whatever this model would not compute exactly."""
        if tree.get("model_type") != "llama":
            raise ConfigError(
                f"model_type is {tree.get('model_type')!r}, only 'llama' can be trained here",
                where=where,
                hint=f"model.model_path {suggest('', list(KNOWN))}",
            )
        for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if tree.get(key, allowed) != allowed:
                raise ConfigError(f"{key} is {tree[key]!r}, this model has {allowed!r}", where=where)
        read = _Reader(tree, where)
        rope, theta = _read_rope(tree, where)
        heads, hidden = read.whole("num_attention_heads"), read.whole("hidden_size")
        eos = tree.get("eos_token_id")
        return cls(
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.whole("intermediate_size"),
            num_layers=read.whole("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=read.whole("num_key_value_heads", heads),
            head_dim=read.whole("head_dim", hidden // heads),
            max_position_embeddings=read.whole("max_position_embeddings", 2048),
            rope_theta=theta,
            rope_scaling=rope,
            rms_norm_eps=read.real("rms_norm_eps", 1e-6),
            tied=tree.get("tie_word_embeddings", False) is True,
            bos=tree["bos_token_id"] if isinstance(tree.get("bos_token_id"), int) else None,
            eos=tuple(i for i in cast("list[Any]", eos if isinstance(eos, list) else [eos]) if isinstance(i, int)),
        )


class _Reader:
    """Numbers of a JSON object, or an error that names the key."""

    def __init__(self, tree: Mapping[str, Any], where: str) -> None:
        self.tree = tree
        self.where = where

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.tree.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 40:
            raise ConfigError(f"{key}: expected a positive whole number, got {str(value)[:80]}", where=self.where)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.tree.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{key}: expected a positive number, got {str(value)[:80]}", where=self.where)
        return float(value)


def _read_rope(tree: Mapping[str, Any], where: str) -> tuple[RopeScaling | None, float]:
    """Scaling and theta, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""
    found: object = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ConfigError("rope_parameters: expected an object", where=where)
    inner = cast("Mapping[str, Any]", found)
    theta = _Reader({"rope_theta": inner.get("rope_theta", tree.get("rope_theta"))}, where).real("rope_theta", 1e4)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if inner.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", "llama3"):
        raise ConfigError(f"rotary positions of type {kind!r} are not supported", where=where)
    if kind == "default":
        return None, theta
    read = _Reader(inner, where)
    scaling = RopeScaling(
        factor=read.real("factor"),
        low=read.real("low_freq_factor"),
        high=read.real("high_freq_factor"),
        original=read.whole("original_max_position_embeddings"),
    )
    if scaling.high <= scaling.low:
        raise ConfigError("high_freq_factor must be above low_freq_factor", where=where)
    return scaling, theta


# --------------------------------------------------------------------------------------------- known by name

_LLAMA31 = RopeScaling(8.0, 1.0, 4.0, 8192)
_LLAMA32 = replace(_LLAMA31, factor=32.0)
_INSTRUCT_EOS = (128001, 128008, 128009)
_8B = LlamaShape(128256, 4096, 14336, 32, 32, 8, 128, 131072, 500000.0, _LLAMA31, 1e-5, False, 128000, (128001,))
_1B = LlamaShape(128256, 2048, 8192, 16, 32, 8, 64, 131072, 500000.0, _LLAMA32, 1e-5, True, 128000, (128001,))
_3B = replace(_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128)
_TINYLLAMA = LlamaShape(32000, 2048, 5632, 22, 32, 4, 64, 2048, 10000.0, None, 1e-5, False, 1, (2,))

KNOWN: dict[str, LlamaShape] = {
    "meta-llama/Llama-3.1-8B": _8B,
    "meta-llama/Llama-3.1-8B-Instruct": replace(_8B, eos=_INSTRUCT_EOS),
    "meta-llama/Llama-3.2-1B": _1B,
    "meta-llama/Llama-3.2-1B-Instruct": replace(_1B, eos=_INSTRUCT_EOS),
    "meta-llama/Llama-3.2-3B": _3B,
    "meta-llama/Llama-3.2-3B-Instruct": replace(_3B, eos=_INSTRUCT_EOS),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _TINYLLAMA,
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": _TINYLLAMA,
    "TinyLlama/TinyLlama_v1.1": _TINYLLAMA,
    "lockstep/tiny": LlamaShape(512, 64, 176, 2, 4, 2, 16, 2048, 10000.0),
    "lockstep/demo": LlamaShape(2048, 128, 344, 4, 4, 2, 32, 2048, 10000.0, tied=True),
    "lockstep/small": LlamaShape(8192, 512, 1376, 8, 8, 4, 64, 4096, 10000.0, tied=True),
    "lockstep/base": LlamaShape(32768, 768, 2048, 12, 12, 4, 64, 8192, 10000.0, tied=True),
}


def known(name: str) -> LlamaShape | None:
    """The shape of that name, in any case, with or without its owner."""
    return KNOWN.get(_full_name(name))


def _full_name(name: str) -> str:
    """The name as it stands in KNOWN, or ''."""
    wanted = name.lower()
    return next((full for full in KNOWN if wanted in (full.lower(), full.lower().partition("/")[2])), "")


def resolve(options: LlamaOptions, *, context_length: int, token: str | None = None) -> LlamaShape:
    """The shape that `model.*` asks for: named, read from a folder or the hub; then overridden key by key."""
    base = _base(options.model_path, token)
    sizes = {
        "hidden_size": options.hidden_size,
        "num_heads": options.num_attention_heads,
        "num_kv_heads": options.num_key_value_heads,
        "head_dim": options.head_dim,
        "intermediate_size": options.intermediate_size,
        "vocab_size": options.vocab_size,
        "max_position_embeddings": options.max_position_embeddings,
        "rope_theta": options.rope_theta,
        "tied": options.tie_word_embeddings,
    }
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if "head_dim" not in given and ("hidden_size" in given or "num_heads" in given):
        given["head_dim"] = _divided(given.get("hidden_size", base.hidden_size), given.get("num_heads", base.num_heads))
    if options.rope_scaling == "none":
        given["rope_scaling"] = None
    shape = replace(base, num_layers=options.num_layers, **given)
    _check(shape, context_length)
    if shape.tied and options.head_init_std is not None:
        raise ConfigError("a tied model has no output matrix of its own", where="model.head_init_std", hint="null")
    if options.init != "random":
        _check_pretrained(options, base, shape)
    return shape


def _divided(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ConfigError(
            f"{num_heads} heads do not divide hidden_size {hidden_size}",
            where="model.num_attention_heads",
            hint="a divisor, or set model.head_dim",
        )
    return hidden_size // num_heads


def _check(shape: LlamaShape, context_length: int) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{shape.num_kv_heads} grouped-query heads do not divide {shape.num_heads} query heads",
            where="model.num_key_value_heads",
            hint=f"a divisor of {shape.num_heads}",
        )
    if shape.head_dim % 2:
        raise ConfigError(f"head_dim {shape.head_dim} is odd: rotary positions turn pairs", where="model.head_dim")
    if context_length > shape.max_position_embeddings:
        raise ConfigError(
            f"context_length {context_length} is above the model's {shape.max_position_embeddings} positions",
            where="training.context_length",
            hint=f"at most {shape.max_position_embeddings}, or raise model.max_position_embeddings",
        )


def _check_pretrained(options: LlamaOptions, base: LlamaShape, shape: LlamaShape) -> None:
    """Weights that exist have the sizes they have; our own shapes have none."""
    path = options.model_path
    if _full_name(path).startswith("lockstep/") and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"{path!r} is a shape without weights",
            where="model.init",
            hint="model.init=random, or model.model_path=FOLDER with weights",
        )
    free = {"num_layers", "max_position_embeddings", "rope_theta", "rope_scaling"}
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


def _base(model_path: str, token: str | None) -> LlamaShape:
    from lockstep.runtime.hub import CONFIG_FILE, download, looks_like_id, read_json, say_what_is_not_run

    folder = Path(model_path).expanduser()
    if (folder / CONFIG_FILE).is_file():
        say_what_is_not_run(model_path, folder / CONFIG_FILE)
        return LlamaShape.from_hf(read_json(folder / CONFIG_FILE), where=str(folder / CONFIG_FILE))
    if (shape := known(model_path)) is not None:
        return shape
    if folder.is_dir():
        raise NotFoundError("the folder has no config.json", where=model_path)
    if not looks_like_id(model_path):
        raise NotFoundError(
            f"no model {model_path!r}: not a known shape, not a folder",
            where="model.model_path",
            hint=suggest(model_path, list(KNOWN)),
        )
    return LlamaShape.from_hf(read_json(download(model_path, CONFIG_FILE, token=token)), where=model_path)


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
    shape: LlamaShape, *, batch_size: int, context_length: int, dtype_name: str, checkpointing: bool, compiled: bool
) -> Memory:
    """Memory of training with AdamW over fp32 weights: 16 bytes a parameter, and what a micro-batch leaves behind."""
    count, tokens, item = shape.parameters(), batch_size * context_length, ITEM_BYTES[dtype_name]
    layer, word = tokens * _layer_activation_bytes(shape, item, compiled), max(4, item)
    residual = tokens * shape.hidden_size * item
    kept = shape.num_layers * residual + layer if checkpointing else shape.num_layers * layer
    chunk = min(tokens, chunk_tokens(shape.vocab_size))
    return Memory(
        weights=word * count,
        gradients=word * count,
        moments=2 * word * count,
        copies=0 if item >= 4 else item * shape.matmul_parameters(),
        activations=kept + 3 * residual,
        head=chunk * shape.vocab_size * (2 * word + item),
    )


def _layer_activation_bytes(shape: LlamaShape, item: int, compiled: bool) -> int:
    """What one layer keeps per token. Compiled: the compiler recomputes norms and SwiGLU."""
    width, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if compiled:
        return item * (3 * width + 2 * query + 2 * key + 2 * shape.intermediate_size)
    norms = 6 * width * item if item >= 4 else 2 * width * (4 + 3 * item)  # eager norms keep an fp32 copy too
    return norms + item * (2 * query + 2 * key + 4 * shape.intermediate_size)


def chunk_tokens(vocab_size: int) -> int:
    """How many tokens' logits exist at once: 2048 for large vocabularies, more for small ones."""
    return max(2048, (1 << 25) // vocab_size)
