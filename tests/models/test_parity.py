"""Our LLaMA is transformers' LLaMA: same logits, gradients, files and greedy words (science C1).

With the known mistakes it must fail: weights of std 0.2 and rows longer than the original context show them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.contracts import SampleOptions
from lockstep.models import hf
from lockstep.models.hf_names import their_names
from lockstep.models.initialise import initialise
from lockstep.models.layers import rope_frequencies
from lockstep.models.llama import Llama
from lockstep.models.shapes import KNOWN, LlamaShape, RopeScaling
from lockstep.objectives.causal import Causal

transformers = pytest.importorskip("transformers")

BASE = LlamaShape(
    512, 64, 176, 3, 8, 2, 8, 256, 10000.0, RopeScaling(8.0, 1.0, 4.0, 64), rms_norm_eps=1e-5, bos=1, eos=(2,)
)
VARIANTS = {
    "untied": BASE,
    "tied": replace(BASE, tied=True),
    "wide-heads": replace(BASE, head_dim=16),
    "plain-rope": replace(BASE, rope_scaling=None, num_kv_heads=8),
    "odd-factor": replace(BASE, rope_scaling=RopeScaling(5.3, 1.1, 3.7, 48), rope_theta=500000.0),
}


@dataclass
class Pair:
    """The same weights twice."""

    theirs: Any
    ours: Llama
    folder: Path
    ids: Tensor


def make_pair(shape: LlamaShape, folder: Path, dtype: torch.dtype = torch.float32) -> Pair:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**shape.to_hf(), initializer_range=0.2)
    theirs = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.to(dtype).save_pretrained(folder, max_shard_size="100KB" if shape.tied else "5GB")
    ours = Llama(shape, attention="native_flash")
    hf.import_weights(ours, folder, truncated=False)
    return Pair(theirs.eval(), ours, folder, torch.randint(0, 512, (4, 201)))


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(VARIANTS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(BASE, tmp_path_factory.mktemp("control"))


def logit_error(ours: Llama, pair: Pair) -> float:
    with torch.no_grad():
        return float((ours(pair.ids) - pair.theirs(pair.ids).logits).abs().max())


def test_logits(pair: Pair) -> None:
    assert logit_error(pair.ours, pair) < 1e-5


def test_loss_sum_and_every_gradient(pair: Pair) -> None:
    inputs, targets = pair.ids[:, :-1], pair.ids[:, 1:]
    ours = pair.ours(inputs, targets)
    logits = pair.theirs(inputs).logits
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    pair.ours.zero_grad()
    pair.theirs.zero_grad()
    ours.backward()
    theirs.backward()
    reference = dict(pair.theirs.named_parameters())
    for name, parameter in pair.ours.named_parameters():
        expected = reference[their_names(pair.ours.shape, name)[0]].grad
        assert parameter.grad is not None
        worst = float((parameter.grad - expected).abs().max() / expected.abs().max())
        assert worst < 1e-4, name


def test_the_known_mistakes_are_seen(untied: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_shape(shape: LlamaShape) -> Llama:
        model = Llama(shape, attention="native_math")
        hf.import_weights(model, untied.folder, truncated=False)
        return model

    assert logit_error(with_shape(BASE), untied) < 1e-4  # another kernel is still the same model
    assert logit_error(with_shape(replace(BASE, rope_scaling=None)), untied) > 0.1
    assert logit_error(with_shape(replace(BASE, rms_norm_eps=1e-3)), untied) > 1e-4
    assert logit_error(with_shape(replace(BASE, rope_theta=20000.0)), untied) > 0.1

    def tiled(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1), is_causal=True)

    monkeypatch.setattr("lockstep.models.layers.attend", tiled)
    assert logit_error(with_shape(BASE), untied) > 0.1


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "lockstep/tiny"])
def test_rotary_frequencies_are_bit_equal(name: str) -> None:
    with torch.device("meta"):  # the sizes do not matter, the frequencies are made on the CPU
        config = transformers.LlamaConfig(**KNOWN[name].to_hf())
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert torch.equal(rope_frequencies(KNOWN[name]), rotary.inv_freq)


def test_export_loads_in_transformers(pair: Pair, tmp_path: Path) -> None:
    for limit, files in ((5 << 30, 1), (100_000, 3)):
        folder = tmp_path / f"out{limit}"
        hf.export(pair.ours, pair.ours.shape, folder, dtype="fp32", tokenizer_file=None, max_shard_bytes=limit)
        assert len(list(folder.glob("*.safetensors"))) >= files
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.equal(loaded(pair.ids).logits, pair.theirs(pair.ids).logits)


def test_bf16_comes_back_byte_for_byte(tmp_path: Path) -> None:
    for name, shape in (("one", BASE), ("sharded-tied", replace(BASE, tied=True))):
        pair = make_pair(shape, tmp_path / name, torch.bfloat16)
        assert all(parameter.dtype == torch.float32 for parameter in pair.ours.parameters())
        hf.export(pair.ours, shape, tmp_path / f"{name}-out", dtype="bf16", tokenizer_file=None)
        assert raw_tensors(tmp_path / f"{name}-out") == raw_tensors(tmp_path / name)
        assert ("lm_head.weight" in raw_tensors(tmp_path / f"{name}-out")) is not shape.tied
        assert json.loads((tmp_path / f"{name}-out" / "config.json").read_text())["dtype"] == "bfloat16"


def raw_tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every tensor's dtype and bytes, read without safetensors."""
    found: dict[str, tuple[str, bytes]] = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], content[start + begin : start + end])
    return found


def test_greedy_words_are_the_same(pair: Pair) -> None:
    prompt = pair.ids[:1, :9]
    config = transformers.GenerationConfig(max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None)
    theirs = pair.theirs.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    ours = Causal().sample(pair.ours, prompt[0].tolist(), SampleOptions(tokens=32, temperature=0.0))
    assert ours == theirs[0, 9:].tolist()
    assert len(set(ours)) > 5  # not one word over and over


def test_bf16_autocast_stays_close() -> None:
    model = Llama(replace(BASE, num_layers=2), attention="native_flash")
    initialise(model, seed=0, std=0.1)
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
    exact = model(ids, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(ids, ids)
    assert rough.dtype == torch.float32
    assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=2e-2)
