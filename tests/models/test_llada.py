"""A LLaDA is a LLaMA that looks both ways, under other names (science 3.5): parity, files, and its own ways of asking.

The reference is transformers' LLaMA given an additive mask of zeros, which then attends in both directions.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.errors import DataError, LockstepError
from lockstep.models import attention, hf, layers
from lockstep.models.build import Built, build
from lockstep.models.initialise import initialise
from lockstep.models.llada_shapes import KNOWN
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import LlamaShape
from lockstep.models.options import LladaOptions
from lockstep.models.shapes import resolve

transformers = pytest.importorskip("transformers")

ROWS, WIDTH, LAYERS = 131, 64, 3
CONFIG = {  # every key of the published config.json, other sizes
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig", "AutoModel": "modeling_llada.LLaDAModelLM"},
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": WIDTH,
    "embedding_dropout": 0.0, "embedding_size": ROWS, "eos_token_id": 2, "flash_attention": False,
    "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta",
    "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
    "layer_norm_with_affine": True, "mask_token_id": 130, "max_sequence_length": 96, "mlp_hidden_size": 160,
    "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4,
    "n_layers": LAYERS, "pad_token_id": 2, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False,
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": 129, "weight_tying": False,
}  # fmt: skip
OTHERS = {  # of these an export has another value or none
    "auto_map", "transformers_version", "vocab_size", "init_fn", "init_device", "precision", "alibi_bias_max",
    "attention_layer_norm_with_affine", "init_cutoff_factor", "mlp_ratio",
}  # fmt: skip
KEPT = set(CONFIG) - OTHERS
NAMES = {  # as science 3.5 has them, of LLaMA's
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
IDS = torch.randint(0, 129, (3, 41), generator=torch.Generator().manual_seed(3))
BOTH_WAYS = torch.zeros(3, 1, 41, 41)


def llada_name(theirs: str) -> str:
    stem = theirs.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"model.transformer.blocks.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[stem]}.weight"


def reference(**changes: Any) -> Any:
    """A LLaMA with weights large enough for attention to matter."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=ROWS, hidden_size=WIDTH, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=4,
        rms_norm_eps=1e-5, rope_theta=500000.0, initializer_range=0.2, max_position_embeddings=96, **changes,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs


def write(theirs: Any, folder: Path, *, dtype: torch.dtype = torch.float32, files: int = 2, **changes: Any) -> Path:
    """A folder as the authors publish it: an index, several files, and code that nobody is to run."""
    folder.mkdir()
    tensors = {llada_name(name): each.detach().to(dtype).clone() for name, each in theirs.named_parameters()}
    where: dict[str, str] = {}
    for number in range(files):
        part = dict(list(tensors.items())[number::files])
        where |= dict.fromkeys(part, file := f"model-{number + 1:05d}-of-{files:05d}.safetensors")
        save_file(part, folder / file)
    (folder / hf.INDEX_FILE).write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    for name in ("modeling_llada.py", "configuration_llada.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w'); raise SystemExit('foreign code ran')")
    return folder


def built(folder: Path | str, *, init: str = "pretrained", dtype_name: str = "fp32", **values: Any) -> Built:
    options = LladaOptions.model_validate({"model_path": str(folder), "init": init, **values})
    return build(
        options, resolve(options, context_length=41), device=torch.device("cpu"), dtype_name=dtype_name, seed=1,
        checkpointing=False, deterministic=False, debug=False,
    )  # fmt: skip


def load(folder: Path | str, **values: Any) -> Llama:
    model = built(folder, **values).model
    assert isinstance(model, Llama)
    return model.eval()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return reference()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(theirs, tmp_path_factory.mktemp("llada") / "m")


@torch.no_grad()
def distance(ours: Tensor, theirs: Any, mask: Tensor | None = BOTH_WAYS) -> float:
    return float((ours - theirs(IDS, attention_mask=mask).logits).abs().max())


# ----------------------------------------------------------------------------------------------------------- parity


