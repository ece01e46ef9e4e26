"""The likelihood of an answer: its expectation is exact, counted out on a vocabulary small enough to see all of it."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import LlamaShape
from lockstep.objectives import likelihood
from lockstep.objectives.likelihood import hidden_places, log_likelihood

LETTERS, LENGTH = 3, 4
MASK = LETTERS
SHAPE = LlamaShape(8, 16, 32, 2, 2, 2, 8, 32, 1e4, layout="llada", bidirectional=True)


class Oracle(nn.Module):
    """The exact conditionals of a random distribution over all texts of LENGTH letters; odd in every other way.

    `flat` knows less than could be known: it finds the letters of a place equally likely.
    """

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.shape = SimpleNamespace(max_position_embeddings=64, vocab_size=LETTERS + 1)
        self.anything = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        drawn = np.random.default_rng(3).dirichlet(np.full(LETTERS**LENGTH, 0.5))
        self.joint = drawn.reshape((LETTERS,) * LENGTH)
        self.flat = flat
        self.rows: list[int] = []

    def forward(self, inputs: Any, targets: Any = None, *, places_M: Any, **named: Any) -> Any:
        self.rows.append(len(inputs))
        texts, logits = inputs[:, -LENGTH:].tolist(), []
        for place in places_M.tolist():
            row, column = divmod(place, inputs.shape[1])
            seen, at = texts[row], column - (inputs.shape[1] - LENGTH)
            part = self.joint[tuple(slice(None) if token == MASK else token for token in seen)]
            blanks = [axis for axis, token in enumerate(seen) if token == MASK]
            marginal = part.sum(tuple(axis for axis in range(len(blanks)) if axis != blanks.index(at)))
            shares = np.full(LETTERS, 1 / LETTERS) if self.flat else marginal / marginal.sum()
            logits.append([*np.log(shares), -math.inf])
        table = torch.tensor(logits, dtype=torch.float64)
        if targets is None:
            return table
        return torch.nn.functional.cross_entropy(table, targets, reduction="none"), table.argmax(-1) == targets


TEXTS = list(itertools.product(range(LETTERS), repeat=LENGTH))[::7]


@pytest.mark.parametrize("samples", [1, 3, 4, 8])
def test_l_is_uniform_and_places_are_drawn_without_return(samples: int) -> None:
    counts = np.zeros((samples, LENGTH + 1))
    pairs = np.zeros((LENGTH, LENGTH))
    for seed in range(1200):
        hidden, number = hidden_places(LENGTH, samples, np.random.default_rng(seed))
        assert np.array_equal(hidden.sum(1), number)
        counts[np.arange(samples), number] += 1
        pairs += hidden[:1][number[:1] == 2].T.astype(float) @ hidden[:1][number[:1] == 2]
        if samples % LENGTH == 0:
            assert np.array_equal(np.bincount(number, minlength=LENGTH + 1)[1:], np.full(LENGTH, samples // LENGTH))
    assert (np.abs(counts[:, 1:] - 300) < 4.5 * math.sqrt(300)).all()
    assert counts[:, 0].sum() == 0
    together = pairs[np.triu_indices(LENGTH, 1)]  # each pair of places one time in six
    assert (np.abs(together - together.mean()) < 4.5 * math.sqrt(together.mean())).all()


def brute_force(oracle: Oracle, text: tuple[int, ...]) -> float:
    """The expectation, over every l and every choice of l places."""
    total = 0.0
    for count in range(1, LENGTH + 1):
        choices = list(itertools.combinations(range(LENGTH), count))
        for places in choices:
            inputs = torch.tensor([[MASK if at in places else token for at, token in enumerate(text)]])
            losses, _ = oracle(inputs, torch.tensor([text[at] for at in places]), places_M=torch.tensor(places))
            total += LENGTH / count * float(losses.sum()) / len(choices) / LENGTH
    return -total


def test_the_expectation_is_the_likelihood_of_the_oracle() -> None:
    """Counted out it is log p to the last digit, since the oracle's orders all agree; samples come near it."""
    oracle = Oracle()
    for text in TEXTS:
        exact = math.log(oracle.joint[text])
        assert brute_force(oracle, text) == pytest.approx(exact, rel=1e-12)
    draws = [log_likelihood(oracle, [1, 2], TEXTS[5], mask=MASK, samples=8, seed=seed) for seed in range(300)]
    error = float(np.std(draws)) / math.sqrt(300)
    assert np.mean(draws) == pytest.approx(math.log(oracle.joint[TEXTS[5]]), abs=4 * error + 1e-9)
    assert 0 < error < 0.1


