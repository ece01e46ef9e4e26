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
from lockstep.models.shapes import KNOWN, LlamaShape
from lockstep.objectives import causal
from lockstep.objectives.causal import Causal

DRAW = Draw(seed=0, step=0, batch_rows=1)


def rows_of(tokens: np.ndarray) -> Rows:
    places = np.arange(len(tokens))
    return Rows(places, np.zeros_like(places), places, {"tokens": tokens})


def packed(documents: list[list[int]], context: int, separator: int) -> np.ndarray:
    arrays = (np.array(document, dtype=np.uint16) for document in documents)
    blocks = [block["tokens"] for block in Causal().pack(arrays, context_length=context, separator=separator)]
    return np.concatenate(blocks) if blocks else np.empty((0, context + 1), dtype=np.int32)


@settings(deadline=None, max_examples=100)
@given(
    documents=st.lists(st.lists(st.integers(0, 90), max_size=30), max_size=20),
    context=st.integers(1, 12),
    separator=st.sampled_from([-1, 99]),
    block=st.integers(1, 40),
)
def test_every_token_is_predicted_exactly_once(
    documents: list[list[int]], context: int, separator: int, block: int
) -> None:
    end = [separator] if separator >= 0 else []
    stream = [token for document in documents if document for token in document + end]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "PACK_TOKENS", block)
        rows = packed(documents, context, separator)
    count = max(0, (len(stream) - 1) // context)
    assert rows.shape == (count, context + 1)
    assert rows.dtype == np.int32
    batch = Causal().collate(rows_of(rows), DRAW)
    assert batch.tensors["inputs"].flatten().tolist() == stream[: count * context]
    assert batch.tensors["targets"].flatten().tolist() == stream[1 : count * context + 1]


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
    batch = Causal().collate(rows_of(np.arange(20, dtype=np.int32).reshape(4, 5)), DRAW)
    assert batch.weights == {"loss": 16}
    assert (batch.rows, batch.tokens) == (4, 16)
    assert batch.tensors["inputs"].dtype == torch.int64
    assert torch.equal(batch.tensors["targets"], batch.tensors["inputs"] + 1)


def twice_shifted(batch: Batch) -> Batch:
    """The upstream bug: labels shifted in the data and again in the loss, so two ahead are predicted."""
    inputs, targets = batch.tensors["inputs"][:, :-1].contiguous(), batch.tensors["targets"][:, 1:].contiguous()
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
        batch = objective.collate(rows_of(tokens), DRAW)
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
    objective, batch = Causal(), Causal().collate(rows_of(tokens), DRAW)
    scores = objective.evaluate(model, batch)
    logits = model(batch.tensors["inputs"]).detach()
    assert scores["loss"].weight == scores["accuracy"].weight == 6 * 32
    assert float(scores["loss"].total) == pytest.approx(float(objective.loss(model, batch)["loss"].detach()), rel=1e-5)
    assert int(scores["accuracy"].total) == int((logits.argmax(-1) == batch.tensors["targets"]).sum()) > 0


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
        hits[causal._draw(logits, SampleOptions(temperature=0.5, top_k=3), generator)] += 1
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
    assert {causal._draw(logits, options, generator) for _ in range(20)} == {2}


def test_the_smallest_temperature_that_draws_still_can() -> None:
    logits = 1e4 * torch.tensor([2.0, 1.0, 2.0001, -50.0])
    options = SampleOptions(temperature=causal.GREEDY_BELOW, top_k=0)
    assert causal._draw(logits, options, torch.Generator().manual_seed(0)) == 2
