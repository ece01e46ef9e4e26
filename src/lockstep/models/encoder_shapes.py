"""Sizes of encoders: the ones known by name, the ones in a config.json. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from lockstep.errors import ConfigError
from lockstep.models.reading import HF_DTYPES, Reader, check_context, divided, one_or_all

if TYPE_CHECKING:
    from lockstep.models.options import EncoderOptions

MODEL_TYPES = {"prenorm": "lockstep_encoder", "bert": "bert", "modern": "modernbert"}  # architecture -> config.json
CLASSES = {"prenorm": "LockstepEncoder", "bert": "BertForMaskedLM", "modern": "ModernBertForMaskedLM"}
EPS = {"prenorm": 1e-12, "bert": 1e-12, "modern": 1e-5}
CHOSEN = 0.15  # of the tokens have a target, and so logits: BERT's share
SMALL_HEAD = 8


@dataclass(frozen=True)
class EncoderShape:
    """Every number that decides the tensors and the maths of an encoder. The output matrix is the embedding."""

    architecture: str  # prenorm, bert, modern
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    norm_eps: float
    types: int = 2  # kinds of token, of which a run uses the first (bert)
    rope_theta: float = 160000.0  # of the layers that see the whole row (modern)
    local_rope_theta: float = 10000.0  # of the others
    local_attention: int = 128  # tokens that those see, half of them on either side
    global_every: int = 3  # which layers see the whole row: 0, 3, 6, ...
    pad: int | None = 0
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def model_type(self) -> str:
        return MODEL_TYPES[self.architecture]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def free_sizes(self) -> frozenset[str]:
        """Those that weights do not depend on: rotary positions have none."""
        positions = {"max_position_embeddings"} if self.architecture == "modern" else set[str]()
        return frozenset({"num_layers", "pad", "bos", "eos"} | positions)

    def window(self, layer: int) -> int:
        """How far, in tokens, that layer sees to either side; 0: all of the row."""
        is_local = self.architecture == "modern" and layer % self.global_every > 0
        return self.local_attention // 2 if is_local else 0

    def parameters(self) -> int:
        """How many numbers are trained."""
        width, layers = self.hidden_size, self.num_layers
        table = self.vocab_size * (width + 1)  # and the decoder's bias
        if self.architecture == "modern":
            norms = 2 * layers + 2  # the first layer has one norm only; around: embedding, last, head
            return table + layers * self._layer_matmul() + width * width + norms * width
        biases = 3 * width + width + self.intermediate_size + width
        block = self._layer_matmul() + biases + 4 * width
        table += (self.max_position_embeddings + 2) * width  # and the embedding's norm
        head = width * width + 3 * width
        kinds_or_last_norm = self.types if self.architecture == "bert" else 2
        return table + layers * block + head + kinds_or_last_norm * width

    def matmul_parameters(self) -> int:
        """Those that multiply a token: no norms, no biases, no look-up; the output matrix counts though it is tied."""
        return self.num_layers * self._layer_matmul() + self._head_matmul()

    def flops_per_token(self, context_length: int) -> float:
        """Forward and backward; the head only where a token was chosen, attention only as far as a layer sees."""
        seen = sum(min(context_length, 2 * w + 1) if (w := self.window(layer)) else context_length
                   for layer in range(self.num_layers))  # fmt: skip
        matmul = self.num_layers * self._layer_matmul() + CHOSEN * self._head_matmul()
        return 6 * matmul + 12.0 * self.hidden_size * seen

    def _layer_matmul(self) -> int:
        gates = 3 if self.architecture == "modern" else 2
        return 4 * self.hidden_size**2 + gates * self.hidden_size * self.intermediate_size

    def _head_matmul(self) -> int:
        return self.hidden_size**2 + self.vocab_size * self.hidden_size

    def layer_activation_bytes(self, item: int, *, compiled: bool) -> int:
        """What one layer keeps per token, dropout's masks included. Compiled: as measured on an H200."""
        width, inner, modern = self.hidden_size, self.intermediate_size, self.architecture == "modern"
        if compiled:
            return item * ((11 if modern else 9) * width + (3 if modern else 2) * inner)
        norms = 4 * width * item if item >= 4 else 2 * width * (4 + item)  # of half precision an fp32 copy too
        return norms + item * ((8 if modern else 6) * width + (4 if modern else 2) * inner)

    def head_tokens(self, tokens: int) -> int:
        """How many of a micro-batch's tokens have logits: the chosen ones."""
        return math.ceil(CHOSEN * tokens)

    def first_loss(self, std: float) -> float:
        """Of random weights: |h| is sqrt(d) after the head's norm, and its transform hides which token was read."""
        return math.log(self.vocab_size) + self.hidden_size * std**2 / 2

    def notices(self) -> tuple[str, ...]:
        """What its user should hear about these sizes."""
        if self.head_dim >= SMALL_HEAD:
            return ()
        room = f"{self.num_heads} heads of {self.hidden_size} numbers together"
        return (f"head size {self.head_dim}: {room} can tell little apart; a sane model has 32 to 128 a head",)

    def to_hf(self, *, dtype_name: str = "fp32") -> dict[str, Any]:
        """The config.json of transformers; prenorm has no class there, and keeps a type of its own."""
        tree: dict[str, Any] = {
            "architectures": [CLASSES[self.architecture]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "pad_token_id": self.pad,
            "bos_token_id": self.bos,
            "eos_token_id": one_or_all(self.eos),
            "tie_word_embeddings": True,
            "dtype": HF_DTYPES[dtype_name],
            "torch_dtype": HF_DTYPES[dtype_name],
        }
        if self.architecture == "modern":
            return tree | self._modern_to_hf()
        return tree | {"hidden_act": "gelu", "layer_norm_eps": self.norm_eps, "type_vocab_size": self.types}

    def _modern_to_hf(self) -> dict[str, Any]:
        """Rotary settings and windows in the spelling of transformers 4 and of 5."""
        thetas = {"full_attention": self.rope_theta, "sliding_attention": self.local_rope_theta}
        return {
            "hidden_activation": "gelu",
            "norm_eps": self.norm_eps,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "decoder_bias": True,
            "classifier_bias": False,
            "classifier_activation": "gelu",
            "cls_token_id": self.bos,
            "sep_token_id": self.eos[0] if self.eos else None,
            "local_attention": self.local_attention,
            "global_attn_every_n_layers": self.global_every,
            "global_rope_theta": self.rope_theta,
            "local_rope_theta": self.local_rope_theta,
            "layer_types": [
                "sliding_attention" if self.window(n) else "full_attention" for n in range(self.num_layers)
            ],
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        }

    @classmethod
    def from_hf(cls, tree: Mapping[str, Any], *, where: str = "config.json") -> EncoderShape:
        """Read such a config.json; refuses whatever this model would not compute exactly."""
        read = Reader(tree, where)
        architecture = next(name for name, kind in MODEL_TYPES.items() if kind == tree.get("model_type"))
        modern = architecture == "modern"
        read.only(tie_word_embeddings=True)
        shape = cls(
            architecture=architecture,
            vocab_size=read.whole("vocab_size"),
            hidden_size=read.whole("hidden_size"),
            intermediate_size=read.whole("intermediate_size"),
            num_layers=read.whole("num_hidden_layers"),
            num_heads=read.whole("num_attention_heads"),
            max_position_embeddings=read.whole("max_position_embeddings", 8192 if modern else 512),
            norm_eps=read.real("norm_eps" if modern else "layer_norm_eps", EPS[architecture]),
            pad=read.token("pad_token_id"),
            bos=read.token("bos_token_id"),
            eos=read.tokens("eos_token_id"),
        )
        if shape.hidden_size % shape.num_heads:
            raise ConfigError(f"{shape.num_heads} heads do not divide hidden_size {shape.hidden_size}", where=where)
        if modern:
            return _read_modern(shape, read)
        read.only(hidden_act="gelu", is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
        return replace(shape, types=read.whole("type_vocab_size", 2))


def _read_modern(shape: EncoderShape, read: Reader) -> EncoderShape:
    """What only ModernBERT has, in the spelling of transformers 4 or 5."""
    read.only(
        hidden_activation="gelu", classifier_activation="gelu", norm_bias=False, attention_bias=False, mlp_bias=False,
        classifier_bias=False, decoder_bias=True,
    )  # fmt: skip
    tree = read.tree
    kinds = cast("list[str] | None", tree.get("layer_types"))
    every = read.whole("global_attn_every_n_layers", 3)
    if kinds is not None and "global_attn_every_n_layers" not in tree:
        every = next((n for n in range(1, len(kinds)) if kinds[n] == "full_attention"), max(1, len(kinds)))
    rope: dict[str, float] = {}
    spellings = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}
    given = cast("Mapping[str, Any]", tree.get("rope_parameters") or {})
    for kind, (key, usual) in spellings.items():
        inner = cast("Mapping[str, Any]", given.get(kind) or {})
        if inner.get("rope_type", "default") != "default" or tree.get("rope_scaling"):
            raise ConfigError(
                f"rotary positions of type {inner.get('rope_type')!r} are not supported", where=read.where
            )
        rope[kind] = Reader({key: inner.get("rope_theta", tree.get(key))}, read.where).real(key, usual)
    shape = replace(
        shape,
        rope_theta=rope["full_attention"],
        local_rope_theta=rope["sliding_attention"],
        local_attention=read.whole("local_attention", 128),
        global_every=every,
    )
    if kinds is not None and kinds != shape.to_hf()["layer_types"]:
        raise ConfigError(
            "layer_types: only every n-th layer may see the whole row, the first one too", where=read.where
        )
    return shape


_BERT = EncoderShape("bert", 30522, 768, 3072, 12, 12, 512, 1e-12)
_BERT_LARGE = replace(_BERT, hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16)
_MODERN = EncoderShape(
    "modern", 50368, 768, 1152, 22, 12, 8192, 1e-5, pad=50283, bos=50281, eos=(50282,)
)  # fmt: skip

KNOWN: dict[str, EncoderShape] = {
    "lockstep/mlm-tiny": EncoderShape("prenorm", 512, 64, 256, 2, 4, 512, 1e-12),
    "lockstep/mlm-small": EncoderShape("prenorm", 8192, 256, 1024, 6, 4, 512, 1e-12),
    "lockstep/mlm-base": _BERT,
    "lockstep/mlm-modern": replace(_MODERN, vocab_size=32768, pad=0, bos=None, eos=()),
    "lockstep/microbert": EncoderShape("prenorm", 30522, 16, 64, 6, 8, 128, 1e-12),
    "google-bert/bert-base-uncased": _BERT,
    "google-bert/bert-base-cased": replace(_BERT, vocab_size=28996),
    "google-bert/bert-large-uncased": _BERT_LARGE,
    "answerdotai/ModernBERT-base": _MODERN,
    "answerdotai/ModernBERT-large": replace(
        _MODERN, hidden_size=1024, intermediate_size=2624, num_layers=28, num_heads=16
    ),
}


def overridden(options: EncoderOptions, base: EncoderShape, *, context_length: int) -> EncoderShape:
    """The shape named by model_path, overridden key by key; the feed-forward layer keeps its share of the width."""
    sizes = {
        "architecture": options.architecture,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_layers": options.num_layers,
        "num_heads": options.num_attention_heads,
        "vocab_size": options.vocab_size,
        "max_position_embeddings": options.max_position_embeddings,
    }
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if given.get("architecture", base.architecture) != base.architecture:
        given["norm_eps"] = EPS[given["architecture"]]
    if "hidden_size" in given and "intermediate_size" not in given:
        given["intermediate_size"] = max(1, base.intermediate_size * given["hidden_size"] // base.hidden_size)
    if options.init == "random" and "max_position_embeddings" not in given:  # its own are only a usual number
        given["max_position_embeddings"] = max(base.max_position_embeddings, context_length)
    shape = replace(base, **given)
    head = divided(shape.hidden_size, shape.num_heads)
    if shape.architecture == "modern" and head % 2:
        raise ConfigError(f"head size {head} is odd: rotary positions turn pairs", where="model.num_attention_heads")
    check_context(context_length, shape.max_position_embeddings)
    if options.head_init_std is not None:
        raise ConfigError("a tied model has no output matrix of its own", where="model.head_init_std", hint="null")
    return shape
