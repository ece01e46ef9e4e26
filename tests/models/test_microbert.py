"""Weights under seed C's names and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError, DataError, NotFoundError
from lockstep.models.build import build
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import EPS, KNOWN
from lockstep.models.initialise import initialise
from lockstep.models.microbert import load_seed, read, seed_names
from lockstep.models.options import EncoderOptions
from lockstep.models.shapes import resolve


def made(architecture: str, seed: int = 1) -> Encoder:
    sizes = {"num_layers": 3, "vocab_size": 99, "num_heads": 4, "norm_eps": EPS[architecture]}
    shape = replace(KNOWN["lockstep/microbert"], architecture=architecture, **sizes)
    model = Encoder(shape, attention="native_math")
    initialise(model, seed=seed, std=0.1)
    return model


@pytest.mark.parametrize("architecture", ["prenorm", "bert", "modern"])
def test_round_trip_through_a_file(architecture: str, tmp_path: Path) -> None:
    source = made(architecture)
    torch.save(seed_names(source), tmp_path / "mlm_model.pth")
    state = torch.load(tmp_path / "mlm_model.pth", weights_only=True)
    assert {name.partition(".")[0] for name in state} == {"embedding", "encoder", "mlm_head"}
    assert state["mlm_head.weight"].shape == (99, 16)
    assert state["mlm_head.bias"].shape == (99,)
    assert {int(name.split(".")[2]) for name in state if name.startswith("encoder.layers.")} == {0, 1, 2}
    other = made(architecture, seed=2)
    load_seed(other, state)
    expected = source.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
    load_seed(other, {f"module.{name}": tensor for name, tensor in state.items()})  # as DDP would have saved it


def test_gathered_weights_are_used_where_given() -> None:
    model = made("prenorm")
    gathered = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    assert all(not tensor.any() for tensor in seed_names(model, gathered).values())


def test_what_does_not_fit_is_named() -> None:
    model = made("prenorm")
    state = seed_names(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for change, message in (
        ({"encoder.extra": torch.zeros(1)}, r"encoder\.extra"),
        ({"encoder.norm.weight": torch.zeros(17)}, r"encoder\.norm\.weight is \(17,\), the model needs \(16,\)"),
        ({"mlm_head.weight": torch.zeros(99, 16)}, "tied"),
    ):
        with pytest.raises(DataError, match=message):
            load_seed(model, {**state, **change})
    with pytest.raises(DataError, match=r"1 names differ.*mlm_head\.bias"):
        load_seed(model, {name: tensor for name, tensor in state.items() if name != "mlm_head.bias"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def imported(folder: Path, *, context: int = 16, **values: object) -> Encoder:
    """A model as `model.init=pretrained model.model_path=FOLDER` makes it."""
    usual = {"init": "pretrained", "model_path": str(folder), "attention_backend": "native_math"}
    options = EncoderOptions.model_validate({**usual, **values})
    model = build(
        options, resolve(options, context_length=context), device=torch.device("cpu"), dtype_name="fp32", seed=5,
        checkpointing=False, deterministic=False, debug=False,
    ).model  # fmt: skip
    assert isinstance(model, Encoder)
    return model


@pytest.mark.parametrize("architecture", ["prenorm", "bert", "modern"])
@pytest.mark.parametrize("metadata", [True, False])
def test_a_result_folder_is_a_model_path(architecture: str, metadata: bool, tmp_path: Path) -> None:
    """Item 163. The file tells its sizes; one that was written again by others tells all but the heads."""
    source = made(architecture)
    state = seed_names(source)
    torch.save(state if metadata else dict(state), tmp_path / "mlm_model.pth")
    if not metadata:
        with pytest.raises(ConfigError, match="how many heads") as caught:
            imported(tmp_path)
        assert caught.value.where == "model.num_attention_heads"
    heads = {} if metadata else {"num_attention_heads": 4}
    model = imported(tmp_path, **heads)
    expected = source.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    words = torch.arange(16)[None]
    assert torch.equal(model.eval()(words), source.eval()(words)), "the heads too"
    if metadata:
        assert model.shape == source.shape
        with pytest.raises(ConfigError, match="num_heads 8 differs"):
            imported(tmp_path, num_attention_heads=8)
    cut = imported(tmp_path, **heads, num_layers=2, init="pretrained-truncated")
    assert len(cut.layers) == 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in cut.state_dict().items())


def test_folders_and_files_that_are_something_else(tmp_path: Path) -> None:
    file = tmp_path / "mlm_model.pth"
    with pytest.raises(NotFoundError, match=r"neither config\.json nor mlm_model\.pth"):
        imported(tmp_path)
    torch.save({"embedding.words.weight": torch.zeros(9, 4), "encoder.0.weight": torch.zeros(4, 4)}, file)
    with pytest.raises(DataError, match="not those of an encoder that lockstep trains"):
        imported(tmp_path)
    with pytest.raises(NotFoundError, match="is a file") as caught:
        imported(file)
    assert str(tmp_path) in caught.value.hint
    for content in (b"", b"nonsense", b"\x80\x02cos\nsystem\n(S'touch harm'\ntR."):
        file.write_bytes(content)
        with pytest.raises(DataError, match="foreign or damaged file"):
            read(file)
    torch.save([torch.zeros(1)], file)
    with pytest.raises(DataError, match="not a dictionary of tensors"):
        read(file)
