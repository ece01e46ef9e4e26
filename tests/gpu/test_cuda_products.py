"""Large products on a real GPU: the kernels that the rule names are there, right, and repeat their bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels import cublaslt, graph_pass, products
from lockstep.kernels.linear_cross_entropy import linear_cross_entropy
from lockstep.models.layers import SwiGLU

CUDA = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
    pytest.mark.skipif(not (torch.cuda.is_available() and products.is_for(CUDA)), reason="needs a Hopper GPU"),
]
ROUNDED = 3e-3  # what bf16 rounds, as a share of the whole
AS_TORCH = 1.2  # times the distance of torch's own product, whose tensor cores cut off the ends of long sums too
PRODUCTION = {  # (M, K, N), which factors lie by columns, the result: those of a step of the production shape
    "up": ((32768, 4096, 14336), "second", torch.bfloat16),
    "down": ((32768, 14336, 4096), "second", torch.bfloat16),
    "query": ((32768, 4096, 4096), "second", torch.bfloat16),
    "head": ((8192, 4096, 128256), "second", torch.bfloat16),
    "gradient of what goes up": ((32768, 14336, 4096), "", torch.bfloat16),
    "gradient of what goes down": ((32768, 4096, 14336), "", torch.bfloat16),
    "gradient of the head's input": ((8192, 128256, 4096), "", torch.bfloat16),
    "gradient of up": ((14336, 32768, 4096), "first", torch.float32),
    "gradient of down": ((4096, 32768, 14336), "first", torch.float32),
    "gradient of the head": ((128256, 8192, 4096), "first", torch.float32),
}


def factors(sizes: tuple[int, int, int], by_columns: str, seed: int) -> tuple[Tensor, Tensor]:
    rows, inner, columns = sizes
    torch.manual_seed(seed)
    first = torch.randn((inner, rows) if by_columns == "first" else (rows, inner), device=CUDA, dtype=torch.bfloat16)
    second = torch.randn(
        (columns, inner) if by_columns == "second" else (inner, columns), device=CUDA, dtype=torch.bfloat16
    )
    return (first.T if by_columns == "first" else first), (second.T if by_columns == "second" else second)


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def in_fp32(first: Tensor, second: Tensor) -> Tensor:
    assert not torch.backends.cuda.matmul.allow_tf32
    return first.float() @ second.float()


def chosen(first: Tensor, second: Tensor, result: torch.dtype) -> cublaslt.Kernel | None:
    return products._chosen(cublaslt.matrix(first), cublaslt.matrix(second), result, CUDA)[1]


@pytest.mark.parametrize("name", list(PRODUCTION))
def test_products_of_the_production_shape(name: str) -> None:
    sizes, by_columns, result = PRODUCTION[name]
    seed = int(torch.randint(1 << 30, ()).item())
    first, second = factors(sizes, by_columns, seed)
    assert products._is_ours(first, second, result, None)
    assert chosen(first, second, result) == products.preferred(*map(cublaslt.matrix, (first, second)), result)[0]
    got = products.multiply(first, second, result=result)
    assert got.dtype == result
    assert torch.equal(got, products.multiply(first, second, result=result)), seed
    few = slice(0, 300)  # rows that are enough to see any tile
    wanted, torchs = in_fp32(first[few], second), products.plain(first, second, result=result, total=None)
    assert distance(got[few], wanted) < AS_TORCH * distance(torchs[few], wanted) < ROUNDED, seed
    assert distance(got, torchs) < ROUNDED, seed
    if result == torch.float32:
        total = torch.randn_like(got)
        expected = total + got
        assert products.multiply(first, second, total=total) is total
        assert distance(total, expected) < 1e-6


@pytest.mark.parametrize("rows", [32768, 32768 - 8, 30001, 29999])
def test_any_number_of_rows(rows: int) -> None:
    first, second = factors((rows, 4096, 14336), "second", rows)
    assert distance(products.multiply(first, second), in_fp32(first, second)) < ROUNDED
    gradient = torch.randn(rows, 14336, device=CUDA, dtype=torch.bfloat16)
    wanted, torchs = in_fp32(gradient.T, first), products.plain(gradient.T, first, result=torch.float32, total=None)
    got = products.multiply(gradient.T, first, result=torch.float32)
    assert distance(got, wanted) < AS_TORCH * distance(torchs, wanted) < ROUNDED


def test_what_lies_askew_is_torchs() -> None:
    first, second = factors((32768, 4096, 14336), "second", 3)
    room = torch.randn(32769, 4104, device=CUDA, dtype=torch.bfloat16)
    for askew in (room[1:, 1:4097], room[1:, :4096], room.flatten()[3 : 3 + 32768 * 4096].view(32768, 4096)):
        assert distance(products.multiply(askew, second), in_fp32(askew, second)) < ROUNDED
    assert not products._is_ours(room[1:, 1:4097], second, torch.bfloat16, None)
    assert not products._is_ours(first.half(), second.half(), torch.float16, None)
    assert not products._is_ours(first[:1024], second, torch.bfloat16, None)


def test_a_wrong_factor_would_be_seen() -> None:
    """The control: one tile of one factor that is not what it was."""
    first, second = factors((32768, 4096, 14336), "second", 5)
    wanted = in_fp32(first[:300], second)
    second[:64, :1024] = 0
    assert distance(products.multiply(first, second)[:300], wanted) > ROUNDED


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, Any]]:
    """The products that cublasLt computes from now on: their type and kernel."""
    ran: list[tuple[torch.dtype, Any]] = []
    run = cublaslt.Product.run

    def watched(self: cublaslt.Product, kernel: Any, first: Tensor, second: Tensor, out: Tensor, *, adds: bool) -> None:
        ran.append((out.dtype, kernel))
        run(self, kernel, first, second, out, adds=adds)

    monkeypatch.setattr(cublaslt.Product, "run", watched)
    return ran


def layer_and_rows() -> tuple[SwiGLU, Tensor]:
    torch.manual_seed(7)
    shape: Any = SimpleNamespace(hidden_size=4096, intermediate_size=14336)
    with CUDA:
        return SwiGLU(shape), torch.randn(4, 8192, 4096, dtype=torch.bfloat16).requires_grad_()


def gradients(layer: Any, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        layer(x).float().square().sum().backward()
    return [each.grad.clone() for each in layer.parameters()]


def test_a_compiled_layer_takes_them_and_repeats_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    layer, x = layer_and_rows()
    eager = gradients(layer, x)
    ran = recorded(monkeypatch)
    with inductor.patch(post_grad_custom_post_pass=None), functorch.patch(force_non_lazy_backward_lowering=True):
        graph_pass.install()  # both as compile_blocks does
        layer.compile(fullgraph=True)
        once, again = gradients(layer, x), gradients(layer, x)
    assert len(ran) == 2 * 9  # of three weights: forward, and both gradients
    assert [kind for kind, _ in ran].count(torch.float32) == 2 * 3
    for got, same, wanted in zip(once, again, eager, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, same)
        assert distance(got, wanted) < 0.02


def test_the_head_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(11)
    x = torch.randn(16384, 4096, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(128256, 4096, device=CUDA) * 0.02).requires_grad_()
    targets = torch.randint(128256, (16384,), device=CUDA)

    def computed() -> list[Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            total = linear_cross_entropy(x, weight, targets, chunk_tokens=8192)
        return [total.detach(), *torch.autograd.grad(total, (x, weight))]

    ran = recorded(monkeypatch)
    ours, again = computed(), computed()
    a_chunk = [(torch.bfloat16, products.SLIM), (torch.bfloat16, products.WIDE), (torch.float32, products.WIDE)]
    assert ran == a_chunk * 4  # two chunks, twice: logits, both gradients
    assert all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
    monkeypatch.setattr(products, "is_for", lambda _device: False)
    for got, wanted in zip(ours, computed(), strict=True):
        assert distance(got, wanted) < ROUNDED