def test_a_checkpoint_under_the_authors_names_is_that_model(theirs: Any, folder: Path) -> None:
    model = load(folder)
    assert model.shape.bidirectional
    assert model.shape.mask == 130
    with torch.no_grad():
        logits = model(IDS)
    assert distance(logits, theirs) < 1e-5
    assert distance(logits, theirs, None) > 0.1  # causal: another model
    causal = Llama(replace(model.shape, bidirectional=False), attention="native_math")
    causal.load_state_dict(model.state_dict())
    assert distance(causal(IDS).detach(), theirs) > 0.1


def test_every_gradient_is_theirs(theirs: Any, folder: Path) -> None:
    model = load(folder)
    logits = theirs(IDS, attention_mask=BOTH_WAYS).logits
    theirs.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), IDS.flatten(), reduction="sum").backward()
    model(IDS, IDS).backward()
    expected = {llada_name(name): each.grad for name, each in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        (stored,) = hf.their_names(model.shape, name)
        assert parameter.grad is not None
        assert float((parameter.grad - expected[stored]).norm() / expected[stored].norm()) < 1e-5, name


def test_the_two_called_ff_out_are_not_each_other(theirs: Any, folder: Path) -> None:
    model = load(folder)
    assert torch.equal(model.output.weight, theirs.lm_head.weight)
    for ours, layer in zip(model.layers, theirs.model.layers, strict=True):
        assert torch.equal(ours.mlp.w2.weight, layer.mlp.down_proj.weight)


def test_grouped_heads_and_a_tied_head(tmp_path: Path) -> None:
    other = reference(num_key_value_heads=2, tie_word_embeddings=True)
    model = load(write(other, tmp_path / "m", n_kv_heads=2, weight_tying=True))
    assert model.output is None
    assert distance(model(IDS).detach(), other) < 1e-5
    tensors = load_file(tmp_path / "m" / "model-00001-of-00002.safetensors")
    head = other.lm_head.weight.detach().clone()  # files of the authors' class may have it twice
    for change, refused in ((0.0, False), (1.0, True)):
        save_file({**tensors, "model.transformer.ff_out.weight": head + change}, tmp_path / "m" / "head.safetensors")
        index = json.loads((tmp_path / "m" / hf.INDEX_FILE).read_text())
        index["weight_map"]["model.transformer.ff_out.weight"] = "head.safetensors"
        (tmp_path / "m" / hf.INDEX_FILE).write_text(json.dumps(index))
        if refused:
            with pytest.raises(DataError, match="tied"):
                load(tmp_path / "m")
        else:
            assert load(tmp_path / "m").output is None


def test_foreign_code_is_named_and_never_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "asks for code of its own (auto_map), which is never run" in caplog.text
    assert not (folder / "ran").exists()


# ------------------------------------------------------------------------------------------------------------ files


def test_bf16_files_come_back_bit_for_bit(theirs: Any, tmp_path: Path) -> None:
    source = write(theirs, tmp_path / "in", dtype=torch.bfloat16)
    model = load(source)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for limit, files in ((5 << 30, 1), (60_000, 3)):
        out = tmp_path / f"out{files}"
        hf.export(model, model.shape, out, dtype="bf16", max_shard_bytes=limit)
        written = {name: each for file in out.glob("*.safetensors") for name, each in load_file(file).items()}
        before = {name: each for file in source.glob("*.safetensors") for name, each in load_file(file).items()}
        assert len(list(out.glob("*.safetensors"))) >= files
        assert set(written) == set(before) == {llada_name(name) for name, _ in theirs.named_parameters()}
        assert all(torch.equal(written[name], before[name]) for name in before)
        again = load(out)
        assert again.shape == model.shape
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in KEPT} == {key: CONFIG[key] for key in KEPT}
    assert config["dtype"] == "bfloat16"
    assert "note" not in config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.transformer.ff_out.weight": None}, r"missing: model\.transformer\.ff_out\.weight"),
        ({"model.transformer.blocks.1.ff_out.weight": None}, r"missing: model\.transformer\.blocks\.1\.ff_out\.weight"),
        ({"model.transformer.wpe.weight": torch.zeros(96, WIDTH)}, r"no place: model\.transformer\.wpe\.weight"),
        ({"model.transformer.blocks.0.q_proj.bias": torch.zeros(WIDTH)}, r"no place: .*q_proj\.bias"),
        ({"model.transformer.blocks.3.ff_norm.weight": torch.zeros(WIDTH)}, "pretrained-truncated"),
        ({"model.transformer.wte.weight": torch.zeros(130, WIDTH)}, r"wte\.weight is \(130, 64\).*\(131, 64\)"),
        ({"model.transformer.ff_out.weight": torch.zeros(WIDTH, 160)}, r"\(64, 160\)"),  # a block's in the head's place
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(
    theirs: Any, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    source = write(theirs, tmp_path / "m", files=1)
    (file,) = source.glob("*.safetensors")
    tensors: dict[str, Any] = {**load_file(file), **change}
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, file)
    (source / hf.INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(kept, file.name)}))
    with pytest.raises(DataError, match=message):
        load(source)


