"""Weights in Hugging Face form: strict about names, lazy about layers, safe about files."""

from __future__ import annotations

import json
import resource
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep import rundir
from lockstep.errors import DataError, ExitCode, LockstepError, NotFoundError, OutputError
from lockstep.models import hf
from lockstep.models.hf_names import layer_of
from lockstep.models.initialise import initialise
from lockstep.models.layers import rope_frequencies, rope_tables, rotate
from lockstep.models.llama import Llama
from lockstep.models.shapes import KNOWN, LlamaShape

TINY = replace(KNOWN["lockstep/tiny"], num_layers=4)


def make(shape: LlamaShape = TINY, seed: int = 1) -> Llama:
    model = Llama(shape, attention="native_math")
    initialise(model, seed=seed, std=0.1)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf.export(make(), TINY, tmp_path / "m", dtype="fp32", tokenizer_file=None)
    return tmp_path / "m"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    hf.export(make(), TINY, tmp_path / "s", dtype="fp32", tokenizer_file=None, max_shard_bytes=200_000)
    return tmp_path / "s"


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("which", ["folder", "sharded"])
def test_round_trip(which: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(which)
    model = make(seed=2)
    hf.import_weights(model, path, truncated=False)
    expected = make().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    rundir.verify(path)
    assert not list(path.parent.glob("*.tmp-*"))


def test_truncated_layers_are_not_read_at_all(sharded: Path) -> None:
    index = json.loads((sharded / hf.INDEX_FILE).read_text())["weight_map"]
    needed = {file for name, file in index.items() if not layer_of(TINY, name)}
    gone = set(index.values()) - needed
    assert gone
    for file in gone:
        (sharded / file).unlink()
    model = make(replace(TINY, num_layers=1), seed=2)
    hf.import_weights(model, sharded, truncated=True)
    expected = make().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(NotFoundError):
        hf.import_weights(make(seed=2), sharded, truncated=False)


@pytest.mark.parametrize(
    ("change", "truncated", "message"),
    [
        ({"model.norm.weight": None}, False, "model.norm.weight"),
        ({"model.norm.weight": None}, True, "model.norm.weight"),
        ({"model.layers.3.mlp.up_proj.weight": None}, True, "model.layers.3.mlp.up_proj.weight"),
        ({"model.extra.weight": torch.zeros(1)}, True, "model.extra.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, True, "q_proj.bias"),
        ({"model.layers.4.mlp.up_proj.weight": torch.zeros(1)}, False, "pretrained-truncated"),
        ({"model.norm.weight": torch.zeros(65)}, False, "65"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, False, "int8"),
        ({"lm_head.weight": None}, False, "lm_head"),
    ],
)
def test_missing_and_unexpected_tensors_are_named(
    folder: Path, change: dict[str, torch.Tensor | None], truncated: bool, message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(DataError) as caught:
        hf.import_weights(make(), folder, truncated=truncated)
    assert message in str(caught.value)


def test_a_tied_model_takes_an_equal_head_and_refuses_another(tmp_path: Path) -> None:
    shape = replace(TINY, tied=True)
    hf.export(make(shape), shape, tmp_path / "t", dtype="fp32", tokenizer_file=None)
    embedding = load_file(tmp_path / "t" / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path / "t", {"lm_head.weight": embedding.clone()})
    hf.import_weights(make(shape), tmp_path / "t", truncated=False)
    rewrite(tmp_path / "t", {"lm_head.weight": embedding + 1})
    with pytest.raises(DataError, match="tied"):
        hf.import_weights(make(shape), tmp_path / "t", truncated=False)


@pytest.mark.parametrize("file", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", 7, None])
def test_an_index_that_leaves_its_folder_is_refused(sharded: Path, file: object) -> None:
    index = json.loads((sharded / hf.INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / hf.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(DataError, match="not a file name"):
        hf.import_weights(make(), sharded, truncated=False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 62) + b"{}",  # a header that claims 4 exabytes
        struct.pack("<Q", 90 << 20) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 60) + b'{"model.norm.weight":{"dtype":"F32","shape":[1099511627776]'.ljust(60),
    ],
)
def test_a_broken_file_is_a_data_error(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match="safetensors"):
        hf.import_weights(make(), folder, truncated=False)


def test_a_cut_file_is_a_data_error(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="safetensors"):
        hf.import_weights(make(), folder, truncated=False)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"model\.safetensors"):
        hf.import_weights(make(), tmp_path, truncated=False)


def test_an_export_that_meets_the_end_of_the_disk_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the end of the disk: the real writer fails in the real way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(LockstepError, match=r"too large.*MiB free") as caught:
            hf.export(make(), TINY, tmp_path / "m", dtype="fp32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, SafetensorError)
    assert caught.value.exit_code == ExitCode.IO
    assert caught.value.where == str(tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_an_export_to_a_read_only_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(LockstepError, match=str(error.strerror)) as caught:
        hf.export(make(), TINY, tmp_path / "m", dtype="fp32")
    assert caught.value.exit_code in (ExitCode.IO, ExitCode.CANNOT_CREATE)
    assert caught.value.where == str(tmp_path / "m")


def test_export_never_overwrites(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="not empty"):
        hf.export(make(seed=2), TINY, folder, dtype="fp32", tokenizer_file=None)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="No such file"):
        hf.export(make(), TINY, tmp_path / "m", dtype="fp32", tokenizer_file=tmp_path / "none.json")
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_travels_with_its_special_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = replace(TINY, eos=(0,))
    hf.export(make(), shape, tmp_path / "m", dtype="bf16", tokenizer_file=tmp_path / "tokenizer.json")
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|end|>"
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_metas_order_of_rotated_pairs() -> None:
    """wq, wk reordered give a model that turns neighbours the same scores; back again is the identity."""
    torch.manual_seed(0)
    head_dim, heads, x = TINY.head_dim, 4, torch.randn(1, 9, 64)
    wq, wk = torch.randn(64, 64), torch.randn(64, 64)
    cos, sin = rope_tables(rope_frequencies(TINY), 9)

    def neighbours(weight: torch.Tensor) -> torch.Tensor:
        even, odd = (x @ weight.T).view(1, 9, heads, head_dim).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqhe,bkhe->bhqk", q, k)

    ours = scores(*(rotate((x @ w.T).view(1, 9, heads, head_dim), cos, sin) for w in (wq, wk)))
    theirs = scores(*(neighbours(hf.halves_to_pairs(w, head_dim)) for w in (wq, wk)))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, scores(neighbours(wq), neighbours(wk)), atol=1.0)  # unpermuted: wrong
    assert torch.equal(hf.pairs_to_halves(hf.halves_to_pairs(wq, head_dim), head_dim), wq)