def test_a_model_that_knows_less_scores_less_as_a_mean() -> None:
    """A bound: below the truth by what it does not know; here it is known exactly."""
    flat = Oracle(flat=True)
    scores = [log_likelihood(flat, [], text, mask=MASK, samples=4) for text in TEXTS]
    assert scores == pytest.approx([-LENGTH * math.log(LETTERS)] * len(TEXTS)), "any draw: all its terms are alike"
    weight = Oracle().joint
    true = float((weight * np.log(weight)).sum())
    assert true > -LENGTH * math.log(LETTERS)


def test_dividing_by_l_alone_would_be_wrong() -> None:
    """Negative control: the mean cross-entropy without n / l is another number."""
    oracle, text = Oracle(), TEXTS[5]
    exact = math.log(oracle.joint[text])
    wrong = -np.mean(
        [
            float(
                oracle(
                    torch.tensor([[MASK if at in places else token for at, token in enumerate(text)]]),
                    torch.tensor([text[at] for at in places]),
                    places_M=torch.tensor(places),
                )[0].sum()
            )
            for count in range(1, LENGTH + 1)
            for places in itertools.combinations(range(LENGTH), count)
        ]
    )
    assert abs(wrong - exact) > 0.3


@pytest.fixture(scope="module")
def model() -> Llama:
    made = Llama(SHAPE, attention="native_math")
    initialise(made, seed=1, std=0.3)
    return made.train()


BIAS = torch.tensor([0.0] * 6 + [-math.inf] * 2)


def test_it_repeats_and_does_not_depend_on_the_batch(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"mask": 6, "bias_V": BIAS, "samples": 20}
    first = log_likelihood(model, [1, 2, 3], [4, 5, 0, 1, 2], seed=4, **asked)
    assert model.training, "left as it was"
    assert first == log_likelihood(model, [1, 2, 3], [4, 5, 0, 1, 2], seed=4, **asked)
    assert first != log_likelihood(model, [1, 2, 3], [4, 5, 0, 1, 2], seed=5, **asked)
    monkeypatch.setattr(likelihood, "PASS_TOKENS", 24)
    assert log_likelihood(model, [1, 2, 3], [4, 5, 0, 1, 2], seed=4, **asked) == pytest.approx(first, rel=1e-6)


def test_guidance(model: Llama) -> None:
    """One token alone: the logits of the formula, written out; and scale 0 changes nothing."""
    answer = [4]
    with torch.no_grad():
        known, blind = (model(torch.tensor([row]))[0, -1] for row in ([1, 2, 6], [6, 6, 6]))
    for scale in (0.5, 2.0):
        expected = torch.log_softmax(blind + (scale + 1) * (known - blind) + BIAS, 0)[4]
        found = log_likelihood(model, [1, 2], answer, mask=6, bias_V=BIAS, cfg_scale=scale)
        assert found == pytest.approx(float(expected), rel=1e-5)
    plain = float(torch.log_softmax(known + BIAS, 0)[4])
    assert log_likelihood(model, [1, 2], answer, mask=6, bias_V=BIAS) == pytest.approx(plain, rel=1e-5)
    several = {
        scale: log_likelihood(model, [1, 2], [4, 5, 0], mask=6, bias_V=BIAS, cfg_scale=scale)
        for scale in (0.0, 1e-6, 1.0)
    }
    assert several[1e-6] == pytest.approx(several[0.0], rel=1e-4)
    assert abs(several[1.0] - several[0.0]) > 1e-3


def test_one_token_is_asked_for_once_and_long_prompts_lose_their_beginning(model: Llama) -> None:
    oracle = Oracle()
    log_likelihood(oracle, [], TEXTS[1], mask=MASK, samples=16)
    assert sum(oracle.rows) == 16
    passes: list[int] = []

    def counted(rows: torch.Tensor, *more: Any, **named: Any) -> Any:
        passes.append(len(rows))
        return Llama.forward(model, rows, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", counted)
        log_likelihood(model, [1, 2], [4], mask=6, samples=16)
        log_likelihood(model, [1, 2], [4, 5], mask=6, samples=16)
    assert passes == [1, 16]
    long = [1] * 40 + [2, 3]
    assert log_likelihood(model, long, [4], mask=6) == log_likelihood(model, long[-31:], [4], mask=6)
    for answer in ([], [1] * 33):
        with pytest.raises(ConfigError, match="cannot be scored"):
            log_likelihood(model, [1], answer, mask=6)
