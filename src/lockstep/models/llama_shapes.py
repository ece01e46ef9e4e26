"""Sizes of LLaMA models: the ones known by name, the ones in a config.json. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lockstep.errors import ConfigError
from lockstep.models.reading import HF_DTYPES, Reader, check_context, divided, one_or_all

if TYPE_CHECKING:
    from lockstep.models.options import LladaOptions, LlamaOptions


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

    free_sizes: ClassVar[frozenset[str]] = frozenset(  # that weights do not depend on
        {"num_layers", "max_position_embeddings", "rope_theta", "rope_scaling", "layout", "bidirectional", "mask"}
    )

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
    layout: str = "llama"  # whose names and config.json its files have: llama, llada, qwen2, qwen3
    bidirectional: bool = False
    mask: int | None = None  # the id that hides a token, of those that have one
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head, before they are turned

    @property
    def model_type(self) -> str:
        return self.layout

    def parameters(self) -> int:
        """How many numbers are trained."""
        norms = (2 * self.num_layers + 1) * self.hidden_size + self.num_layers * self._layer_small()
        embedding = self.vocab_size * self.hidden_size
        return self.num_layers * self._layer_matmul() + norms + embedding * (1 if self.tied else 2)

    def matmul_parameters(self) -> int:
        """Those that multiply a token: all but the norms and the look-up; the head counts also when tied."""
        return self.num_layers * self._layer_matmul() + self.vocab_size * self.hidden_size

    def flops_per_token(self, context_length: int) -> float:
        """Forward and backward, causality not discounted: 6 N_matmul + 12 L d_attention T (as PaLM, torchtitan).

        Looking both ways means diffusion, which has logits of the hidden tokens alone: half of all on average.
        """
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * context_length
        skipped = self.vocab_size * self.hidden_size / 2 if self.bidirectional else 0
        return float(6 * (self.matmul_parameters() - skipped) + attention)

    def _layer_matmul(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    def _layer_small(self) -> int:
        """Biases, and norms of the heads."""
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        return biases + (2 * self.head_dim if self.qk_norm else 0)

    def layer_activation_bytes(self, item: int, *, compiled: bool) -> int:
        """What one layer keeps per token. Compiled: what comes out of norms, and no SwiGLU, which is made again.

        Looking both ways changes nothing: no kernel keeps the scores.
        """
        width, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        normed = query + key if self.qk_norm else 0
        if compiled:
            return item * (4 * width + 2 * query + 2 * key + 2 * self.intermediate_size + normed)
        norms = 6 * width * item if item >= 4 else 2 * width * (4 + 3 * item)  # eager norms keep an fp32 copy too
        norms += normed * (2 * item if item >= 4 else 4 + item)  # what comes out of them is turned, and not kept
        return norms + item * (2 * query + 2 * key + 4 * self.intermediate_size)

    def head_tokens(self, tokens: int) -> int:
        """How many of a micro-batch's tokens have logits: all."""
        return tokens

    def first_loss(self, std: float) -> float:
        """Of random weights: after the last norm |h| is sqrt(d), so each logit has the spread std sqrt(d)."""
        return math.log(self.vocab_size) + self.hidden_size * std**2 / 2

    def notices(self) -> tuple[str, ...]:
        """What its user should hear about these sizes."""
        return ()

    def to_hf(self, *, dtype_name: str = "fp32") -> dict[str, Any]:
        """The config.json of transformers; rotary settings in the spelling of version 4 and of version 5."""
        if self.layout == "llada":
            from lockstep.models import llada_shapes  # which is made of LlamaShapes

            return llada_shapes.to_hf(self, dtype_name=dtype_name)
        rope = {"rope_type": "default"} if self.rope_scaling is None else written_rope(self.rope_scaling)
        return {
            "architectures": [ARCHITECTURES[self.layout]],
            "model_type": self.layout,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope if self.rope_scaling is not None else None,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.bos,
            "eos_token_id": one_or_all(self.eos),
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            **FIXED[self.layout],
            **({"pretraining_tp": 1} if self.layout == "llama" else {}),
            "use_cache": True,
            "dtype": HF_DTYPES[dtype_name],
            "torch_dtype": HF_DTYPES[dtype_name],
        }

    @classmethod
    def from_hf(cls, tree: Mapping[str, Any], *, where: str = "config.json") -> LlamaShape:
        """Read such a config.json, of a LLaMA or a Qwen; refuses whatever this model would not compute exactly."""
        read, layout = Reader(tree, where), str(tree.get("model_type", "llama"))
        read.only(hidden_act="silu", **FIXED[layout])
        rope, theta = read_rope(tree, where)
        heads, hidden = read.whole("num_attention_heads"), read.whole("hidden_size")
        qwen = layout != "llama"
        if qwen and (kinds := set(tree.get("layer_types") or ()) - {"full_attention"}):
            raise ConfigError(f"layer_types has {sorted(map(str, kinds))}, this model has full_attention", where=where)
        return cls(
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.whole("intermediate_size"),
            num_layers=read.whole("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=read.whole("num_key_value_heads", heads),
            head_dim=read.whole("head_dim", 128 if layout == "qwen3" else hidden // heads),
            max_position_embeddings=read.whole("max_position_embeddings", 32768 if qwen else 2048),
            rope_theta=theta,
            rope_scaling=rope,
            rms_norm_eps=read.real("rms_norm_eps", 1e-6),
            tied=tree.get("tie_word_embeddings", False) is True,
            bos=read.token("bos_token_id"),
            eos=read.tokens("eos_token_id"),
            layout=layout,
            qkv_bias=layout == "qwen2",
            qk_norm=layout == "qwen3",
        )


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FIXED: dict[str, dict[str, Any]] = {  # by layout; any other value is another model
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
}


def written_rope(scaling: RopeScaling) -> dict[str, Any]:
    """As config.json spells it."""
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original,
    }


def read_rope(tree: Mapping[str, Any], where: str) -> tuple[RopeScaling | None, float]:
    """Scaling and theta, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""
    found: object = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ConfigError("rope_parameters: expected an object", where=where)
    inner = cast("Mapping[str, Any]", found)
    theta = Reader({"rope_theta": inner.get("rope_theta", tree.get("rope_theta"))}, where).real("rope_theta", 1e4)
    kind = inner.get("rope_type", inner.get("type", "default"))
    if inner.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", "llama3"):
        raise ConfigError(f"rotary positions of type {kind!r} are not supported", where=where)
    if kind == "default":
        return None, theta
    read = Reader(inner, where)
    scaling = RopeScaling(
        factor=read.real("factor"),
        low=read.real("low_freq_factor"),
        high=read.real("high_freq_factor"),
        original=read.whole("original_max_position_embeddings"),
    )
    if scaling.high <= scaling.low:
        raise ConfigError("high_freq_factor must be above low_freq_factor", where=where)
    return scaling, theta


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


def overridden(options: LlamaOptions | LladaOptions, base: LlamaShape, *, context_length: int) -> LlamaShape:
    """The shape named by model_path, overridden key by key."""
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
        given["head_dim"] = divided(
            given.get("hidden_size", base.hidden_size),
            given.get("num_heads", base.num_heads),
            hint="a divisor, or set model.head_dim",
        )
    if options.rope_scaling == "none":
        given["rope_scaling"] = None
    if options.model_type == "llada":  # whatever it was before
        given |= {"layout": "llada", "bidirectional": True}
        if base.mask is not None and base.mask >= given.get("vocab_size", base.vocab_size):
            given["mask"] = None  # of another vocabulary
    shape = replace(base, num_layers=options.num_layers or base.num_layers, **given)
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{shape.num_kv_heads} grouped-query heads do not divide {shape.num_heads} query heads",
            where="model.num_key_value_heads",
            hint=f"a divisor of {shape.num_heads}",
        )
    if shape.head_dim % 2:
        raise ConfigError(f"head_dim {shape.head_dim} is odd: rotary positions turn pairs", where="model.head_dim")
    check_context(context_length, shape.max_position_embeddings)
    if shape.tied and options.head_init_std is not None:
        raise ConfigError("a tied model has no output matrix of its own", where="model.head_init_std", hint="null")
    return shape
