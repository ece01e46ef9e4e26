"""LLaDAs that begin as something else: LLaMA, Qwen2 and Qwen3 checkpoints, read exactly, with a row for the mask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.errors import DataError
from lockstep.models import hf
from lockstep.models.build import Built, build
from lockstep.models.hf_names import their_names
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import LlamaShape, RopeScaling
from lockstep.models.options import LladaOptions
from lockstep.models.shapes import from_hf, resolve

transformers = pytest.importorskip("transformers")

ROWS, LENGTH = 97, 40
SIZES = LlamaShape(ROWS, 48, 80, 2, 6, 2, 8, 64, 10000.0, rms_norm_eps=1e-6)
SHAPES = {
    "llama": replace(SIZES, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
    "qwen2": replace(SIZES, layout="qwen2", qkv_bias=True),
    "qwen2-tied": replace(SIZES, layout="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(SIZES, layout="qwen3", qk_norm=True, head_dim=16),
}
KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
IDS = torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
BOTH_WAYS = torch.zeros(2, 1, LENGTH, LENGTH)


def checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Random weights, with norms and biases away from 1 and 0, as transformers saves them."""
    torch.manual_seed(11)
    make_config, make_model = KINDS[SHAPES[name].layout]
    theirs = make_model(make_config(**SHAPES[name].to_hf(), initializer_range=0.2)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    theirs.to(dtype).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / hf.INDEX_FILE).is_file()
    return theirs


def begun(folder: Path, **values: Any) -> Built:
    options = LladaOptions.model_validate({"model_path": str(folder), "init": "pretrained", **values})
    return build(
        options, resolve(options, context_length=LENGTH), device=torch.device("cpu"), dtype_name="fp32", seed=1,
        checkpointing=False, deterministic=False, debug=False,
    )  # fmt: skip


@torch.no_grad()
def distance(ours: Llama, theirs: Any, mask: Tensor | None) -> float:
    return float((ours(IDS) - theirs(IDS, attention_mask=mask).logits).abs().max())


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parity_one_way_and_both_ways(name: str, tmp_path: Path) -> None:
    theirs = checkpoint(name, tmp_path)
    shape = from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert shape == SHAPES[name]
    assert isinstance(shape, LlamaShape)
    causal = Llama(shape, attention="native_flash").eval()
    hf.import_weights(causal, tmp_path, truncated=False)
    assert distance(causal, theirs, None) < 1e-5
    model = begun(tmp_path).model
    assert isinstance(model, Llama)
    assert model.shape == replace(shape, layout="llada", bidirectional=True)
    assert distance(model, theirs, BOTH_WAYS) < 1e-5
    assert distance(model, theirs, None) > 0.1
    assert distance(causal, theirs, BOTH_WAYS) > 0.1


@pytest.mark.parametrize("part", ["bias", "q_norm", "k_norm"])
def test_a_bias_or_norm_that_is_not_there_is_seen(part: str, tmp_path: Path) -> None:
    """The weights above are such that a wrong bias or norm cannot pass for a right one."""
    theirs = checkpoint("qwen2" if part == "bias" else "qwen3", tmp_path)
    model = begun(tmp_path).model
    assert isinstance(model, Llama)
    assert distance(model, theirs, BOTH_WAYS) < 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.fill_(0.0 if part == "bias" else 1.0)
    assert distance(model, theirs, BOTH_WAYS) > 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_exported_it_is_a_llada_and_comes_back_bit_for_bit(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(name, tmp_path / "in", torch.bfloat16)
    model = begun(tmp_path / "in").model
    hf.export(model, model.shape, tmp_path / "out", dtype="bf16", max_shard_bytes=20_000)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LLaDAModelLM"]
    beyond = {"llama": "rope_scaling", "qwen3": "qk_norm"}.get(name, "")
    assert beyond in config.get("note", "")
    assert beyond in caplog.text
    assert ("note" in config) is bool(beyond)
    stored = {key for file in (tmp_path / "out").glob("*.safetensors") for key in load_file(file)}
    assert stored == {their for ours, _ in model.named_parameters() for their in their_names(model.shape, ours)}
    assert all(key.startswith("model.transformer.") for key in stored)
    again = begun(tmp_path / "out").model
    assert again.shape == model.shape
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied"])
def test_new_rows_begin_as_the_mean_of_the_others(name: str, tmp_path: Path) -> None:
    checkpoint(name, tmp_path, torch.bfloat16)
    before = begun(tmp_path)
    assert not any("new rows" in notice for notice in before.notices)
    made = begun(tmp_path, vocab_size=ROWS + 3)
    assert any("3 new rows of the vocabulary begin as the mean of the others" in notice for notice in made.notices)
    theirs = dict(before.model.named_parameters())
    for key, parameter in made.model.named_parameters():
        assert torch.equal(parameter[: len(theirs[key])], theirs[key]), key
        if key in ("tok_embed.weight", "output.weight"):
            assert parameter.shape[0] == ROWS + 3
            assert torch.allclose(parameter[ROWS:], theirs[key].mean(0).expand(3, -1), atol=1e-6)
        else:
            assert parameter.shape == theirs[key].shape
    mask = torch.full((1, 4), ROWS)
    assert torch.isfinite(made.model(mask, IDS[:1, :4]))


def test_rows_that_the_config_promises_and_the_file_lacks_are_no_growth(tmp_path: Path) -> None:
    checkpoint("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": ROWS + 1}))
    for values in ({}, {"vocab_size": ROWS + 2}):
        with pytest.raises(DataError, match=rf"embed_tokens\.weight is \({ROWS}, 48\), .* needs \({ROWS + 1}, 48\)"):
            begun(tmp_path, **values)


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|mdm_mask|>"])
    source = tmp_path / "source"
    source.mkdir()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}", "unk_token": "?"}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    shape = replace(SIZES, layout="llada", bidirectional=True, bos=0, eos=(1,), mask=2)
    model = Llama(shape, attention="native_math")
    hf.export(model, shape, tmp_path / "out", dtype="fp32", tokenizer_file=source / "tokenizer.json")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    named = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    words = {"bos_token": "<|start|>", "eos_token": "<|end|>", "mask_token": "<|mdm_mask|>"}
    assert {key: named[key] for key in words} == words
    assert named["chat_template"] == "{{ messages }}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mask_token_id"], config["eos_token_id"], config["pad_token_id"]) == (2, 1, 1)
