"""Sizes by name, from files and from the hub; parameter counts; memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError, NotFoundError
from lockstep.models import llama_shapes
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import KNOWN, LlamaShape, chunk_tokens, known, memory_bytes, resolve
from lockstep.runtime import hub

EIGHT = KNOWN["meta-llama/Llama-3.1-8B"]
TINY = KNOWN["lockstep/tiny"]
WEIGHTS = {"model_path": "TinyLlama/TinyLlama_v1.1"}  # a shape that has weights


def options(path: str = "lockstep/tiny", **values: object) -> LlamaOptions:
    return LlamaOptions.model_validate({"model_path": path, "num_layers": 2, **values})


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [
        ("meta-llama/Llama-3.1-8B", 32, 8_030_261_248),
        ("meta-llama/Llama-3.1-8B", 2, 1_486_901_248),
        ("meta-llama/Llama-3.1-8B-Instruct", 4, 1_923_125_248),
        ("meta-llama/Llama-3.2-1B", 16, 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 28, 3_212_749_824),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 22, 1_100_048_384),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, layers: int, count: int) -> None:
    assert replace(KNOWN[name], num_layers=layers).parameters() == count


def test_the_8b_formula_and_the_flops_of_the_production_shape() -> None:
    for n in (1, 7, 31):
        assert replace(EIGHT, num_layers=n).parameters() == 1_050_677_248 + n * 218_112_000
    production = replace(EIGHT, num_layers=4)
    assert production.matmul_parameters() == 4 * (41_943_040 + 176_160_768) + 128256 * 4096
    assert production.flops_per_token(8192) == pytest.approx(9.997e9, rel=1e-3)
    diffusion = replace(production, bidirectional=True)
    skipped = production.flops_per_token(8192) - diffusion.flops_per_token(8192)
    assert skipped == 0.5 * 6 * 128256 * 4096, "half of the tokens are hidden, and only they have logits"


@pytest.mark.parametrize("name", sorted(llama_shapes.KNOWN))
def test_every_known_shape_survives_the_hugging_face_form(name: str) -> None:
    shape = KNOWN[name]
    assert LlamaShape.from_hf(json.loads(json.dumps(shape.to_hf()))) == shape
    four = {key: value for key, value in shape.to_hf().items() if key != "rope_parameters"}
    five = {key: value for key, value in shape.to_hf().items() if key not in ("rope_theta", "rope_scaling")}
    assert LlamaShape.from_hf(four) == shape
    assert LlamaShape.from_hf(five) == shape


def test_names_in_any_case_with_or_without_owner() -> None:
    assert known("LLAMA-3.1-8b") is EIGHT
    assert known("Meta-Llama/llama-3.1-8B") is EIGHT
    assert known("tiny") is TINY
    assert known("other/tiny") is None


def test_overrides_act_and_layers_always_come_from_the_options() -> None:
    shape = resolve(
        options(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=100, vocab_size=300,
                num_layers=5, rope_theta=5e4, tie_word_embeddings=True, max_position_embeddings=64),
        context_length=64,
    )  # fmt: skip
    assert shape == LlamaShape(300, 96, 100, 5, 6, 3, 16, 64, 5e4, None, 1e-5, True)
    assert resolve(options("Llama-3.1-8B", num_layers=3), context_length=8192).num_layers == 3
    assert resolve(options("Llama-3.1-8B", rope_scaling="none"), context_length=8192).rope_scaling is None
    assert resolve(options(hidden_size=60, head_dim=32), context_length=8).head_dim == 32


@pytest.mark.parametrize(
    ("values", "context", "key"),
    [
        ({"num_key_value_heads": 3}, 8, "model.num_key_value_heads"),
        ({"hidden_size": 66}, 8, "model.num_attention_heads"),
        ({"head_dim": 15}, 8, "model.head_dim"),
        ({}, 2049, "training.context_length"),
        ({"tie_word_embeddings": True, "head_init_std": 0.1}, 8, "model.head_init_std"),
        ({**WEIGHTS, "init": "pretrained", "num_layers": 1}, 8, "model.num_layers"),
        ({**WEIGHTS, "init": "pretrained-truncated", "num_layers": 23}, 8, "model.num_layers"),
        ({**WEIGHTS, "init": "pretrained", "vocab_size": 600}, 8, "model.init"),
    ],
)
def test_impossible_sizes_name_the_key(values: dict[str, object], context: int, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(options(**values), context_length=context)
    assert caught.value.where == key
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT.to_hf()))
    assert resolve(options(str(tmp_path), num_layers=32), context_length=8) == EIGHT
    (tmp_path / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"config\.json"):
        resolve(options(str(tmp_path)), context_length=8)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral"},
        {"model_type": None},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"hidden_size": "64"},
        {"hidden_size": -64},
        {"vocab_size": None},
        {"rms_norm_eps": float("nan")},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_a_config_this_model_would_not_compute_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY.to_hf(), **change}))
    with pytest.raises(ConfigError):
        resolve(options(str(tmp_path)), context_length=8)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 200_000, '{"a": "\udc80"}'])
def test_an_unreadable_config_is_a_data_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError):
        resolve(options(str(tmp_path)), context_length=8)


def test_a_folder_that_brings_code_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))
    assert resolve(options(str(tmp_path)), context_length=8) == TINY
    assert caplog.text == ""
    (tmp_path / "config.json").write_text(json.dumps({**TINY.to_hf(), "auto_map": {"AutoModel": "evil.Model"}}))
    assert resolve(options(str(tmp_path)), context_length=8) == TINY
    assert f"{tmp_path} asks for code of its own (auto_map), which is never run" in caplog.text


@pytest.mark.parametrize("name", ["lockstep/llama-tiny", "Lockstep/tinny"])
def test_names_of_ours_are_never_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(NotFoundError, match=f"no model '{name}': not a known shape, not a folder") as caught:
        resolve(options(name), context_length=8)
    assert "lockstep/tiny, lockstep/demo, lockstep/small" in caught.value.hint
    assert caught.value.hint.startswith("did you mean 'lockstep/tiny'?")


@pytest.mark.parametrize("name", ["nobody/nothing", "lama-3.1-8b", "/no/such/folder", "a/b/c", "../x", "x/.."])
def test_what_is_not_there_is_one_message(name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve(options(name), context_length=8)
    assert caught.value.exit_code == ExitCode.NOT_FOUND
    assert name in str(caught.value)
    if name == "nobody/nothing":  # the only one that may ask the hub
        assert "HF_TOKEN" in str(caught.value)
    if name == "lama-3.1-8b":
        assert "Llama-3.1-8B" in str(caught.value)


def test_a_missing_hub_package_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LockstepError, match="pip install huggingface-hub"):
        hub.download("some/model", "config.json")


def test_shapes_need_no_torch() -> None:
    code = "import sys, lockstep.models.shapes, lockstep.runtime.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_states_are_16_bytes_a_parameter_and_the_rest_grows_with_the_batch() -> None:
    production = replace(EIGHT, num_layers=4)

    def estimate(batch: int, *, checkpointing: bool = False, compiled: bool = True) -> int:
        memory = memory_bytes(
            production, batch_size=batch, context_length=8192, dtype_name="bf16",
            checkpointing=checkpointing, compiled=compiled,
        )  # fmt: skip
        assert memory.states == 16 * production.parameters()
        return memory.total

    assert estimate(4, checkpointing=True) < estimate(4) < estimate(4, compiled=False)
    assert 40 * 2**30 < estimate(4) < 62 * 2**30  # torchtitan, same shape and batch: 60.5 GiB; our goal 42


def test_chunks_of_logits_are_large_only_where_they_are_in_place() -> None:
    assert [chunk_tokens(EIGHT.vocab_size, in_place=in_place) for in_place in (False, True)] == [2048, 8192]
    assert [chunk_tokens(512, in_place=in_place) for in_place in (False, True)] == [65536] * 2


@pytest.mark.parametrize("name", ["lockstep/tiny", "tiny", "Lockstep/Demo"])
@pytest.mark.parametrize("init", ["pretrained", "pretrained-truncated"])
def test_our_own_shapes_have_no_weights_and_no_hub_is_asked(
    name: str, init: str, in_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="a shape without weights") as caught:
        resolve(options(name, init=init), context_length=8)
    assert caught.value.exit_code == ExitCode.USAGE
    (in_dir / name).mkdir(parents=True)  # a folder of that name is what it is
    (in_dir / name / "config.json").write_text(json.dumps(TINY.to_hf()))
    assert resolve(options(name, init=init), context_length=8) == TINY
