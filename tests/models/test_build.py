"""From options to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.errors import ConfigError, NotFoundError
from lockstep.models import hf
from lockstep.models.build import Built, build
from lockstep.models.layers import rope_frequencies
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve

CPU = torch.device("cpu")


def made(*, debug: bool = False, checkpointing: bool = False, seed: int = 5, **values: object) -> Built:
    options = LlamaOptions.model_validate({"model_path": "lockstep/tiny", "num_layers": 2, **values})
    return build(
        options, resolve(options, context_length=64), device=CPU, dtype_name="fp32", seed=seed,
        checkpointing=checkpointing, deterministic=False, debug=debug,
    )  # fmt: skip


def test_what_was_asked_for_is_built_and_said() -> None:
    built = made(attention_backend="native_math", dropout=0.1, checkpointing=True)
    assert built.attention == built.model.attention == "native_math"
    assert built.model.checkpointing
    assert built.model.dropout == 0.1
    assert not built.compiled  # auto on the CPU
    assert all(parameter.dtype == torch.float32 for parameter in built.model.parameters())
    assert torch.equal(built.model.rope_frequency, rope_frequencies(built.model.shape))  # rebuilt after to_empty
    assert any("random, seed 5" in notice for notice in built.notices)
    assert any("native_math" in notice for notice in built.notices)


def test_init_settings_change_the_weights() -> None:
    """Contract 23: init_std acts."""
    for std in (0.02, 0.005):
        assert float(made(init_std=std).model.layers[0].mlp.w1.weight.detach().std()) == pytest.approx(std, rel=0.05)
    same, other = made().model.state_dict(), made(seed=6).model.state_dict()
    again = made().model.state_dict()
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not torch.equal(same["tok_embed.weight"], other["tok_embed.weight"])


def test_a_kernel_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="cudnn"):
        made(attention_backend="cudnn")


def test_compile_is_per_block_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _, **options: asked.append(options))
    built = made(compile="on")
    assert built.compiled
    assert asked == [{"fullgraph": True}] * 3  # two blocks and the last norm
    assert not made(compile="off").compiled
    assert "layers.0.attention.wq.weight" in built.model.state_dict()  # names unchanged


def test_pretrained_and_truncated(tmp_path: Path) -> None:
    source = made(num_layers=4).model
    folder = tmp_path / "model"
    hf.export(source, source.shape, folder, dtype="fp32", tokenizer_file=None)
    whole = made(model_path=str(folder), num_layers=4, init="pretrained")
    assert torch.equal(whole.model.layers[3].mlp.w2.weight, source.layers[3].mlp.w2.weight)
    assert any("pretrained" in notice and str(folder) in notice for notice in whole.notices)
    cut = made(model_path=str(folder), num_layers=1, init="pretrained-truncated")
    assert torch.equal(cut.model.output.weight, source.output.weight)
    assert any("truncated" in notice and "first 1" in notice for notice in cut.notices)
    with pytest.raises(ConfigError, match="pretrained-truncated"):
        made(model_path=str(folder), num_layers=2, init="pretrained")


def test_pretrained_from_the_hub_is_not_found_offline() -> None:
    with pytest.raises(NotFoundError) as caught:
        made(init="pretrained-truncated", model_path="TinyLlama/TinyLlama_v1.1", num_layers=1)
    assert "TinyLlama_v1.1" in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_blocks_train_like_eager_ones() -> None:
    batch = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(0))
    results: list[tuple[float, torch.Tensor]] = []
    for compiled in ("off", "on"):
        for checkpointing in (False, True):
            model = made(compile=compiled, checkpointing=checkpointing, init_std=0.1).model
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            gradient = model.tok_embed.weight.grad
            assert gradient is not None
            results.append((float(loss.detach()), gradient))
    torch.compiler.reset()
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert float((gradient - results[0][1]).norm() / results[0][1].norm()) < 1e-5
