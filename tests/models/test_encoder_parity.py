"""Our encoders are transformers' BertForMaskedLM and ModernBertForMaskedLM: same logits, gradients and files.

With the known mistakes it must fail: weights of std 0.2, norms and biases away from 1 and 0, rows that are padded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.errors import ConfigError, DataError
from lockstep.models import hf, shapes
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import EncoderShape
from lockstep.models.hf_names import their_names

transformers = pytest.importorskip("transformers")

LENGTHS = (40, 33, 7, 1)  # of the rows; the rest of the 40 is padding
SHAPES = {
    "bert": EncoderShape("bert", 131, 64, 160, 3, 4, 48, 1e-12),
    "bert-types": EncoderShape("bert", 131, 48, 96, 2, 6, 40, 1e-6, types=3, pad=2),
    "modern": EncoderShape("modern", 131, 64, 96, 5, 4, 64, 1e-5, local_attention=8, pad=0, bos=1, eos=(2,)),
    "modern-odd": EncoderShape(
        "modern", 131, 48, 80, 4, 6, 64, 1e-4, rope_theta=5000.0, local_rope_theta=50.0, local_attention=13,
        global_every=2, pad=1, bos=2, eos=(3,),
    ),
}  # fmt: skip
CLASSES = {
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
    "modern": (transformers.ModernBertConfig, transformers.ModernBertForMaskedLM),
}


@dataclass
class Pair:
    """The same weights twice, and rows with padding."""

    theirs: Any
    ours: Encoder
    folder: Path
    ids: Tensor
    documents: Tensor  # 1, and 0 at padding


def make_pair(shape: EncoderShape, folder: Path) -> Pair:
    torch.manual_seed(5)
    make_config, make_model = CLASSES[shape.architecture]
    theirs = make_model(make_config(**shape.to_hf(), initializer_range=0.2))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.2)
    theirs.eval().save_pretrained(folder)
    ours = Encoder(shape, attention="native_flash").eval()
    hf.import_weights(ours, folder, truncated=False)
    ids = torch.randint(5, 131, (4, 40))
    documents = (torch.arange(40) < torch.tensor(LENGTHS)[:, None]).int()
    assert shape.pad is not None
    return Pair(theirs, ours, folder, torch.where(documents == 1, ids, shape.pad), documents)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(SHAPES[request.param], tmp_path_factory.mktemp(request.param))


def their_logits(pair: Pair) -> Tensor:
    return pair.theirs(pair.ids, attention_mask=pair.documents).logits


def logit_error(ours: Encoder, pair: Pair) -> float:
    with torch.no_grad():
        difference = ours(pair.ids, documents_BL=pair.documents) - their_logits(pair)
    return float(difference[pair.documents == 1].abs().max())


def test_logits(pair: Pair) -> None:
    assert logit_error(pair.ours, pair) < 1e-5


def test_logits_without_padding(pair: Pair) -> None:
    ids = pair.ids[:1]
    with torch.no_grad():
        assert float((pair.ours(ids) - pair.theirs(ids).logits).abs().max()) < 1e-5


def test_loss_sum_and_every_gradient(pair: Pair) -> None:
    places = (pair.documents.flatten() == 1).nonzero().flatten()[::3]
    targets = torch.randint(5, 131, places.shape)
    ours = pair.ours(pair.ids, targets, places_M=places, documents_BL=pair.documents)
    theirs = F.cross_entropy(their_logits(pair).flatten(0, 1)[places], targets, reduction="sum")
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    pair.ours.zero_grad()
    pair.theirs.zero_grad()
    ours.backward()
    theirs.backward()
    reference = dict(pair.theirs.named_parameters())
    for name, parameter in pair.ours.named_parameters():
        expected = torch.cat([reference[their].grad for their in their_names(pair.ours.shape, name)])
        assert parameter.grad is not None
        worst = float((parameter.grad - expected).abs().max() / expected.abs().max())
        assert worst < 1e-4, name


MISTAKES: dict[str, list[dict[str, Any]]] = {
    "bert": [{"norm_eps": 1e-2}],
    "modern": [
        {"local_attention": 10}, {"global_every": 2}, {"rope_theta": 10000.0}, {"local_rope_theta": 160000.0},
        {"norm_eps": 1e-2},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_the_known_mistakes_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(SHAPES[name], tmp_path / "m")

    def with_shape(shape: EncoderShape) -> Encoder:
        model = Encoder(shape, attention="native_math").eval()
        hf.import_weights(model, pair.folder, truncated=False)
        return model

    assert logit_error(with_shape(SHAPES[name]), pair) < 1e-4  # another kernel is still the same model
    for change in MISTAKES[name]:
        assert logit_error(with_shape(replace(SHAPES[name], **change)), pair) > 1e-2, change
    monkeypatch.setattr(F, "gelu", lambda x: F.silu(x * 1.702) / 1.702)  # the quick one
    assert logit_error(with_shape(SHAPES[name]), pair) > 1e-2
    monkeypatch.undo()
    monkeypatch.setattr("lockstep.models.encoder.document_mask", lambda *_, **__: None)
    assert logit_error(with_shape(SHAPES[name]), pair) > 1e-2  # padding is seen


def test_export_loads_in_transformers(pair: Pair, tmp_path: Path) -> None:
    hf.export(pair.ours, pair.ours.shape, tmp_path / "out", dtype="fp32")
    make_model = CLASSES[pair.ours.shape.architecture][1]
    loaded, info = make_model.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        theirs = loaded.eval()(pair.ids, attention_mask=pair.documents).logits
    assert torch.equal(theirs, their_logits(pair).detach())
    auto = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(auto) is type(loaded)


def test_their_files_come_back_bit_for_bit(pair: Pair, tmp_path: Path) -> None:
    hf.export(pair.ours, pair.ours.shape, tmp_path / "out", dtype="fp32")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", pair.folder))
    assert set(ours) <= set(theirs) <= set(ours) | {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert shapes.from_hf(json.loads((pair.folder / "config.json").read_text())) == pair.ours.shape


def test_bert_files_of_all_ages(tmp_path: Path) -> None:
    """The first ones say gamma and beta, and hold what a masked-LM has no use for."""
    pair = make_pair(SHAPES["bert"], tmp_path / "m")
    file = pair.folder / "model.safetensors"
    tensors = {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
               for name, tensor in load_file(file).items()}  # fmt: skip
    unused = {
        "bert.pooler.dense.weight": torch.zeros(64, 64), "bert.pooler.dense.bias": torch.zeros(64),
        "cls.seq_relationship.weight": torch.zeros(2, 64), "cls.seq_relationship.bias": torch.zeros(2),
        "bert.embeddings.position_ids": torch.arange(48)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
    }  # fmt: skip
    save_file(tensors | unused, file)
    again = Encoder(pair.ours.shape, attention="native_flash").eval()
    hf.import_weights(again, pair.folder, truncated=False)
    assert logit_error(again, pair) < 1e-5
    save_file(tensors | unused | {"bert.extra.weight": torch.zeros(1)}, file)
    with pytest.raises(DataError, match=r"no place: bert\.extra\.weight"):
        hf.import_weights(again, pair.folder, truncated=False)
    gone = "bert.encoder.layer.1.attention.self.key.bias"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file)
    with pytest.raises(DataError, match=f"missing: {gone}"):
        hf.import_weights(again, pair.folder, truncated=False)
    save_file(tensors | {"cls.predictions.decoder.weight": torch.zeros(131, 64)}, file)
    with pytest.raises(DataError, match="tied"):
        hf.import_weights(again, pair.folder, truncated=False)


def test_configs_of_transformers_4_and_5(tmp_path: Path) -> None:
    for name in ("modern", "modern-odd"):
        shape = SHAPES[name]
        tree = shape.to_hf()
        four = {key: value for key, value in tree.items() if key not in ("layer_types", "rope_parameters")}
        five = {key: value for key, value in tree.items()
                if key not in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")}  # fmt: skip
        assert shapes.from_hf(four) == shapes.from_hf(five) == shape
        for spelling in (four, five):
            config = transformers.ModernBertConfig(**spelling)
            assert config.layer_types == tree["layer_types"]
            assert config.rope_parameters == tree["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", {"hidden_act": "relu"}),
        ("bert", {"is_decoder": True}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"tie_word_embeddings": False}),
        ("bert", {"num_attention_heads": 5}),
        ("modern", {"norm_bias": True}),
        ("modern", {"decoder_bias": False}),
        ("modern", {"hidden_activation": "silu"}),
        ("modern", {"layer_types": ["full_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2}),
        ("modern", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}),
    ],
)
def test_a_config_this_model_would_not_compute_is_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        shapes.from_hf({**SHAPES[name].to_hf(), **change})
