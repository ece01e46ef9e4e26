"""Sizes of encoders: by name, overridden, read from files; counts, memory, what is refused and what is only said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError, NotFoundError
from lockstep.models import encoder_shapes, hf, shapes
from lockstep.models.build import Built, build, lay_out
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import KNOWN, EncoderShape
from lockstep.models.options import EncoderOptions, LlamaOptions
from lockstep.models.shapes import known, memory_bytes, names, resolve
from lockstep.runtime import hub

ARCHITECTURES = ("prenorm", "bert", "modern")
TINY = KNOWN["lockstep/mlm-tiny"]


def options(path: str = "lockstep/mlm-tiny", **values: object) -> EncoderOptions:
    return EncoderOptions.model_validate({"model_path": path, **values})


def made(path: str = "lockstep/mlm-tiny", **values: object) -> Built:
    asked = options(path, **values)
    return build(
        asked, resolve(asked, context_length=32), device=torch.device("cpu"), dtype_name="fp32", seed=5,
        checkpointing=False, deterministic=False, debug=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert-base-uncased", 109_514_298),
        ("bert-base-cased", 108_340_804),
        ("bert-large-uncased", 335_174_458),
        ("ModernBERT-base", 149_655_232),
        ("ModernBERT-large", 395_881_664),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, count: int) -> None:
    shape = known(name)
    assert shape is not None
    assert shape.parameters() == count


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_known_shape(name: str) -> None:
    shape = KNOWN[name]
    with torch.device("meta"):
        model = lay_out(shape, attention="native_math")
    counted = [parameter.numel() for parameter in model.parameters()]
    assert sum(counted) == shape.parameters()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "_embed" not in n)
    assert shape.matmul_parameters() == matrices + shape.vocab_size * shape.hidden_size
    assert shapes.from_hf(json.loads(json.dumps(shape.to_hf()))) == shape
    assert known(name.partition("/")[2].upper()) is shape


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layers", [1, 5])
def test_counts_of_odd_sizes(architecture: str, layers: int) -> None:
    shape = replace(TINY, architecture=architecture, num_layers=layers, intermediate_size=99, types=3)
    assert sum(p.numel() for p in Encoder(shape, attention="native_math").parameters()) == shape.parameters()


def test_flops_count_the_head_where_it_is_computed_and_windows_as_they_are() -> None:
    bert, modern = KNOWN["lockstep/mlm-base"], KNOWN["answerdotai/ModernBERT-base"]
    layers = 12 * 12 * 768**2
    assert bert.flops_per_token(512) == pytest.approx(6 * (layers + 0.15 * 768 * (768 + 30522)) + 12 * 12 * 768 * 512)
    assert bert.flops_per_token(512) < 6 * bert.matmul_parameters() + 12 * 12 * 768 * 512
    seen = 8 * 8192 + 14 * 129  # 8 of the 22 layers see all
    matmul = 22 * (4 * 768**2 + 3 * 768 * 1152) + 0.15 * 768 * (768 + 50368)
    assert modern.flops_per_token(8192) == pytest.approx(6 * matmul + 12 * 768 * seen)


def test_names_are_those_the_family_can_train() -> None:
    assert set(names(EncoderOptions)) == set(KNOWN)
    assert not set(names(LlamaOptions)) & set(KNOWN)
    assert known("microbert") == EncoderShape("prenorm", 30522, 16, 64, 6, 8, 128, 1e-12)


def test_overrides_and_what_follows_from_them() -> None:
    shape = resolve(
        options(hidden_size=96, num_attention_heads=6, num_layers=3, vocab_size=300, max_position_embeddings=64),
        context_length=64,
    )
    assert shape == EncoderShape("prenorm", 300, 96, 384, 3, 6, 64, 1e-12)  # 4 x the width, as it was
    assert resolve(options(hidden_size=96, intermediate_size=100), context_length=8) == replace(
        TINY, hidden_size=96, intermediate_size=100
    )
    assert resolve(options("microbert", hidden_size=24, num_attention_heads=12, num_layers=8), context_length=128) == (
        EncoderShape("prenorm", 30522, 24, 96, 8, 12, 128, 1e-12)
    )
    assert resolve(options(architecture="modern"), context_length=8) == replace(
        TINY, architecture="modern", norm_eps=1e-5
    )
    assert resolve(options("microbert"), context_length=300).max_position_embeddings == 300
    assert resolve(options(), context_length=64).max_position_embeddings == 512


@pytest.mark.parametrize(
    ("values", "context", "key"),
    [
        ({"hidden_size": 66}, 8, "model.num_attention_heads"),
        ({"hidden_size": 12, "architecture": "modern"}, 8, "model.num_attention_heads"),
        ({"max_position_embeddings": 64}, 65, "training.context_length"),
        ({"head_init_std": 0.1}, 8, "model.head_init_std"),
        ({"model_path": "lockstep/tiny"}, 8, "model.model_path"),
        ({"init": "pretrained"}, 8, "model.init"),
        ({"model_path": "bert-base-uncased", "init": "pretrained", "vocab_size": 40000}, 8, "model.init"),
        ({"model_path": "bert-base-uncased", "init": "pretrained", "num_layers": 2}, 8, "model.num_layers"),
        ({"model_path": "bert-base-uncased", "init": "pretrained", "architecture": "prenorm"}, 8, "model.init"),
        ({"model_path": "bert-base-uncased", "init": "pretrained"}, 513, "training.context_length"),
        ({"model_path": "bert-base-uncased", "init": "pretrained", "max_position_embeddings": 99}, 9, "model.init"),
    ],
)
def test_impossible_sizes_name_the_key(values: dict[str, object], context: int, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(options(**{"model_path": "lockstep/mlm-tiny", **values}), context_length=context)  # pyright: ignore
    assert caught.value.where == key


def test_the_other_family_is_refused_with_names_that_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))
    for path in ("bert-base-uncased", str(tmp_path)):
        with pytest.raises(ConfigError, match="another family") as caught:
            resolve(LlamaOptions(model_path=path, num_layers=1), context_length=8)
        assert "lockstep/tiny" in str(caught.value)
    with pytest.raises(NotFoundError, match="mlm-small"):
        resolve(options("mlm-smal"), context_length=8)


def test_rotary_positions_of_pretrained_weights_may_be_stretched() -> None:
    asked = options("ModernBERT-base", init="pretrained", max_position_embeddings=16384)
    assert resolve(asked, context_length=10000).max_position_embeddings == 16384


def test_a_small_head_is_said_and_trained() -> None:
    for heads, said in ((8, True), (2, False)):
        built = made("microbert", num_attention_heads=heads)
        assert any(notice.startswith("head size 2") for notice in built.notices) == said
        place = torch.tensor([1])
        built.model(torch.ones(1, 3, dtype=torch.long), place, places_M=place).backward()
        assert all(parameter.grad is not None for parameter in built.model.parameters())


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_states_are_counted_exactly(name: str) -> None:
    """Contract 170: within 15 % of weights, gradients and moments; here to the byte."""
    shape = KNOWN[name]
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in lay_out(shape, attention="native_math").parameters())
    memory = memory_bytes(shape, batch_size=2, context_length=64, dtype_name="bf16", checkpointing=False, compiled=True)
    assert memory.states == 16 * counted


@pytest.mark.parametrize(
    ("name", "rows", "length", "measured"), [("mlm-base", 64, 512, 12.1), ("mlm-modern", 16, 2048, 19.0)]
)
def test_the_estimate_is_the_peak_of_an_h200(name: str, rows: int, length: int, measured: float) -> None:
    """bf16, compiled, documents apart, AdamW: torch.cuda.max_memory_allocated in GiB."""
    sizes = {"batch_size": rows, "context_length": length}
    memory = memory_bytes(KNOWN[f"lockstep/{name}"], **sizes, dtype_name="bf16", checkpointing=False, compiled=True)
    assert memory.total / 2**30 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", ["bert-base-uncased", "Google-BERT/bert-base-uncased"])
def test_weights_are_asked_for_under_the_full_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def folder(path: str, **_: object) -> Path:
        asked.append(path)
        raise NotFoundError("offline")

    monkeypatch.setattr(hub, "weights_folder", folder)
    monkeypatch.setitem(encoder_shapes.KNOWN, "google-bert/bert-base-uncased", TINY)
    monkeypatch.setitem(shapes.KNOWN, "google-bert/bert-base-uncased", TINY)
    with pytest.raises(NotFoundError):
        made(name, init="pretrained")
    assert asked == ["google-bert/bert-base-uncased"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pretrained_and_truncated(architecture: str, tmp_path: Path) -> None:
    source = made(architecture=architecture, num_layers=4, init_std=0.1).model
    assert isinstance(source, Encoder)
    folder = tmp_path / "model"
    hf.export(source, source.shape, folder, dtype="fp32")
    whole = made(str(folder), init="pretrained").model
    expected = source.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole.state_dict().items())
    assert whole.state_dict().keys() == expected.keys()
    cut = made(str(folder), num_layers=2, init="pretrained-truncated")
    assert cut.model.state_dict().keys() < expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in cut.model.state_dict().items())
    assert any("first 2 layers" in notice for notice in cut.notices)
    with pytest.raises(ConfigError, match="pretrained-truncated"):
        made(str(folder), num_layers=2, init="pretrained")


def test_a_prenorm_export_says_who_reads_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = made().model
    hf.export(model, model.shape, tmp_path / "m", dtype="bf16")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["model_type"] == "lockstep_encoder"
    assert "transformers has no class" in config["note"]
    assert "transformers has no class" in caplog.text
    assert shapes.from_hf(config) == model.shape


def test_first_weights_by_kind() -> None:
    for name, parameter in made(architecture="bert", init_std=0.05).model.named_parameters():
        values = parameter.detach()
        if parameter.dim() == 2:
            rare = "type_embed" in name
            assert float(values.std()) == pytest.approx(0.05, rel=0.2 if rare else 0.05), name
        else:
            assert torch.equal(values, torch.full_like(values, 0.0 if name.endswith("bias") else 1.0)), name


def test_an_export_names_the_special_tokens_as_its_tokenizer_spells_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    marks = {"mask_token": "<mask>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**marks, "eos_token": "</s>"}))
    model = made(architecture="bert").model
    hf.export(model, model.shape, tmp_path / "m", dtype="fp32", tokenizer_file=tmp_path / "tokenizer.json")
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert {key: word for key, word in config.items() if key.endswith("_token")} == marks
