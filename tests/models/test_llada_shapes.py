"""LLaDA's config.json, and that of the LLaMAs and Qwens one may begin with: read, written, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, ExitCode
from lockstep.models import llada_shapes, llama_shapes
from lockstep.models.llama_shapes import LlamaShape, RopeScaling
from lockstep.models.options import LladaOptions, LlamaOptions
from lockstep.models.shapes import from_hf, known, names, resolve, with_tokens

EIGHT = llada_shapes.KNOWN["GSAI-ML/LLaDA-8B-Base"]
TINY = llada_shapes.KNOWN["lockstep/llada-tiny"]
QWEN2 = LlamaShape(
    151936, 896, 4864, 24, 14, 2, 64, 32768, 1e6, rms_norm_eps=1e-6, tied=True, bos=151643, eos=(151643,),
    layout="qwen2", qkv_bias=True,
)  # fmt: skip
QWEN3 = LlamaShape(
    151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e6, rms_norm_eps=1e-6, tied=True, bos=151643, eos=(151645,),
    layout="qwen3", qk_norm=True,
)  # fmt: skip


def options(path: str, **values: Any) -> LladaOptions:
    return LladaOptions.model_validate({"model_path": path, **values})


def folder(place: Path, shape: LlamaShape, **changes: object) -> str:
    (place / "config.json").write_text(json.dumps({**shape.to_hf(), **changes}))
    return str(place)


def test_counts_are_the_published_ones() -> None:
    assert EIGHT.parameters() == 8_015_581_184
    assert (EIGHT.vocab_size, EIGHT.mask, EIGHT.bos, EIGHT.eos) == (126464, 126336, 126080, (126081,))
    assert (EIGHT.num_kv_heads, EIGHT.head_dim, EIGHT.rope_theta, EIGHT.rms_norm_eps) == (32, 128, 500000.0, 1e-5)
    assert (EIGHT.max_position_embeddings, EIGHT.tied, EIGHT.rope_scaling, EIGHT.qkv_bias) == (4096, False, None, False)
    assert replace(EIGHT, num_layers=31).parameters() == EIGHT.parameters() - 218_112_000
    assert QWEN2.parameters() == 494_032_768  # Qwen2.5-0.5B
    assert QWEN3.parameters() == 596_049_920  # Qwen3-0.6B
    assert {known(f"LLaDA-{name}") for name in ("8B-Base", "8B-Instruct", "1.5")} == {EIGHT}
    assert set(names(LladaOptions)) == set(llada_shapes.KNOWN)
    assert not set(names(LlamaOptions)) & set(llada_shapes.KNOWN)


@pytest.mark.parametrize(
    "shape",
    [
        EIGHT,
        TINY,
        replace(TINY, tied=True, mask=511, eos=(3, 4), bos=1),
        replace(TINY, qkv_bias=True),
        replace(TINY, qk_norm=True),
        replace(TINY, head_dim=32),
        replace(TINY, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
        QWEN2,
        QWEN3,
    ],
)
def test_what_is_written_is_read(shape: LlamaShape) -> None:
    tree = json.loads(json.dumps(shape.to_hf(dtype_name="bf16")))
    assert from_hf(tree) == shape
    assert tree["dtype"] == "bfloat16"


def test_what_their_class_does_not_know_is_said() -> None:
    assert "note" not in EIGHT.to_hf()
    assert "note" not in replace(TINY, qkv_bias=True).to_hf()  # include_qkv_bias is a key of theirs
    beyond = replace(TINY, qk_norm=True, head_dim=32, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)).to_hf()
    assert all(key in beyond["note"] for key in ("qk_norm", "head_dim", "rope_scaling"))


def test_their_ways_to_leave_a_size_out() -> None:
    def read(**changes: object) -> LlamaShape:
        kept = {key: value for key, value in {**TINY.to_hf(), **changes}.items() if value != "out"}
        shape = from_hf(kept)
        assert isinstance(shape, LlamaShape)
        return shape

    assert read(mlp_hidden_size=None, mlp_ratio=3).intermediate_size == 3 * 64
    assert read(mlp_hidden_size="out").intermediate_size == 4 * 64
    assert read(n_kv_heads=None).num_kv_heads == 4
    assert read(n_kv_heads=None, multi_query_attention=True).num_kv_heads == 1
    assert read(embedding_size=640, vocab_size=513).vocab_size == 640
    assert read(embedding_size=None).vocab_size == 512
    assert read(bias_for_layer_norm=None) == TINY
    assert read(bias_for_layer_norm="out", architectures="out", rope="out") == TINY


REFUSED: dict[str, object] = {
    "architectures": ["LLaDAMoEModelLM"],
    "block_type": "sequential",
    "activation_type": "swiglu",
    "layer_norm_type": "default",
    "layer_norm_with_affine": False,
    "attention_layer_norm": True,
    "bias_for_layer_norm": True,
    "include_bias": True,
    "rope": False,
    "rope_full_precision": False,
    "alibi": True,
    "input_emb_norm": True,
    "scale_logits": True,
    "block_group_size": 2,
    "multi_query_attention": True,  # with n_kv_heads 2
    "embedding_size": 500,
    "d_model": 66,
    "n_layers": 0,
    "n_heads": "4",
    "rope_theta": -1,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "weight_tying": "yes",
    "include_qkv_bias": 1,
    "mask_token_id": 512,
}
SAYS = {"d_model": "n_heads 4 do not divide d_model 66", "rope_scaling": "linear", "rope_theta": "rope_theta"}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_another_model_is_refused_by_the_key(key: str, tmp_path: Path) -> None:
    path = folder(tmp_path, TINY, **{key: REFUSED[key]})
    with pytest.raises(ConfigError) as caught:
        resolve(options(path), context_length=8)
    assert SAYS.get(key, key) in str(caught.value)
    assert caught.value.where == f"{path}/config.json"
    assert caught.value.exit_code == ExitCode.USAGE
    assert resolve(options(folder(tmp_path, TINY)), context_length=8) == TINY


def test_a_mask_outside_the_embedding_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """Contract 110 and D3: the seed's vocabulary of 126336 has no row for its mask 126336."""
    with pytest.raises(ConfigError, match="mask_token_id 126336 is outside the embedding of 126336 rows"):
        resolve(options(folder(tmp_path, EIGHT, vocab_size=126336, embedding_size=126336)), context_length=8)
    assert resolve(options(folder(tmp_path, EIGHT)), context_length=8).mask == 126336  # pyright: ignore[reportAttributeAccessIssue]
    small = resolve(options("GSAI-ML/LLaDA-8B-Base", vocab_size=1000), context_length=8)  # random weights: another mask
    assert small == replace(EIGHT, vocab_size=1000, mask=None)


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        (QWEN2, {"use_sliding_window": True}),
        (QWEN3, {"use_sliding_window": True}),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}),
        (QWEN3, {"attention_bias": True}),
        (QWEN3, {"hidden_act": "gelu"}),
        (QWEN2, {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None}),
    ],
)
def test_another_qwen_is_refused(shape: LlamaShape, change: dict[str, object], tmp_path: Path) -> None:
    key = next(iter(change))
    with pytest.raises(ConfigError, match="yarn" if key == "rope_scaling" else key):
        resolve(options(folder(tmp_path, shape, **change)), context_length=8)


