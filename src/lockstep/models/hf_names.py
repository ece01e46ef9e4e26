"""What our tensors are called in the files of transformers.

One of ours may be several of theirs, stacked along the rows: BERT keeps query, key and value apart.
"""

from __future__ import annotations

import re

from lockstep.models.shapes import AnyShape

LLAMA = {
    "tok_embed": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
QWEN = {**LLAMA, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
LLADA = {  # two are called ff_out: the way back of each block, and the output matrix
    "tok_embed": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "output": "model.transformer.ff_out",
    "attention.wq": "q_proj",
    "attention.wk": "k_proj",
    "attention.wv": "v_proj",
    "attention.wo": "attn_out",
    "attention.q_norm": "q_norm",
    "attention.k_norm": "k_norm",
    "mlp.w1": "ff_proj",
    "mlp.w2": "ff_out",
    "mlp.w3": "up_proj",
    "attention_norm": "attn_norm",
    "mlp_norm": "ff_norm",
}
BERT = {
    "tok_embed": "bert.embeddings.word_embeddings",
    "pos_embed": "bert.embeddings.position_embeddings",
    "type_embed": "bert.embeddings.token_type_embeddings",
    "embed_norm": "bert.embeddings.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
    "attention.wqkv": "attention.self.query attention.self.key attention.self.value",
    "attention.wo": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.w1": "intermediate.dense",
    "mlp.w2": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
MODERN = {
    "tok_embed": "model.embeddings.tok_embeddings",
    "embed_norm": "model.embeddings.norm",
    "norm": "model.final_norm",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
    "head": "decoder",
    "attention.wqkv": "attn.Wqkv",
    "attention.wo": "attn.Wo",
    "attention_norm": "attn_norm",
    "mlp.w1": "mlp.Wi",
    "mlp.w2": "mlp.Wo",
    "mlp_norm": "mlp_norm",
}
TABLES = {  # ours alone: lockstep_encoder, as they are
    "llama": LLAMA, "qwen2": QWEN, "qwen3": QWEN, "llada": LLADA, "bert": BERT, "modernbert": MODERN,
}  # fmt: skip
LAYERS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "modernbert"), "model.layers"),
    "llada": "model.transformer.blocks",
    "bert": "bert.encoder.layer",
}
TIED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), "lm_head.weight"),
    "llada": "model.transformer.ff_out.weight",
    "bert": "cls.predictions.decoder.weight",
    "modernbert": "decoder.weight",
}
UNUSED = {  # that a file may hold and no model needs
    **dict.fromkeys(("llama", "qwen2", "qwen3"), re.compile(r".*rotary_emb\.inv_freq")),
    "bert": re.compile(r"bert\.pooler\..*|cls\.seq_relationship\..*|bert\.embeddings\.position_ids"),
    "modernbert": re.compile(r".*rotary_emb\..*"),
}
NOTHING = re.compile(r"(?!)")
OTHER_SPELLINGS = {  # of the first BERT files, and of copies that transformers makes
    "bert": ((".gamma", ".weight"), (".beta", ".bias"), ("cls.predictions.decoder.bias", "cls.predictions.bias"))
}


def their_names(shape: AnyShape, name: str) -> tuple[str, ...]:
    """Of one of our parameters: layers.0.attention.wq.weight -> (model.layers.0.self_attn.q_proj.weight,)."""
    table = TABLES.get(shape.model_type)
    if table is None:
        return (name,)
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("layers."):
        return (f"{table[stem]}.{kind}",)
    _, layer, inner = stem.split(".", 2)
    return tuple(f"{LAYERS[shape.model_type]}.{layer}.{part}.{kind}" for part in table[inner].split())


def usual_name(shape: AnyShape, stored: str) -> str:
    """The name of today for one in a file."""
    for old, new in OTHER_SPELLINGS.get(shape.model_type, ()):
        if stored.endswith(old):
            stored = stored.removesuffix(old) + new
    return stored


def layer_of(shape: AnyShape, stored: str) -> int | None:
    """The layer a stored tensor belongs to, if to any."""
    prefix = LAYERS.get(shape.model_type, "layers")
    found = re.match(rf"{re.escape(prefix)}\.(\d+)\.", stored)
    return int(found[1]) if found else None


def tied_name(shape: AnyShape) -> str:
    """The name of an output matrix that must equal the embedding; '': the model has one of its own, or no such name."""
    return TIED.get(shape.model_type, "") if getattr(shape, "tied", True) else ""


def is_unused(shape: AnyShape, stored: str) -> bool:
    """Whether a file may hold it and this model has no place for it."""
    return bool(UNUSED.get(shape.model_type, NOTHING).fullmatch(stored))
