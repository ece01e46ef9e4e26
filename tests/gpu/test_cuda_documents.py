"""Documents kept apart on a real GPU: by flex attention, and by the plain maths, as each document alone."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.contracts import Batch, Draw, Rows
from lockstep.data.loader import Loader
from lockstep.models.build import Built, build
from lockstep.models.options import LlamaOptions
from lockstep.models.shapes import resolve
from lockstep.objectives.causal import Causal, expanded
from tests.data.stand_in import Plain, table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler has its own
]
LENGTHS = [[100, 1, 300, 2, 110], [513], [256, 257], [1, 1, 1, 510]]  # of the documents of each row of 513 tokens
ACCURACY = {"fp32": 1e-4, "bf16": 6e-2}  # without the mask gradients are off by 0.86


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def made(backend: str, precision: str, *, compiled: bool, checkpointing: bool) -> Built:
    options = LlamaOptions.model_validate(
        {"model_path": "lockstep/tiny", "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "init_std": 0.1, "attention_backend": backend,
         "compile": "on" if compiled else "off"}
    )  # fmt: skip
    return build(
        options, resolve(options, context_length=512), device=torch.device("cuda"), dtype_name=precision, seed=5,
        checkpointing=checkpointing, deterministic=True, debug=False, documents_apart=True,
    )  # fmt: skip


def documents(seed: int) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [[generator.integers(0, 512, length).astype(np.int32) for length in row] for row in LENGTHS]


def batch_of(rows: list[list[np.ndarray]]) -> Batch:
    begins = [np.concatenate([np.arange(len(document)) == 0 for document in row]) for row in rows]
    columns = {"tokens": np.stack([np.concatenate(row) for row in rows]), "starts": np.stack(begins).astype(np.uint8)}
    places = np.arange(len(rows))
    draw = Draw(seed=0, step=0, batch_rows=len(rows))
    made = Causal(documents="masked").collate(Rows(places, np.zeros_like(places), places, columns), draw)
    return made.to(torch.device("cuda"))


def computed(model: torch.nn.Module, batch: Batch, precision: str) -> tuple[float, Tensor]:
    """Loss and all gradients, as the engine computes them."""
    mixed = torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    with mixed:
        loss = Causal().loss(model, batch)["loss"]
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return float(loss.detach()), torch.cat([gradient.flatten().double() for gradient in gradients])


def reference(rows: list[list[np.ndarray]]) -> tuple[float, Tensor]:
    """Each document as the only one of its row, in float64, by the plain maths."""
    model = made("native_math", "fp64", compiled=False, checkpointing=False).model
    parts = [computed(model, batch_of([[one]]), "fp64") for row in rows for one in row if len(one) > 1]
    return sum(loss for loss, _ in parts), torch.stack([gradient for _, gradient in parts]).sum(0)


@pytest.mark.parametrize(
    ("backend", "compiled", "checkpointing"),
    [("auto", True, False), ("auto", False, True), ("auto", True, True), ("native_math", False, False),
     ("native_math", True, False)],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_are_the_sum_of_their_documents(backend: str, compiled: bool, checkpointing: bool, precision: str) -> None:
    built = made(backend, precision, compiled=compiled, checkpointing=checkpointing)
    assert built.attention == ("flex" if backend == "auto" else backend)
    for seed in range(2):  # other documents, the same compiled graph
        rows = documents(seed)
        loss, gradient = computed(built.model, batch_of(rows), precision)
        expected_loss, expected = reference(rows)
        assert loss == pytest.approx(expected_loss, rel=ACCURACY[precision])
        assert float((gradient - expected).norm() / expected.norm()) < ACCURACY[precision]
    whole = batch_of(documents(0))
    mixed = Batch(
        {k: v for k, v in expanded(whole).items() if k != "documents"}, whole.weights, whole.rows, whole.tokens
    )
    _, wrong = computed(built.model, mixed, precision)
    _, right = reference(documents(0))
    assert float((wrong - right).norm() / right.norm()) > 3 * ACCURACY[precision]  # negative control


@pytest.mark.parametrize("backend", ["auto", "native_math"])
def test_evaluation_keeps_them_apart_and_repeats(backend: str) -> None:
    model, batch = made(backend, "bf16", compiled=True, checkpointing=False).model, batch_of(documents(0))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scores = [Causal().evaluate(model, batch)["loss"] for _ in range(3)]
    assert len({float(score.total) for score in scores}) == 1
    assert float(scores[0].total) == pytest.approx(reference(documents(0))[0], rel=ACCURACY["bf16"])


@pytest.mark.parametrize("compiled", [True, False])
def test_gradients_repeat_their_bits(compiled: bool) -> None:
    model, batch = made("auto", "bf16", compiled=compiled, checkpointing=False).model, batch_of(documents(0))
    results = [computed(model, batch, "bf16")[1] for _ in range(5)]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_change_in_one_document_is_not_seen_in_another() -> None:
    model, batch = made("auto", "bf16", compiled=False, checkpointing=False).model, batch_of(documents(0))
    inputs, own = expanded(batch)["inputs"], expanded(batch)["documents"]
    changed = inputs.clone()
    first = own == 1
    changed[first] = (changed[first] + 1) % 512
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        before, after = (model(tokens, documents_BL=own) for tokens in (inputs, changed))
        mixed = [model(tokens) for tokens in (inputs, changed)]
    assert torch.equal(before[~first], after[~first])
    assert not torch.equal(before[first], after[first])
    assert not torch.equal(mixed[0][~first], mixed[1][~first])  # negative control


def test_the_loader_pins(tmp_path: Path) -> None:
    """data.pin_memory: the memory itself."""
    source = table(tmp_path / "train", 20)
    for pin in (True, False):
        with Loader(source, Plain(), seed=1, micro_rows=2, micro_batches=2, workers=1, pin=pin) as loader:
            batches = next(loader)
        assert {tensor.is_pinned() for batch in batches for tensor in batch.tensors.values()} == {pin}
