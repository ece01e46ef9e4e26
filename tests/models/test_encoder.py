"""The encoder's promises to the loop: sums at chosen places, documents apart, checkpointing, first loss, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import DataError
from lockstep.models import encoder
from lockstep.models.build import compile_blocks
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import KNOWN, EncoderShape
from lockstep.models.initialise import initialise
from lockstep.models.shapes import memory_bytes
from tests.kept import saved_bytes

TINY = replace(KNOWN["lockstep/mlm-tiny"], num_layers=4, local_attention=8, max_position_embeddings=64)
ARCHITECTURES = ("prenorm", "bert", "modern")
LENGTHS = [[5, 1, 14, 2, 10], [30], [20, 3]]  # of the documents of each row of 32 tokens; the rest is padding
MASK, PAD = 4, 0


def shape_of(architecture: str, **changes: Any) -> EncoderShape:
    return replace(TINY, architecture=architecture, **changes)


def make(shape: EncoderShape, *, std: float = 0.2, **options: Any) -> Encoder:
    model = Encoder(shape, **{"attention": "native_flash", **options})
    initialise(model, seed=1, std=std)
    return model


def ids(rows: int, length: int, vocab: int = 512) -> Tensor:
    return torch.randint(5, vocab, (rows, length), generator=torch.Generator().manual_seed(3))


def chosen(inputs: Tensor, every: int = 5) -> tuple[Tensor, Tensor]:
    places = torch.arange(0, inputs.numel(), every)
    return inputs.flatten()[places], places


def gradients(model: Encoder, total: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).norm() / (expected[name].norm() + 1e-12)) for name in expected)


def packed() -> tuple[Tensor, Tensor]:
    """Rows of several documents, and which document each token is of."""
    documents = torch.zeros(len(LENGTHS), 32, dtype=torch.int32)
    for row, lengths in enumerate(LENGTHS):
        numbers = [torch.full((length,), number, dtype=torch.int32) for number, length in enumerate(lengths, start=1)]
        documents[row, : sum(lengths)] = torch.cat(numbers)
    return torch.where(documents > 0, ids(len(LENGTHS), 32), PAD), documents


@pytest.mark.parametrize("backend", ["native_flash", "native_math"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_document_is_computed_as_if_it_were_alone(architecture: str, backend: str) -> None:
    model, (inputs, documents) = make(shape_of(architecture), attention=backend).double().eval(), packed()
    model.rebuild_buffers()
    with torch.no_grad():
        together, blind = model.hidden(inputs, documents), model.hidden(inputs)
        for row in range(len(LENGTHS)):
            for number in range(1, len(LENGTHS[row]) + 1):
                own = documents[row] == number
                alone = model.hidden(inputs[row : row + 1, own])[0]
                assert float((together[row, own] - alone).abs().max()) < 1e-9
                assert float((blind[row, own] - alone).abs().max()) > 1e-3  # negative control


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_change_in_one_document_is_not_seen_in_another(architecture: str) -> None:
    """Bit for bit, in fp32, padding included; both ways within a document."""
    model, (inputs, documents) = make(shape_of(architecture)).eval(), packed()
    changed = inputs.clone()
    changed[0, 8] += 1  # in the third document of the first row
    with torch.no_grad():
        before, after = (model(tokens, documents_BL=documents) for tokens in (inputs, changed))
        mixed = [model(tokens) for tokens in (inputs, changed)]
    own = documents[0] == 3
    assert torch.equal(before[0, ~own], after[0, ~own])
    assert torch.equal(before[1:], after[1:])
    assert not torch.isclose(before[0, own], after[0, own]).all(-1).any()  # before and after it
    assert not torch.equal(mixed[0][0, ~own], mixed[1][0, ~own])


def test_learned_positions_begin_anew_with_each_document() -> None:
    inputs, documents = packed()
    found = encoder._positions(inputs, documents)
    for row, lengths in enumerate(LENGTHS):
        rest = 32 - sum(lengths)
        assert found[row].tolist() == [place for length in [*lengths, rest] for place in range(length)]
    assert encoder._positions(inputs, None).tolist() == list(range(32))


def test_local_layers_see_their_window_only() -> None:
    """Two layers, the second local: what is further than the window away is seen through the first only."""
    inputs = ids(1, 32)
    changed = inputs.clone()
    changed[0, 0] += 1
    shape = shape_of("modern", num_layers=1)
    with torch.no_grad():
        for every, reach in ((1, 32), (2, 5)):  # layer 1 of 2 is local if every second one is global
            model = make(replace(shape, num_layers=2, global_every=every))
            first = model.layers[0]
            first.forward = lambda x, *_: x  # pyright: ignore[reportAttributeAccessIssue] # only the second acts
            differs = (model.hidden(inputs) != model.hidden(changed)).any(-1)[0]
            assert differs.tolist() == [place < reach for place in range(32)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_head_acts_at_the_chosen_places(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, documents) = make(shape_of(architecture)), packed()
    targets, places = chosen(inputs)
    logits = model(inputs, documents_BL=documents)
    expected = F.cross_entropy(logits.flatten(0, 1)[places], targets, reduction="sum")
    seen: list[tuple[int, ...]] = []
    model.head.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    wanted = gradients(model, expected)
    for chunk in (4, 1000):
        monkeypatch.setattr(encoder, "chunk_tokens", lambda _, chunk=chunk, **_how: chunk)
        total = model(inputs, targets, places_M=places, documents_BL=documents)
        assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert distance(gradients(model, total), wanted) < 1e-4
        losses, correct = model(inputs, targets, places_M=places, documents_BL=documents, per_target=True)
        assert float(losses.sum()) == pytest.approx(float(expected.detach()), rel=1e-5)
        assert torch.equal(correct, logits.flatten(0, 1)[places].argmax(-1) == targets)
        assert not losses.requires_grad
    assert set(seen) == {(len(places), 64)}


@pytest.mark.parametrize("per_target", [False, True])
def test_scores_have_the_chunks_of_plain_operations(monkeypatch: pytest.MonkeyPatch, per_target: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(encoder, "has_kernel", lambda _: True)
    monkeypatch.setattr(encoder, "chunk_tokens", lambda _, *, in_place: asked.append(in_place) or 4)
    inputs, documents = packed()
    targets, places = chosen(inputs)
    model = make(shape_of(ARCHITECTURES[0]))
    model(inputs, targets, places_M=places, documents_BL=documents, per_target=per_target)
    assert asked == [not per_target]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_place_at_all(architecture: str) -> None:
    model, (inputs, documents) = make(shape_of(architecture)), packed()
    none = torch.empty(0, dtype=torch.long)
    total = model(inputs, none, places_M=none, documents_BL=documents)
    assert float(total.detach()) == 0
    assert all(not gradient.any() for gradient in gradients(model, total).values())
    losses, correct = model(inputs, none, places_M=none, per_target=True)
    assert losses.shape == correct.shape == (0,)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("vocab", "width", "std"), [(512, 64, 0.02), (4096, 256, 0.02), (2048, 512, 0.04)])
def test_the_first_loss_is_the_formula(architecture: str, vocab: int, width: int, std: float) -> None:
    """ln V + d std²/2 also where nearly all of the input is [MASK]; with dropout, as at the first step of a run."""
    shape = shape_of(architecture, vocab_size=vocab, hidden_size=width, intermediate_size=4 * width, num_layers=2)
    inputs = ids(16, 64, vocab)
    targets, places = chosen(inputs, every=2)
    inputs.view(-1)[places] = MASK
    inputs.view(-1)[places[::10]] = targets[::10]  # those that are kept
    torch.manual_seed(0)
    with torch.no_grad():
        loss = float(make(shape, std=std, dropout=0.1)(inputs, targets, places_M=places)) / len(places)
    assert shape.first_loss(std) == math.log(vocab) + width * std**2 / 2
    assert loss == pytest.approx(shape.first_loss(std), abs=0.1 + 4 * std * math.sqrt(width / len(places)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpointing_changes_no_bit_and_repeats_dropout(architecture: str) -> None:
    """Contract 26."""
    inputs, documents = packed()
    targets, places = chosen(inputs)
    results: list[dict[str, Tensor]] = []
    for options in ({"dropout": 0.3}, {"dropout": 0.3, "checkpointing": True}, {}):
        model = make(shape_of(architecture), **options)
        torch.manual_seed(9)
        results.append(gradients(model, model(inputs, targets, places_M=places, documents_BL=documents)))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not torch.equal(results[0]["embed_norm.weight"], results[2]["embed_norm.weight"])  # dropout acts
    plain, dropping = make(shape_of(architecture)), make(shape_of(architecture), dropout=0.3)
    assert torch.equal(dropping.eval()(inputs), plain(inputs))  # and is off outside training


def filled_bytes(model: Encoder, *, bf16: bool = False) -> int:
    inputs = ids(4, 64)
    targets, places = chosen(inputs, every=7)
    return saved_bytes(model, lambda: model(inputs, targets, places_M=places), bf16=bf16)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_memory_estimate_is_what_is_kept(architecture: str, bf16: bool) -> None:
    shape = shape_of(architecture, num_layers=6, hidden_size=128, intermediate_size=512, global_every=1)
    sizes: dict[str, Any] = {"batch_size": 4, "context_length": 64, "dtype_name": "bf16" if bf16 else "fp32"}
    plain, saving = (memory_bytes(shape, **sizes, checkpointing=flag, compiled=False) for flag in (False, True))
    kept = filled_bytes(make(shape, dropout=0.1), bf16=bf16)
    casts = 2 * shape.matmul_parameters() if bf16 else 0  # weights in half precision, which are not counted
    assert plain.activations == pytest.approx(kept - casts, rel=0.15)
    checkpointed = filled_bytes(make(shape, dropout=0.1, checkpointing=True), bf16=bf16)
    assert checkpointed < kept / 2
    assert saving.activations < plain.activations / 2


def compiled_distance(shape: EncoderShape, given: list[dict[str, Any]]) -> float:
    """How far gradients of compiled blocks are from eager ones; and evaluation must compile too."""
    inputs, _ = packed()
    targets, places = chosen(inputs)
    model = make(shape)
    expected = [gradients(model, model(inputs, targets, places_M=places, **each)) for each in given]
    compile_blocks(model, torch.device("cpu"), sharded=False, backend="aot_eager")
    worst = 0.0
    try:
        for each, wanted in zip(given, expected, strict=True):
            worst = max(worst, distance(gradients(model, model(inputs, targets, places_M=places, **each)), wanted))
            with torch.no_grad():
                model.eval()(inputs, targets, places_M=places, per_target=True, **each)
                model.train()
    finally:
        torch.compiler.reset()
    return worst


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides its own warning; an error is not hidden
def test_compiled_blocks_are_one_graph_each_and_compute_the_same() -> None:
    _, documents = packed()
    assert compiled_distance(replace(TINY, num_layers=2), [{"documents_BL": documents}]) < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kinds_of_blocks_compile(architecture: str) -> None:
    """Of modern: first, local and global ones, trained and evaluated, with and without documents: over 8 variants."""
    _, documents = packed()
    given: list[dict[str, Any]] = [{"documents_BL": documents}, {}, {"documents_BL": documents.flip(0)}]
    assert compiled_distance(shape_of(architecture), given) < 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_autocast_stays_close_and_the_stream_is_bf16(architecture: str) -> None:
    model, (inputs, documents) = make(shape_of(architecture), std=0.1), packed()
    targets, places = chosen(inputs)
    exact = model(inputs, targets, places_M=places, documents_BL=documents)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(inputs, targets, places_M=places, documents_BL=documents)
        assert model.hidden(inputs, documents).dtype == torch.bfloat16
    assert rough.dtype == torch.float32
    assert float(rough.detach()) == pytest.approx(float(exact.detach()), rel=2e-2)


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("bad", [512, -1])
def test_ids_outside_the_vocabulary_raise_and_are_named(where: str, bad: int) -> None:
    inputs = ids(2, 8)
    targets, places = chosen(inputs)
    {"inputs": inputs[1], "targets": targets}[where][2] = bad
    with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of 512"):
        make(TINY)(inputs, targets, places_M=places)


def test_rotary_tables_come_back_after_to_empty() -> None:
    with torch.device("meta"):
        model = Encoder(shape_of("modern"), attention="native_math")
    model.to_empty(device="cpu").rebuild_buffers()
    fresh = Encoder(shape_of("modern"), attention="native_math")
    assert torch.equal(model.rope_frequency, fresh.rope_frequency)
    assert torch.equal(model.local_frequency, fresh.local_frequency)
    assert not torch.equal(fresh.rope_frequency, fresh.local_frequency)
    assert not any("frequency" in name for name in fresh.state_dict())
