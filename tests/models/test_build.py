"""From options to a model."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from lockstep.errors import ConfigError, NotFoundError
from lockstep.kernels import graph_pass, products
from lockstep.models import hf
from lockstep.models.build import (
    NAMING_CALLS,
    Built,
    build,
    compile_blocks,
    forget_compiled,
    give_memory,
    keep_traces,
    lay_out,
)
from lockstep.models.layers import rope_frequencies
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve

CPU = torch.device("cpu")
TINY = LlamaOptions(model_path="lockstep/tiny")


def made(
    *,
    debug: bool = False,
    checkpointing: bool = False,
    seed: int = 5,
    device: torch.device = CPU,
    dtype_name: str = "fp32",
    **values: object,
) -> Built:
    options = LlamaOptions.model_validate({"model_path": "lockstep/tiny", "num_layers": 2, **values})
    return build(
        options, resolve(options, context_length=128), device=device, dtype_name=dtype_name, seed=seed,
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


def test_memory_is_given_as_torch_does() -> None:
    """The same layout, type and need of a gradient, of every weight and buffer; also of one that is not contiguous."""
    with torch.device("meta"):
        models = [lay_out(resolve(TINY, context_length=64), attention="native_math") for _ in range(2)]
    for model in models:
        model.double().layers[0].register_buffer("turned", torch.empty(3, 5, dtype=torch.bfloat16, device="meta").T)
        model.norm.weight.requires_grad_(False)
    give_memory(models[0], CPU, sharded=False)
    models[1].to_empty(device=CPU)
    ours, theirs = ({**dict(each.named_parameters()), **dict(each.named_buffers())} for each in models)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        about = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad, type(each))
                 for each in (tensor, theirs[name])]  # fmt: skip
        assert about[0] == about[1], name
    assert {tensor.dtype for tensor in ours.values()} >= {torch.float64, torch.bfloat16}


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


def test_traces_are_kept_apart_by_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = list[dict[str, str]]()
    with inductor.patch(unsafe_marked_cacheable_functions={"others.own": "1"}):
        made(compile="off")
        assert inductor.unsafe_marked_cacheable_functions == {"others.own": "1"}
        for dtype_name in ("bf16", "fp16"):
            monkeypatch.setattr("lockstep.models.build.PRECISIONS", set[str]())
            keep_traces(dtype_name)
            keys.append(dict(inductor.unsafe_marked_cacheable_functions))
        made(compile="on", dtype_name="fp16")
        assert inductor.unsafe_marked_cacheable_functions == keys[1]
        for dtype_name in ("bf16", "fp16"):  # of two, nobody can tell which is compiled when
            keep_traces(dtype_name)
            assert inductor.unsafe_marked_cacheable_functions == {"others.own": "1"}
    assert [key.pop("others.own") for key in keys] == ["1", "1"]
    assert keys[0].keys() == keys[1].keys() == set(NAMING_CALLS)
    assert not set(keys[0].values()) & set(keys[1].values())
    for name in NAMING_CALLS:  # they are still called so
        assert hasattr(torch.nn.attention, name.rpartition(".")[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=str)
def test_the_next_run_traces_nothing(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that AOTAutograd has made comes from its cache, with the same bits; another precision is another entry."""
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    batch = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)

    def trained(dtype_name: str) -> tuple[str, torch.Tensor]:
        """What the cache has said, and the gradient of the first matrix."""
        torch.compiler.reset()
        counters.clear()
        monkeypatch.setattr("lockstep.models.build.PRECISIONS", set[str]())  # as in a process of its own
        model = made(compile="on", init_std=0.1, device=device, dtype_name=dtype_name).model
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype_name]
        with torch.autocast(device.type, dtype):
            model(batch[:, :-1], batch[:, 1:]).backward()
        gradient = model.layers[0].attention.wq.weight.grad
        assert gradient is not None
        found = counters["aot_autograd"]
        assert not found["autograd_cache_bypass"]
        hit, missed = found["autograd_cache_hit"], found["autograd_cache_miss"]
        return "hit" if hit and not missed else "missed" if missed and not hit else "both", gradient

    (first, one), (again, two), (other, three) = trained("bf16"), trained("bf16"), trained("fp16")
    torch.compiler.reset()
    assert (first, again, other) == ("missed", "hit", "missed")
    assert torch.equal(one, two)
    assert 0 < float((one - three).norm() / one.norm()) < 0.1


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


@pytest.mark.filterwarnings("ignore")  # the compiler has its own
@pytest.mark.parametrize("at_once", [True, False])
def test_a_backward_pass_of_another_thread_is_compiled_with_the_runs_settings(at_once: bool) -> None:
    """A GPU has such a thread, and torch 2.12 and later keep settings of the compiler by thread."""
    seen: dict[str, bool] = {}
    ours = graph_pass.GraphPass()

    def noted(name: str) -> Any:
        def compiled(graph: Any, _inputs: Any) -> Any:
            seen[name] = inductor.post_grad_custom_post_pass is ours
            return make_boxed_func(graph.forward)

        return compiled

    backend = aot_autograd(fw_compiler=noted("forward"), bw_compiler=noted("backward"))
    model = lay_out(resolve(TINY, context_length=64), attention="native_math")
    with inductor.patch(post_grad_custom_post_pass=ours):
        compile_blocks(model, CPU, sharded=False, backend=backend)
        with functorch.patch(force_non_lazy_backward_lowering=functorch.force_non_lazy_backward_lowering and at_once):
            total = model(torch.zeros(2, 8, dtype=torch.long)).sum()
        other = Thread(target=total.backward)
        other.start()
        other.join()
    forget_compiled()
    assert model.layers[0].mlp.w1.weight.grad is not None
    assert seen == {"forward": True, "backward": at_once}  # or else the control: later, without them


@pytest.mark.parametrize("is_for", [False, True])
def test_large_products_are_put_in_where_they_are_for_the_device(monkeypatch: pytest.MonkeyPatch, is_for: bool) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(products, "is_for", lambda device: asked.append(device) or is_for)
    with inductor.patch(post_grad_custom_post_pass=None):
        compile_blocks(lay_out(resolve(TINY, context_length=64), attention="native_math"), CPU, sharded=False)
        assert isinstance(inductor.post_grad_custom_post_pass, graph_pass.GraphPass) == is_for
    assert asked == [CPU]
