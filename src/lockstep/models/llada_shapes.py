"""LLaDA's own config.json, read and written, and the LLaDAs known by name. Needs no torch.

A LLaDA is a LLaMA that looks both ways. Its files are another matter: the keys come from OLMo, and most of them choose
between models that LLaDA is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.errors import ConfigError
from lockstep.models import llama_shapes
from lockstep.models.llama_shapes import LlamaShape, read_rope, written_rope
from lockstep.models.reading import HF_DTYPES, Reader, one_or_all

ARCHITECTURES = ["LLaDAModelLM"]
FIXED: dict[str, Any] = {  # what every LLaDA has; any other value is another model
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "include_bias": False,
    "rope": True,
    "rope_full_precision": True,
    "alibi": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "block_group_size": 1,
}
SILENT: dict[str, Any] = {  # that change no number, but without them their class would train with dropout
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "flash_attention": False,
    "multi_query_attention": None,
    "init_fn": "normal",
    "init_std": 0.02,
    "use_cache": False,
}
NOTE = "the class LLaDAModelLM does not know {keys}: lockstep alone computes this model"

_8B = LlamaShape(
    126464, 4096, 12288, 32, 32, 32, 128, 4096, 500000.0, bos=126080, eos=(126081,),
    layout="llada", bidirectional=True, mask=126336,
)  # fmt: skip
KNOWN: dict[str, LlamaShape] = {
    **dict.fromkeys(("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"), _8B),
    **{
        f"lockstep/llada-{name}": replace(llama_shapes.KNOWN[f"lockstep/{name}"], layout="llada", bidirectional=True)
        for name in ("tiny", "demo", "small", "base")
    },
}


def to_hf(shape: LlamaShape, *, dtype_name: str) -> dict[str, Any]:
    """As the authors' class reads it; what a LLaMA or a Qwen may have and their class has not follows as extra keys."""
    beyond: dict[str, Any] = {}
    if shape.head_dim * shape.num_heads != shape.hidden_size:
        beyond["head_dim"] = shape.head_dim
    if shape.qk_norm:
        beyond["qk_norm"] = True
    if shape.rope_scaling is not None:
        beyond["rope_scaling"] = written_rope(shape.rope_scaling)
    if beyond:
        beyond["note"] = NOTE.format(keys=", ".join(beyond))
    return {
        "architectures": ARCHITECTURES,
        "model_type": "llada",
        "vocab_size": shape.vocab_size,
        "embedding_size": shape.vocab_size,
        "d_model": shape.hidden_size,
        "mlp_hidden_size": shape.intermediate_size,
        "n_layers": shape.num_layers,
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_kv_heads,
        "max_sequence_length": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "weight_tying": shape.tied,
        "include_qkv_bias": shape.qkv_bias,
        "mask_token_id": shape.mask,
        "bos_token_id": shape.bos,
        "eos_token_id": one_or_all(shape.eos),
        "pad_token_id": shape.eos[0] if shape.eos else None,  # rows are filled up with the end, and that is learnt
        **FIXED,
        **SILENT,
        "dtype": HF_DTYPES[dtype_name],
        "torch_dtype": HF_DTYPES[dtype_name],
        **beyond,
    }


def from_hf(tree: Mapping[str, Any], *, where: str = "config.json") -> LlamaShape:
    """Read such a config.json; refuses whatever this model would not compute exactly."""
    read = Reader(tree, where)
    read.only(architectures=ARCHITECTURES)
    inherited = {} if tree.get("bias_for_layer_norm") is not None else {"bias_for_layer_norm": None}
    read.only(**FIXED | inherited)
    rows, heads, width = _rows(read), read.whole("n_heads"), read.whole("d_model")
    if width % heads and tree.get("head_dim") is None:
        raise ConfigError(f"n_heads {heads} do not divide d_model {width}", where=where)
    scaling, theta = read_rope(tree, where)
    return LlamaShape(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=read.whole("mlp_hidden_size", read.whole("mlp_ratio", 4) * width),
        num_layers=read.whole("n_layers"),
        num_heads=heads,
        num_kv_heads=_key_heads(read, heads),
        head_dim=read.whole("head_dim", width // heads),
        max_position_embeddings=read.whole("max_sequence_length", 1024),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=read.real("rms_norm_eps", 1e-5),
        tied=read.flag("weight_tying", default=True),
        bos=read.token("bos_token_id"),
        eos=read.tokens("eos_token_id"),
        layout="llada",
        bidirectional=True,
        mask=_mask(read, rows),
        qkv_bias=read.flag("include_qkv_bias"),
        qk_norm=read.flag("qk_norm"),
    )


def _rows(read: Reader) -> int:
    """Of the embedding, which may have more than the vocabulary: 126464 for 126349 tokens, or so."""
    words = read.whole("vocab_size")
    rows = read.whole("embedding_size", words)
    if rows < words:
        raise ConfigError(f"embedding_size {rows} is below vocab_size {words}", where=read.where)
    return rows


def _key_heads(read: Reader, heads: int) -> int:
    """`multi_query_attention` is the older way to say one head or as many as there are queries."""
    older = read.tree.get("multi_query_attention")
    said = heads if older is None else 1 if older is True else heads
    found = read.whole("n_kv_heads", said)
    if older is not None and found != said:
        raise ConfigError(f"multi_query_attention {older} and n_kv_heads {found} contradict", where=read.where)
    return found


def _mask(read: Reader, rows: int) -> int | None:
    mask = read.token("mask_token_id")
    if mask is not None and not 0 <= mask < rows:
        raise ConfigError(
            f"mask_token_id {mask} is outside the embedding of {rows} rows (ids 0 to {rows - 1})", where=read.where
        )
    return mask
