"""Attention kernels: honoured or refused, and all computing the same thing."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_mask

from lockstep.errors import ConfigError, ExitCode
from lockstep.models import attention
from lockstep.models.layers import Block, rope_frequencies, rope_tables
from lockstep.models.shapes import KNOWN

TINY = KNOWN["lockstep/tiny"]


def ask(backend: str, device: str = "cpu", dtype: str = "fp32", *, flash: bool = True, same_bits: bool = False):
    return attention.resolve(
        backend, use_flash=flash, device_type=device, dtype_name=dtype, deterministic=same_bits, head_dim=64
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A pretended GPU: which packages it has, which kernels fail on it."""
    pretend: dict[str, object] = {"packages": {"triton"}, "broken": {}}
    monkeypatch.setattr(attention, "has_package", lambda name: name in pretend["packages"])
    monkeypatch.setattr(attention, "probe", lambda backend, *_: pretend["broken"].get(backend, ""))
    return pretend


@pytest.mark.parametrize(
    ("backend", "flash", "expected"),
    [
        ("auto", True, "native_flash"),
        ("auto", False, "native_math"),
        ("native_flash", True, "native_flash"),
        ("native_math", True, "native_math"),
        ("native_math", False, "native_math"),
    ],
)
def test_on_the_cpu(backend: str, flash: bool, expected: str) -> None:
    name, notice = ask(backend, flash=flash)
    assert name == expected
    assert expected in notice