def test_a_truncated_file_is_one_message(theirs: Any, tmp_path: Path) -> None:
    source = write(theirs, tmp_path / "m")
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(LockstepError, match="00002-of-00002"):
        load(source)


def test_the_first_layers_alone(theirs: Any, folder: Path) -> None:
    cut = built(folder, init="pretrained-truncated", num_layers=1)
    assert torch.equal(cut.model.layers[0].mlp.w2.weight, theirs.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(cut.model.output.weight, theirs.lm_head.weight)
    assert any("the first 1 layers" in notice for notice in cut.notices)


# ----------------------------------------------------------------------------------------------------------- asking


@pytest.fixture(scope="module")
def double() -> Llama:
    """Our own small shape in fp64."""
    return load("lockstep/llada-tiny", init="random", dtype_name="fp64", init_std=0.2, num_key_value_heads=2)


WORDS = torch.randint(1, 500, (4, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kernels_agree_in_both_directions(double: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        expected = double(WORDS)
        for name in ("native_math", "native_flash"):
            other = Llama(double.shape, attention=name).double()
            other.load_state_dict(double.state_dict())
            other.rebuild_buffers()  # in fp64 too
            assert float((other(WORDS) - expected).abs().max()) < 1e-10
    # Flex has no backward pass on the CPU: its own code, uncompiled, with the mask that training would give it.
    asked: list[Any] = []

    def flex(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, **_: Any) -> Tensor:
        asked.append(mask)
        grouped = q.shape[1] // k.shape[1]
        k, v = (each.detach().repeat_interleave(grouped, 1) for each in (k, v))
        return attention.flex_attention(q.detach(), k, v, block_mask=mask)  # pyright: ignore[reportReturnType]

    monkeypatch.setattr(layers, "attend", flex)
    monkeypatch.setattr(double, "attention", "flex")
    assert float((double(WORDS).detach() - expected).abs().max()) < 1e-6
    assert all(mask is not None for mask in asked)
    monkeypatch.setattr(double, "shape", replace(double.shape, bidirectional=False))
    assert float((double(WORDS).detach() - expected).abs().max()) > 0.1  # the causal mask


def test_padding_on_the_left_changes_nothing(double: Llama) -> None:
    lengths, width = (33, 20, 7, 1), 33
    rows = torch.full((4, width), 9)
    documents = torch.zeros(4, width, dtype=torch.int32)
    for row, length in enumerate(lengths):
        rows[row, width - length :] = WORDS[row, :length]
        documents[row, width - length :] = 1
    with torch.no_grad():
        padded, blind = double(rows, documents_BL=documents), double(rows)
        for row, length in enumerate(lengths):
            alone = double(WORDS[row : row + 1, :length])[0]
            assert float((padded[row, width - length :] - alone).abs().max()) < 1e-9
            assert length == width or float((blind[row, width - length :] - alone).abs().max()) > 0.1


def test_places_are_the_rows_of_all_logits(double: Llama) -> None:
    places = torch.tensor([131, 0, 5, 77, 5])
    targets, weights = WORDS.flatten()[places], torch.tensor([1.0, 0.5, 1000.0, 0.0, 3.0], dtype=torch.float64)
    logits = double(WORDS).flatten(0, 1)[places]
    with torch.no_grad():
        assert torch.allclose(double(WORDS, places_M=places), logits, rtol=1e-12)
    losses = F.cross_entropy(logits, targets, reduction="none")
    total = double(WORDS, targets, weights, places_M=places)
    assert float((total - (losses * weights).sum()).detach().abs()) < 1e-8
    parameters = list(double.parameters())
    for ours, expected in zip(
        torch.autograd.grad(total, parameters), torch.autograd.grad((losses * weights).sum(), parameters), strict=True
    ):
        assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)
    found, correct = double(WORDS, targets, places_M=places, per_target=True)
    assert torch.allclose(found, losses.detach(), rtol=1e-12)
    assert torch.equal(correct, logits.argmax(-1) == targets)


def test_no_place_at_all_is_zero_with_a_gradient(double: Llama) -> None:
    """Contract 112: a row with nothing masked."""
    none = torch.zeros(0, dtype=torch.int64)
    total = double(WORDS, none, none.double(), places_M=none)
    assert float(total.detach()) == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(total, list(double.parameters())))


def test_a_forbidden_id_is_forbidden_everywhere(double: Llama) -> None:
    """The same in logits, loss, scores and counts; the gradient knows nothing of the forbidden row."""
    places = torch.arange(0, 132, 3)
    targets = WORDS.flatten()[places]
    with torch.no_grad():
        plain = double(WORDS, places_M=places)
    bias = torch.zeros(512)
    bias[plain.argmax(-1)[: len(places) // 2].unique()] = -torch.inf
    bias[targets] = 0
    with torch.no_grad():
        logits = double(WORDS, places_M=places, logit_bias_V=bias)
        losses = F.cross_entropy(logits, targets, reduction="none")
        scored, correct = double(WORDS, targets, places_M=places, logit_bias_V=bias, per_target=True)
        total, count = double(WORDS, targets, places_M=places, logit_bias_V=bias, count_correct=True)
        whole = double(WORDS, logit_bias_V=bias).flatten(0, 1)[places]
    assert torch.equal(logits, plain + bias)
    assert torch.allclose(whole, logits, rtol=1e-12)
    assert torch.allclose(scored, losses, rtol=1e-12)
    assert torch.equal(correct, logits.argmax(-1) == targets)
    assert not torch.equal(logits.argmax(-1), plain.argmax(-1))
    assert float(total) == pytest.approx(float(losses.sum()), rel=1e-9)
    assert int(count) == int(correct.sum())
    trained = double(WORDS, targets, torch.ones(len(places)).double(), places_M=places, logit_bias_V=bias)
    assert float(trained.detach()) == pytest.approx(float(losses.sum()), rel=1e-9)
    assert float((trained.detach() - F.cross_entropy(plain, targets, reduction="sum")).abs()) > 0.1
    assert double.output is not None
    (gradient,) = torch.autograd.grad(trained, [double.output.weight])
    forbidden = bias == -torch.inf
    assert forbidden.any()
    assert not gradient[forbidden].any()
    assert gradient[~forbidden].any(1).all()


def test_first_weights_and_first_loss() -> None:
    """G6's rule at a size for the CPU: ln V + d std^2 / 2; the way back of each branch is quieter if asked."""
    shape = LlamaShape(4096, 128, 256, 4, 4, 4, 32, 128, 1e4, layout="llada", bidirectional=True, mask=4095)
    model = Llama(shape, attention="native_math")
    initialise(model, seed=0, std=0.02, depth_scaled=True)
    assert float(model.layers[0].mlp.w2.weight.detach().std()) == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert float(model.layers[0].mlp.w1.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    ids = torch.randint(0, 4095, (8, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = float(model(torch.full_like(ids, 4095), ids)) / ids.numel()
    assert loss == pytest.approx(shape.first_loss(0.02), abs=0.05)
    assert KNOWN["GSAI-ML/LLaDA-8B-Base"].first_loss(0.02) == pytest.approx(12.57, abs=0.005)