def test_the_configs_of_qwen_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for shape, kind in ((QWEN2, transformers.Qwen2Config), (QWEN3, transformers.Qwen3Config)):
        config = kind(**shape.to_hf())
        assert config.num_key_value_heads == shape.num_kv_heads
        assert from_hf(json.loads(config.to_json_string(use_diff=False))) == shape
        config.save_pretrained(tmp_path)
        assert from_hf(json.loads((tmp_path / "config.json").read_text())) == shape


@pytest.mark.parametrize("base", [llama_shapes.KNOWN["lockstep/tiny"], QWEN2, QWEN3, TINY])
def test_any_of_them_may_be_the_beginning_of_a_llada(base: LlamaShape, tmp_path: Path) -> None:
    shape = resolve(options(folder(tmp_path, base), init="pretrained"), context_length=8)
    assert shape == replace(base, layout="llada", bidirectional=True)
    assert from_hf(json.loads(json.dumps(shape.to_hf()))) == shape  # as a checkpoint keeps it
    if base.layout != "llama":  # and of a LLaMA only a LLaMA
        with pytest.raises(ConfigError, match="another family trains it"):
            resolve(LlamaOptions.model_validate({"model_path": str(tmp_path)}), context_length=8)


def test_only_the_vocabulary_may_grow(tmp_path: Path) -> None:
    base = llama_shapes.KNOWN["lockstep/tiny"]
    path = folder(tmp_path, base)
    assert resolve(options(path, init="pretrained", vocab_size=513), context_length=8).vocab_size == 513
    changes: list[dict[str, object]] = [
        {"vocab_size": 511},
        {"hidden_size": 128},
        {"intermediate_size": 177},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
    ]
    for change in changes:
        with pytest.raises(ConfigError, match="differs from the pretrained weights'"):
            resolve(options(path, init="pretrained", **change), context_length=8)
    causal = LlamaOptions.model_validate({"model_path": path, "init": "pretrained", "num_layers": 2, "vocab_size": 513})
    with pytest.raises(ConfigError, match="vocab_size 513 differs"):
        resolve(causal, context_length=8)


def test_the_ids_of_the_tokenizer_go_with_an_export() -> None:
    assert with_tokens(TINY, separator=5, specials={}, mask=300) == replace(TINY, eos=(5,), mask=300)
    assert with_tokens(TINY, separator=5, specials={"mask": 7}) == replace(TINY, eos=(5,), mask=7)
    llama = llama_shapes.KNOWN["lockstep/tiny"]
    assert with_tokens(llama, separator=5, specials={"mask": 7}, mask=7) == replace(llama, eos=(5,))


def test_what_the_norms_of_heads_keep_for_the_backward_pass() -> None:
    """Measured with saved_tensors_hooks: 22696 and 14760 bytes a token, and without them 18536 and 11624."""
    block = LlamaShape(64, 256, 512, 1, 8, 8, 32, 512, 1e4, bidirectional=True)
    for shape, wide, half in ((block, 18536, 11624), (replace(block, qk_norm=True), 22696, 14760)):
        assert shape.layer_activation_bytes(4, compiled=False) == pytest.approx(wide, rel=0.04)
        assert shape.layer_activation_bytes(2, compiled=False) == pytest.approx(half, rel=0.04)