@pytest.mark.parametrize(
    ("backend", "flash", "reason"),
    [
        ("cudnn", True, "CUDA"),
        ("flash_attn", True, "CUDA"),
        ("flex", True, "backward"),
        ("native_flash", False, "use_flash_attention"),
        ("flash_attn", False, "use_flash_attention"),
    ],
)
def test_refused_on_the_cpu(backend: str, flash: bool, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        ask(backend, flash=flash)
    assert caught.value.exit_code == ExitCode.USAGE
    assert backend in caught.value.what
    assert caught.value.where == "model.attention_backend"


@pytest.mark.parametrize(
    ("backend", "dtype", "same_bits", "expected"),
    [
        ("auto", "bf16", False, "cudnn"),
        ("auto", "bf16", True, "flex"),
        ("auto", "fp32", False, "flex"),
        ("cudnn", "fp16", False, "cudnn"),
        ("native_flash", "bf16", True, "native_flash"),
        ("flash_attn", "bf16", False, "native_flash"),
        ("flex", "fp32", True, "flex"),
        ("native_math", "fp32", False, "native_math"),
    ],
)
def test_on_a_gpu(gpu: dict[str, object], backend: str, dtype: str, same_bits: bool, expected: str) -> None:
    name, notice = ask(backend, "cuda", dtype, same_bits=same_bits)
    assert name == expected
    assert expected in notice
    if backend == "flash_attn":
        assert "not installed" in notice


@pytest.mark.parametrize(
    ("dtype", "same_bits", "expected"),
    [("bf16", True, "native_flash"), ("bf16", False, "cudnn"), ("fp32", True, "flex"), ("fp32", False, "flex")],
)
def test_who_drops_probabilities_gets_a_kernel_that_can(
    gpu: dict[str, object], dtype: str, same_bits: bool, expected: str
) -> None:
    common: Any = {
        "use_flash": True, "device_type": "cuda", "dtype_name": dtype, "deterministic": same_bits, "head_dim": 16
    }  # fmt: skip
    assert attention.resolve("auto", **common, drops=True)[0] == expected
    assert attention.resolve("flex", **common, drops=True)[0] == "flex", "as asked; the plain maths steps in"
    assert attention.resolve("auto", **common)[0] == ("cudnn" if expected == "cudnn" else "flex")
    gpu["broken"] = {"native_flash": "no such kernel", "cudnn": "nor this"}
    assert attention.resolve("auto", **common, drops=True)[0] == "flex"


def test_the_flash_attn_package_is_used_where_it_is(gpu: dict[str, object]) -> None:
    gpu["packages"] = {"flash_attn"}
    assert ask("flash_attn", "cuda", "bf16")[0] == "flash_attn"


@pytest.mark.parametrize(
    ("backend", "dtype", "same_bits"),
    [("cudnn", "fp32", False), ("native_flash", "fp32", False), ("flash_attn", "fp32", False), ("cudnn", "bf16", True)],
)
def test_refused_on_a_gpu(gpu: dict[str, object], backend: str, dtype: str, same_bits: bool) -> None:
    with pytest.raises(ConfigError, match=backend):
        ask(backend, "cuda", dtype, same_bits=same_bits)


def test_auto_falls_back_and_says_so_where_a_named_kernel_is_refused(gpu: dict[str, object]) -> None:
    gpu["broken"] = {"cudnn": "no such engine"}
    name, notice = ask("auto", "cuda", "bf16")
    assert name == "native_flash"
    assert "not cudnn: no such engine" in notice
    with pytest.raises(ConfigError, match="no such engine"):
        ask("cudnn", "cuda", "bf16")
    gpu["broken"] = {"cudnn": "x", "native_flash": "y"}
    gpu["packages"] = set()
    name, notice = ask("auto", "cuda", "bf16")
    assert name == "native_math"
    assert "triton" in notice


@pytest.mark.parametrize(
    ("values", "expected", "reason"),
    [
        ({"documents_apart": True}, "flex", "documents are masked"),
        ({"windowed": True}, "flex", "layers see a window"),
        ({}, "cudnn", "not bit-reproducible"),
        ({"head_dim": 2}, "native_math", "heads of 2 numbers are no multiple of 8"),
        ({"head_dim": 12}, "native_math", "heads of 12 numbers are below its 16"),
        ({"head_dim": 8, "windowed": True}, "native_math", "not flex: heads of 8 numbers"),
        ({"head_dim": 2, "documents_apart": True}, "native_math", "not flex: heads of 2 numbers"),
        ({"head_dim": 20}, "flex", "no multiple of 8"),
    ],
)
def test_what_masks_and_small_heads_leave_on_a_gpu(
    gpu: dict[str, object], values: dict[str, Any], expected: str, reason: str
) -> None:
    common: dict[str, Any] = {
        "use_flash": True, "device_type": "cuda", "dtype_name": "bf16", "deterministic": False, **values,
    }  # fmt: skip
    name, notice = attention.resolve("auto", **common)
    assert name == expected
    assert reason in notice
    if "windowed" in values:
        with pytest.raises(ConfigError, match="window"):
            attention.resolve("cudnn", **common)
    assert attention.resolve("auto", **{**common, "device_type": "cpu"})[0] == "native_flash"


def test_both_directions_and_windows() -> None:
    """The plain booleans and flex attention's blocks, against the definition."""
    length, window, cpu = 300, 40, torch.device("cpu")
    places = torch.arange(length)
    near = (places[:, None] - places).abs() <= window
    assert torch.equal(attention.window_mask(length, cpu, backend="native_math", window=window)[0, 0], near)
    assert attention.window_mask(length, cpu, backend="native_math", window=0) is None
    assert attention.window_mask(length, cpu, backend="native_math", window=length) is None
    for asked, expected in ((window, near), (0, torch.ones_like(near)), (length, torch.ones_like(near))):
        blocks = attention.window_mask(length, cpu, backend="flex", window=asked)
        assert torch.equal(create_mask(blocks.mask_mod, 1, None, length, length, device="cpu")[0, 0], expected)
    documents = (torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.02).int().cumsum(1)
    same = documents[:, :, None] == documents[:, None, :]
    for asked, expected in ((0, same), (window, same & near)):
        plain = attention.document_mask(documents, backend="native_math", causal=False, window=asked)
        blocks = attention.document_mask(documents, backend="flex", causal=False, window=asked)
        assert torch.equal(plain[:, 0], expected)
        assert torch.equal(create_mask(blocks.mask_mod, 2, None, length, length, device="cpu"), plain)


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention from its definition, head by head."""
    group = q.shape[1] // k.shape[1]
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    heads = []
    for h in range(q.shape[1]):
        scores = (q[:, h] @ k[:, h // group].mT / math.sqrt(q.shape[3])).masked_fill(~mask, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, h // group])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("backend", ["native_flash", "native_math"])
def test_kernels_compute_attention_with_grouped_heads(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 33, 16, requires_grad=True) for heads in (6, 2, 2))
    expected = reference(q, k, v)
    got = attention.attend(q, k, v, backend=backend)
    assert torch.allclose(got, expected, atol=1e-5)
    tiled = attention.attend(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1), backend=backend)
    assert not torch.allclose(tiled, expected, atol=1e-2)  # the classic mistake is seen
    weight = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(("backend", "operator"), [("native_flash", "flash_attention"), ("native_math", "math")])
def test_the_named_kernel_is_the_one_that_runs(backend: str, operator: str) -> None:
    q = torch.randn(1, 2, 16, 8)
    with torch.profiler.profile() as profile:
        attention.attend(q, q, q, backend=backend)
    ran = [event.name for event in profile.events() if "scaled_dot_product" in event.name]
    assert any(operator in name for name in ran), ran


@pytest.mark.parametrize(
    ("rows", "gradients", "causal", "flash"),
    [(1, False, True, True), (1, True, True, False), (1, False, False, False), (2, False, True, False)],
)
def test_a_text_that_grows_does_not_wait_for_plans_of_cudnn(
    rows: int, gradients: bool, causal: bool, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning, validation, compiled blocks and the fixed lengths of masked diffusion keep it; and who has no flash."""
    asked: list[list[str]] = []

    def noted(kernels: list[SDPBackend], *, set_priority: bool) -> contextlib.AbstractContextManager[None]:
        assert set_priority
        asked.append([kernel.name for kernel in kernels])
        return contextlib.nullcontext()

    monkeypatch.setattr(attention, "sdpa_kernel", noted)
    q, plain = torch.randn(rows, 2, 70, 8), ["CUDNN_ATTENTION"] if gradients else ["CUDNN_ATTENTION", "MATH"]
    with torch.set_grad_enabled(gradients):
        attention.attend(q, q, q, backend="cudnn", causal=causal)
        assert asked[-1] == ["FLASH_ATTENTION"] * flash + plain
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        attention.attend(q, q, q, backend="cudnn", causal=causal)
        assert asked[-1] == plain


def test_not_causal_is_one_argument_away() -> None:
    q = torch.randn(1, 2, 16, 8)
    assert not torch.equal(
        attention.attend(q, q, q, backend="native_math"), attention.attend(q, q, q, backend="native_math", causal=False)
    )


@pytest.mark.parametrize("backend", ["native_flash", "native_math"])
def test_a_block_is_one_graph_for_the_compiler(backend: str) -> None:
    torch.manual_seed(0)
    block = Block(TINY, backend=backend, dropout=0.0)
    x, (cos, sin) = torch.randn(2, 16, 64), rope_tables(rope_frequencies(TINY), 16)
    expected = block(x, cos, sin, None)
    block.compile(backend="aot_eager", fullgraph=True)
    assert torch.allclose(block(x, cos, sin, None), expected, atol=1e-6)
    torch.compiler.reset()


def test_flex_attention_can_be_watched_when_run_plainly() -> None:
    """Its own kernel lets nobody look at single operations; by the plain maths it is the same attention."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 160, 16, dtype=torch.float64) for heads in (4, 2, 2))
    mask = attention.causal_block_mask(160, torch.device("cpu"))
    with attention.plainly():
        found = attention.attend(q, k, v, backend="flex", mask=mask)
    expected = attention.attend(q, k, v, backend="native_math")
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, attention.attend(q, k, v, backend="native_math", causal=False), atol=1e-3)
    assert not attention._plain
