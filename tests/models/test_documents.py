"""Documents kept apart in a row: each is computed as if it were alone, by every kernel that takes the task."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from lockstep.contracts import Batch, Draw, Rows
from lockstep.errors import ConfigError
from lockstep.models import attention
from lockstep.models.build import build
from lockstep.models.llama import Llama
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve
from lockstep.objectives.causal import Causal, expanded

KERNELS = ["native_math", "native_flash"]
LENGTHS = [[5, 1, 14, 2, 11], [33], [1, 1, 1, 30], [32, 1], [16, 17]]  # of the documents of each row of 33 tokens
DRAW = Draw(seed=0, step=0, batch_rows=len(LENGTHS))
GENERATOR = np.random.default_rng(0)
DOCUMENTS = [[GENERATOR.integers(0, 512, length).astype(np.int32) for length in row] for row in LENGTHS]


def made(backend: str = "native_math", *, dtype_name: str = "fp64", checkpointing: bool = False) -> Llama:
    """Two layers, grouped heads, weights large enough for attention to matter."""
    options = LlamaOptions.model_validate(
        {"model_path": "lockstep/tiny", "num_layers": 2, "num_key_value_heads": 2, "init_std": 0.2,
         "attention_backend": backend}
    )  # fmt: skip
    return build(
        options, resolve(options, context_length=64), device=torch.device("cpu"), dtype_name=dtype_name, seed=5,
        checkpointing=checkpointing, deterministic=False, debug=False, documents_apart=True,
    ).model  # fmt: skip


def batch_of(rows: list[list[np.ndarray]], documents: str = "masked") -> Batch:
    """Rows as `pack` lays them out."""
    begins = [np.concatenate([np.arange(len(document)) == 0 for document in row]) for row in rows]
    columns = {"tokens": np.stack([np.concatenate(row) for row in rows]), "starts": np.stack(begins).astype(np.uint8)}
    places, objective = np.arange(len(rows)), Causal(documents=documents)
    columns = {name: columns[name] for name in objective.columns}
    return objective.collate(Rows(places, np.zeros_like(places), places, columns), DRAW)


def alone() -> list[Batch]:
    """Every document as the only one of its row; one of a single token has no target."""
    return [batch_of([[document]]) for row in DOCUMENTS for document in row if len(document) > 1]


def loss_of(model: Llama, batch: Batch) -> Tensor:
    return Causal().loss(model, batch)["loss"]


def gradients(model: Llama, total: Tensor) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(total, list(model.parameters()))])


def blind(batch: Batch) -> Batch:
    """The same targets, and nothing that keeps the documents apart: the fault this file is to see."""
    kept = {name: tensor for name, tensor in expanded(batch).items() if name != "documents"}
    return Batch(kept, batch.weights, batch.rows, batch.tokens)


def distance(model: Llama, batch: Batch) -> tuple[float, float]:
    """How far loss and gradients of the rows are from the sums over their documents."""
    total = loss_of(model, batch)
    expected = torch.stack([loss_of(model, one) for one in alone()]).sum()
    ours, theirs = gradients(model, total), gradients(model, expected)
    return abs(float((total / expected).detach()) - 1), float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_rows_are_the_sum_of_their_documents(backend: str, checkpointing: bool) -> None:
    model, batch = made(backend, checkpointing=checkpointing), batch_of(DOCUMENTS)
    assert batch.weights["loss"] == sum(one.weights["loss"] for one in alone()) == 32 * 5 - 4 - 3 - 1 - 1
    assert max(distance(model, batch)) < 1e-9
    assert min(distance(model, blind(batch))) > 1e-3  # negative control


@pytest.mark.parametrize("backend", KERNELS)
def test_evaluation_is_the_sum_too(backend: str) -> None:
    model, batch = made(backend), batch_of(DOCUMENTS)
    whole = Causal().evaluate(model, batch)
    parts = [Causal().evaluate(model, one) for one in alone()]
    for name in ("loss", "accuracy"):
        assert float(whole[name].total) == pytest.approx(sum(float(part[name].total) for part in parts), rel=1e-9)
        assert whole[name].weight == sum(part[name].weight for part in parts)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_change_in_one_document_is_not_seen_in_another(backend: str) -> None:
    """Bit for bit, in fp32; and both ways."""
    model = made(backend, dtype_name="fp32")
    batch = batch_of(DOCUMENTS)
    inputs, documents = expanded(batch)["inputs"], expanded(batch)["documents"]
    for row, bounds in enumerate(LENGTHS[:-1]):
        for number in range(1, len(bounds) + 1):
            own = documents[row] == number
            changed = inputs.clone()
            changed[row, own] = (changed[row, own] + 1) % 512
            with torch.no_grad():
                before, after = (model(tokens, documents_BL=documents) for tokens in (inputs, changed))
                mixed = [model(tokens) for tokens in (inputs, changed)]
            assert torch.equal(before[row, ~own], after[row, ~own])
            assert not own.any() or not torch.equal(before[row, own], after[row, own])
            later = documents[row] > number
            if later.any():  # negative control
                assert not torch.equal(mixed[0][row, later], mixed[1][row, later])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides its own warning; an error is not hidden
def test_compiled_blocks_keep_them_apart() -> None:
    model, batch = made(), batch_of(DOCUMENTS)
    expected = gradients(model, loss_of(model, batch))
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    try:
        for rows in (DOCUMENTS, list(reversed(DOCUMENTS))):  # and with documents it was not compiled for
            found = gradients(model, loss_of(model, batch_of(rows)))
            assert float((found - expected).norm() / expected.norm()) < 1e-12
    finally:
        torch.compiler.reset()


def test_one_document_is_what_it_was_without_the_mask() -> None:
    """Numbers of rows that hold one document each do not depend on the setting."""
    rows = [[np.concatenate(row)] for row in DOCUMENTS]
    model, masked, plain = made(), batch_of(rows), batch_of(rows, "separated")
    assert masked.weights == plain.weights
    assert torch.equal(expanded(masked)["targets"], expanded(plain)["targets"])
    assert float(loss_of(model, masked).detach()) == pytest.approx(float(loss_of(model, plain).detach()), rel=1e-12)
    assert set(expanded(plain)) == {"inputs", "targets"}


def random_documents(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return (torch.rand(rows, length, generator=generator) < 0.02).int().cumsum(1).int()


def test_flex_visits_what_the_booleans_allow() -> None:
    """Its own block mask, at a length that is no multiple of a block, against the plain one."""
    documents = random_documents(3, 300)
    plain = attention.document_mask(documents, backend="native_math")
    blocks = attention.document_mask(documents, backend="flex")
    assert torch.equal(create_mask(blocks.mask_mod, 3, None, 300, 300, device="cpu"), plain)
    visited = blocks.to_dense()[:, 0]
    allowed = torch.nn.functional.pad(plain[:, 0], (0, 84, 0, 84)).unflatten(2, (3, 128)).unflatten(1, (3, 128))
    assert torch.equal(visited.bool(), allowed.any(4).any(2))
    assert visited.sum() < 3 * 6, "blocks between two documents are skipped"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass, uncompiled, which is all of it that a CPU has."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    documents = random_documents(2, 200)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 200, 16) for heads in (6, 2, 2))
    expected, found = (
        attention.attend(q, k, v, backend=backend, mask=attention.document_mask(documents, backend=backend))
        for backend in ("native_math", "flex")
    )
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(attention.attend(q, k, v, backend="native_math"), expected, atol=1e-2)


@pytest.mark.parametrize(
    ("backend", "dtype", "flash", "packages", "expected"),
    [
        ("auto", "bf16", True, {"triton"}, "flex"),
        ("auto", "fp32", True, {"triton"}, "flex"),
        ("auto", "fp64", True, {"triton"}, "native_math"),
        ("auto", "bf16", False, {"triton"}, "native_math"),
        ("auto", "bf16", True, set(), "native_math"),
        ("flex", "bf16", True, {"triton"}, "flex"),
        ("native_math", "bf16", True, set(), "native_math"),
        ("cudnn", "bf16", True, {"triton"}, ""),
        ("native_flash", "bf16", True, {"triton"}, ""),
        ("flash_attn", "bf16", True, {"flash_attn"}, ""),
    ],
)
def test_a_gpu_takes_a_kernel_that_can(
    backend: str, dtype: str, flash: bool, packages: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_package", lambda name: name in packages)
    monkeypatch.setattr(attention, "probe", lambda *_: "")

    def ask() -> tuple[str, str]:
        return attention.resolve(
            backend, use_flash=flash, device_type="cuda", dtype_name=dtype, deterministic=False, documents_apart=True
        )

    if expected:
        name, notice = ask()
        assert name == expected
        assert expected in notice
        return
    with pytest.raises(ConfigError, match=f"{backend} cannot be used: data.documents is masked") as caught:
        ask()
    assert caught.value.hint == "model.attention_backend auto picks one that runs here"
