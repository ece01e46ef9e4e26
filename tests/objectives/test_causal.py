"""Next-token prediction: rows, the one shift, sums, samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.contracts import Batch, Draw, Rows, SampleOptions
from lockstep.errors import ConfigError
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import KNOWN, LlamaShape
from lockstep.objectives import causal
from lockstep.objectives.causal import Causal, expanded
from lockstep.objectives.options import CausalOptions

DRAW = Draw(seed=0, step=0, batch_rows=1)


def rows_of(**columns: np.ndarray) -> Rows:
    places = np.arange(len(columns["tokens"]))
    return Rows(places, np.zeros_like(places), places, columns)


def packed(
    documents: list[list[int]], context: int, separator: int, *, mode: str = "separated", block: int = 1 << 20
) -> Rows:
    """All rows of some documents, gathered in blocks of so many tokens."""
    objective = Causal(documents=mode)
    arrays = (np.array(document, dtype=np.uint16) for document in documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "PACK_TOKENS", block)
        blocks = list(objective.pack(arrays, context_length=context, separator=separator))
    none = {name: np.empty((0, context + 1), dtype) for name, dtype in objective.columns.items()}
    rows = rows_of(**{name: np.concatenate([none[name], *(made[name] for made in blocks)]) for name in none})
    assert all(rows.columns[name].dtype == dtype for name, dtype in objective.columns.items())
    return rows


# Several documents in a row, documents longer than a row, of one token, and empty ones.
DOCUMENTS = st.lists(st.lists(st.integers(0, 90), max_size=30), max_size=20)
CONTEXTS, SEPARATORS, BLOCKS = st.integers(1, 12), st.sampled_from([-1, 99]), st.integers(1, 40)


@settings(deadline=None, max_examples=100)
@given(documents=DOCUMENTS, context=CONTEXTS, separator=SEPARATORS, block=BLOCKS)
def test_every_token_is_predicted_exactly_once(
    documents: list[list[int]], context: int, separator: int, block: int
) -> None:
    """No padding, no gap, no token twice: targets are the corpus but its first token, up to a tail under one row."""
    end = [separator] if separator >= 0 else []
    stream = [token for document in documents if document for token in document + end]
    rows = packed(documents, context, separator, block=block)
    count = max(0, (len(stream) - 1) // context)
    assert rows.columns["tokens"].shape == (count, context + 1)
    batch = Causal().collate(rows, DRAW)
    assert expanded(batch)["inputs"].flatten().tolist() == stream[: count * context]
    assert expanded(batch)["targets"].flatten().tolist() == stream[1 : count * context + 1]
    assert batch.weights["loss"] == batch.tokens == count * context


@settings(deadline=None, max_examples=200)
@given(documents=DOCUMENTS, context=CONTEXTS, separator=SEPARATORS, block=BLOCKS)
def test_apart_every_token_is_predicted_once_but_the_first_of_a_document(
    documents: list[list[int]], context: int, separator: int, block: int
) -> None:
    """From its own document and nothing else: which one is known by counting, not by looking for separators."""
    end = [separator] if separator >= 0 else []
    stream = [(number, token) for number, ids in enumerate(documents) if ids for token in ids + end]
    rows = packed(documents, context, separator, mode="masked", block=block)
    joined = packed(documents, context, separator)
    assert np.array_equal(rows.columns["tokens"], joined.columns["tokens"]), "the rows are those of the other modes"
    batch = Causal(documents="masked").collate(rows, DRAW)
    plain = Causal().collate(joined, DRAW)
    assert torch.equal(expanded(batch)["inputs"], expanded(plain)["inputs"])
    place = np.arange(len(expanded(plain)["targets"]))[:, None] * context + np.arange(context)  # of an input
    owner = np.array([number for number, _ in stream] or [0])
    counted = owner[place] == owner[np.minimum(place + 1, len(owner) - 1)]
    assert torch.equal(expanded(batch)["targets"], expanded(plain)["targets"].where(torch.from_numpy(counted), -100))
    assert batch.weights["loss"] == int(counted.sum())
    assert batch.tokens == plain.tokens
    told = expanded(batch)["documents"].numpy()
    for row, owners in enumerate(owner[place]):
        assert np.array_equal(told[row][:, None] == told[row], owners[:, None] == owners)


def test_the_first_token_of_a_document_is_no_target_and_inputs_stay_whole() -> None:
    """By hand; also in a batch of one row, where inputs and targets could share memory."""
    rows = packed([[1, 2, 3], [4], [5, 6]], 8, 9, mode="masked")
    assert rows.columns["tokens"].tolist() == [[1, 2, 3, 9, 4, 9, 5, 6, 9]]
    assert rows.columns["starts"].tolist() == [[1, 0, 0, 0, 1, 0, 1, 0, 0]]
    batch = Causal(documents="masked").collate(rows, DRAW)
    assert expanded(batch)["inputs"].tolist() == [[1, 2, 3, 9, 4, 9, 5, 6]]
    assert expanded(batch)["targets"].tolist() == [[2, 3, 9, -100, 9, -100, 6, 9]]
    assert expanded(batch)["documents"].tolist() == [[1, 1, 1, 1, 2, 2, 3, 3]]
    assert (batch.weights, batch.tokens) == ({"loss": 6}, 8)
    assert rows.columns["tokens"].tolist() == [[1, 2, 3, 9, 4, 9, 5, 6, 9]]


def test_columns_are_known_without_torch() -> None:
    """The cache key is made of them before any worker starts."""
    for mode in ("joined", "separated", "masked"):
        assert causal.build(CausalOptions(), documents=mode).columns == CausalOptions.columns_of(mode)
    assert CausalOptions.columns_of("separated") == CausalOptions.columns_of("joined") == {"tokens": "int32"}
    assert causal.build(CausalOptions()).columns == {"tokens": "int32"}


def test_blocks_stream() -> None:
    """The first rows come before the last document is asked for."""
    asked = 0

    def endless():
        nonlocal asked
        while True:
            asked += 1
            yield np.zeros(100_000, dtype=np.int32)

    block = next(Causal().pack(endless(), context_length=64, separator=0))
    assert asked <= 11
    assert len(block["tokens"]) > 10_000


def test_collate_counts_targets() -> None:
    batch = Causal().collate(rows_of(tokens=np.arange(20, dtype=np.int32).reshape(4, 5)), DRAW)
    assert batch.weights == {"loss": 16}
    assert (batch.rows, batch.tokens) == (4, 16)
    assert expanded(batch)["inputs"].dtype == torch.int64
    assert torch.equal(expanded(batch)["targets"], expanded(batch)["inputs"] + 1)


def twice_shifted(batch: Batch) -> Batch:
    """The upstream bug: labels shifted in the data and again in the loss, so two ahead are predicted."""
    inputs, targets = expanded(batch)["inputs"][:, :-1].contiguous(), expanded(batch)["targets"][:, 1:].contiguous()
    return Batch({"inputs": inputs, "targets": targets}, {"loss": targets.numel()}, batch.rows, targets.numel())


@pytest.mark.parametrize("bug", [False, True])
def test_next_token_is_learnt_and_two_ahead_is_seen(bug: bool) -> None:
    """Contract 29. Pairs (a, f(a)) with a uniform over 16: next-token optimum ln 16 / 2, two-ahead optimum ln 16."""
    shape = LlamaShape(32, 32, 64, 1, 2, 2, 16, 64, 10000.0)
    model = Llama(shape, attention="native_flash")
    initialise(model, seed=1, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator = np.random.default_rng(0)
    mapped = generator.permutation(16) + 16
    objective, losses = Causal(), []
    for _ in range(120):
        first = generator.integers(0, 16, (16, 17))
        tokens = np.stack((first, mapped[first]), axis=-1).reshape(16, 34)[:, :33].astype(np.int32)
        batch = objective.collate(rows_of(tokens=tokens), DRAW)
        batch = twice_shifted(batch) if bug else batch
        loss = objective.loss(model, batch)["loss"] / batch.weights["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    final = sum(losses[-10:]) / 10
    if bug:
        assert final > math.log(16) - 0.1
    else:
        assert math.log(16) / 2 - 0.05 < final < math.log(16) / 2 + 0.1


@pytest.fixture(scope="module")
def model() -> Llama:
    made = Llama(KNOWN["lockstep/tiny"], attention="native_flash")
    initialise(made, seed=1, std=0.3)
    return made


def test_evaluate_is_loss_and_accuracy_as_sums(model: Llama) -> None:
    tokens = np.random.default_rng(1).integers(0, 512, (6, 33)).astype(np.int32)
    with torch.no_grad():
        best = model(torch.from_numpy(tokens[:, :-1]).long()).argmax(-1).numpy()
    tokens[:, 1:] = np.where(np.random.default_rng(2).random((6, 32)) < 0.5, best, tokens[:, 1:])
    objective, batch = Causal(), Causal().collate(rows_of(tokens=tokens), DRAW)
    scores = objective.evaluate(model, batch)
    logits = model(expanded(batch)["inputs"]).detach()
    assert scores["loss"].weight == scores["accuracy"].weight == 6 * 32
    assert float(scores["loss"].total) == pytest.approx(float(objective.loss(model, batch)["loss"].detach()), rel=1e-5)
    assert int(scores["accuracy"].total) == int((logits.argmax(-1) == expanded(batch)["targets"]).sum()) > 0


def test_samples_repeat_by_seed_and_stop(model: Llama) -> None:
    objective, prompt = Causal(), [1, 2, 3]
    hot = SampleOptions(tokens=20, temperature=1.0, top_k=0, seed=4)
    model.train()
    first = objective.sample(model, prompt, hot)
    assert model.training  # left as it was
    torch.manual_seed(123)
    assert objective.sample(model, prompt, hot) == first
    assert len(first) == 20
    assert objective.sample(model, prompt, SampleOptions(tokens=20, temperature=1.0, top_k=0, seed=5)) != first
    greedy = objective.sample(model, prompt, SampleOptions(tokens=20, temperature=0.0))
    assert objective.sample(model, prompt, SampleOptions(tokens=20, temperature=1.0, top_k=1, seed=9)) == greedy
    stop = greedy[7]
    ended = objective.sample(model, prompt, SampleOptions(tokens=20, temperature=0.0, stop=(stop,)))
    assert ended == greedy[: greedy.index(stop) + 1]
    with pytest.raises(ConfigError, match="empty prompt"):
        objective.sample(model, [], hot)


def test_top_k_and_temperature_shape_the_draw() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    hits = [0, 0, 0, 0]
    for _ in range(4000):
        hits[causal.draw(logits, SampleOptions(temperature=0.5, top_k=3), generator)] += 1
    expected = torch.softmax(logits[:3] / 0.5, 0)
    assert [count / 4000 for count in hits[:3]] == pytest.approx(expected.tolist(), abs=0.03)
    assert hits[3] == 0


def test_the_window_slides() -> None:
    short = Llama(LlamaShape(64, 32, 64, 1, 2, 2, 16, 8, 10000.0), attention="native_math")
    initialise(short, seed=1, std=0.3)
    tokens = Causal().sample(short, list(range(20)), SampleOptions(tokens=10, temperature=0.0))
    assert len(tokens) == 10
    assert tokens == Causal().sample(short, list(range(12, 20)), SampleOptions(tokens=10, temperature=0.0))


@pytest.mark.parametrize("temperature", [1e-45, 5e-324, 1e-38, 1e-9])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_smallest_temperatures_are_greedy(temperature: float, top_k: int) -> None:
    logits = torch.tensor([2.0, 1.0, 2.0001, -50.0])
    generator = torch.Generator().manual_seed(0)
    options = SampleOptions(temperature=temperature, top_k=top_k)
    assert {causal.draw(logits, options, generator) for _ in range(20)} == {2}


def test_the_smallest_temperature_that_draws_still_can() -> None:
    logits = 1e4 * torch.tensor([2.0, 1.0, 2.0001, -50.0])
    options = SampleOptions(temperature=causal.GREEDY_BELOW, top_k=0)
    assert causal.draw(logits, options, torch.Generator().manual_seed(0)) == 2
