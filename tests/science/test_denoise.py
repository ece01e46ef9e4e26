"""Science C12: with an exact denoiser of a Markov chain the sampler gives back the chain; wrong samplers do not.

The denoiser is forward-backward over the letters that are committed: p(letter at a hidden place | those), exactly.
Drawn one at a time, in random order and at temperature 1, letters are then a sample of the chain itself, and their
bigrams pass a chi-square test against its transition matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.objectives import denoise
from lockstep.objectives.denoise import DiffusionSampleOptions, generate
from lockstep.sources import synthetic

LETTERS = synthetic.STATES
MASK = LETTERS
ROWS, LENGTH = 4000, 8
FEWEST = 5.0  # expected in a cell of the test; those with less are one cell
BIAS = torch.tensor([0.0] * LETTERS + [-torch.inf])
EXACT = DiffusionSampleOptions(tokens=LENGTH, temperature=1.0, remasking="random")


@dataclass(frozen=True)
class Shape:
    vocab_size: int = LETTERS + 1
    max_position_embeddings: int = LENGTH


class Oracle(nn.Module):
    """The best denoiser there is; `shift` is added to all logits, which no sampler may notice."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.shape, self.shift = Shape(), shift
        self.step_VV = torch.from_numpy(synthetic.transitions())
        self.first_V = torch.from_numpy(synthetic.stationary())

    def forward(self, inputs_BL: Tensor, *, places_M: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        assert documents_BL is None
        known_BLV = torch.ones(*inputs_BL.shape, LETTERS, dtype=torch.float64)
        letters_NV = torch.eye(LETTERS, dtype=torch.float64)
        known_BLV[inputs_BL != MASK] = letters_NV[inputs_BL[inputs_BL != MASK]]
        before, after = [self.first_V.expand(len(inputs_BL), -1)], [torch.ones_like(known_BLV[:, 0])]
        for place in range(1, inputs_BL.shape[1]):
            reached_BV = (before[-1] * known_BLV[:, place - 1]) @ self.step_VV
            before.append(reached_BV / reached_BV.sum(1, keepdim=True))
            left_BV = (after[-1] * known_BLV[:, -place]) @ self.step_VV.T
            after.append(left_BV / left_BV.sum(1, keepdim=True))
        chances_NV = (torch.stack(before, 1) * torch.stack(after[::-1], 1)).flatten(0, 1)[places_M]
        logits_NV = (chances_NV / chances_NV.sum(1, keepdim=True)).log() + self.shift
        return torch.cat([logits_NV, logits_NV.amax(1, keepdim=True)], 1)  # it would gladly say the mask


def letters(options: DiffusionSampleOptions, oracle: Oracle | None = None) -> np.ndarray:
    found = generate(oracle or Oracle(), [[]] * ROWS, options, mask=MASK, bias_V=BIAS)
    assert found.passes == (options.steps or LENGTH)
    return np.array(found.rows)


def chance(rows: np.ndarray) -> float:
    """Of bigrams at least so far from the chain's, if they were its: chi-square, each letter's successors apart."""
    counts = np.zeros((LETTERS, LETTERS))
    np.add.at(counts, (rows[:, :-1].ravel(), rows[:, 1:].ravel()), 1)
    total, freedom = 0.0, 0
    for seen, share in zip(counts, synthetic.transitions(), strict=True):
        expected = seen.sum() * share
        rare = expected < FEWEST
        pairs = [*zip(seen[~rare], expected[~rare], strict=True)]
        if rare.any() and expected[rare].sum() > 0:
            pairs.append((seen[rare].sum(), expected[rare].sum()))
        total += sum((found - should) ** 2 / should for found, should in pairs)
        freedom += max(0, len(pairs) - 1)
    halves = (torch.tensor(half / 2, dtype=torch.float64) for half in (freedom, total))
    return float(torch.special.gammaincc(*halves))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_exact_denoiser_gives_back_the_chain(seed: int) -> None:
    rows = letters(replace(EXACT, seed=seed * ROWS))
    assert chance(rows) > 0.01
    alone = np.bincount(rows.ravel(), minlength=LETTERS) / rows.size
    assert np.abs(alone - synthetic.stationary()).max() < 0.01


def test_left_to_right_is_as_exact() -> None:
    assert chance(letters(replace(EXACT, block_length=1))) > 0.01
    assert chance(letters(EXACT, Oracle(shift=100.0))) > 0.01


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"remasking": "low_confidence"},  # sure places first are other rows than the chain's
        {"steps": LENGTH // 2},  # two at a time do not know of each other
        {"top_k": 8},
    ],
    ids=str,
)
def test_another_sampler_is_another_chain(change: dict[str, float]) -> None:
    """Negative controls: the test sees each of them."""
    assert chance(letters(replace(EXACT, **change))) < 1e-6


def test_the_original_form_in_float32_is_another_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(logit) / (-ln u)^T leaves float32 at logits near 90, where a trained model's may lie."""

    def draw(logits_MV: Tensor, keys_M: Tensor, options: DiffusionSampleOptions) -> Tensor:
        uniform = denoise.uniform(keys_M[:, None] + denoise.mix(torch.arange(LETTERS + 1))).float()
        return (logits_MV.float().exp() / (-uniform.log()) ** options.temperature).argmax(-1)

    monkeypatch.setattr(denoise, "_draw", draw)
    assert chance(letters(EXACT, Oracle(shift=100.0))) < 1e-6


def test_float32_would_starve_rare_letters() -> None:
    """All 2^24 numbers of float32 between 0 and 1: a letter of chance e^-15 comes a tenth too seldom.

    It wins against a sure one if (-ln u) e^15 is under -ln u' of the other, for a given u in u^(e^15) of all cases.
    """
    odds = np.exp(15.0)
    near_one = 1 - np.arange(1, 2001) / (1 << 24)  # further away it never wins
    in_float32 = float((near_one**odds).sum() / (1 << 24))
    assert in_float32 * odds == pytest.approx(0.9, abs=0.02)
    finest = denoise.uniform(torch.arange(200_000)).numpy() * 2.0**52
    assert (finest % 1 == 0.5).all(), "ours are spread 2^28 times finer"
