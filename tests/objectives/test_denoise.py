"""Filling hidden places: schedule, order, guidance, ends of text, batches, blanks, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.contracts import SampleOptions
from lockstep.errors import ConfigError, NonFiniteError
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import KNOWN
from lockstep.objectives import denoise
from lockstep.objectives.denoise import Denoised, DiffusionSampleOptions, generate, guided

IDS, MASK, END = 12, 11, 10  # the ids of the small models here: 0 to 9 are words


@dataclass(frozen=True)
class Shape:
    vocab_size: int = IDS
    max_position_embeddings: int = 64


class Told(nn.Module):
    """A model whose logits are a table by place, and that notes what it was shown."""

    def __init__(self, table_LV: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.shape = Shape()
        self.table = torch.randn(64, IDS, generator=torch.Generator().manual_seed(5)) if table_LV is None else table_LV
        self.seen: list[Tensor] = []

    def forward(self, inputs_BL: Tensor, *, places_M: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        assert documents_BL is None or documents_BL.shape == inputs_BL.shape
        self.seen.append(inputs_BL.clone())
        return self.table[: inputs_BL.shape[1]].expand(len(inputs_BL), -1, -1).flatten(0, 1)[places_M]


@pytest.fixture(scope="module")
def llada() -> Llama:
    """A real model, small and with strong opinions."""
    shape = replace(KNOWN["lockstep/tiny"], vocab_size=IDS, max_position_embeddings=64, bidirectional=True)
    model = Llama(shape, attention="native_flash")
    initialise(model, seed=3, std=0.3)
    return model.eval()


BIAS = torch.zeros(IDS)
BIAS[MASK] = -torch.inf
GREEDY = DiffusionSampleOptions(tokens=12, temperature=0, stop=(END,))


def filled(model: nn.Module, options: DiffusionSampleOptions, *prompts: list[int]) -> Denoised:
    return generate(model, prompts or ([1, 2, 3],), options, mask=MASK, bias_V=BIAS)


def passes(options: DiffusionSampleOptions, model: Told, *prompts: list[int]) -> list[list[int]]:
    """The first row before the first pass and after each of them."""
    end = filled(model, options, *prompts).rows[0]
    return [[*seen[0, -len(end) :].tolist()] for seen in model.seen] + [end]


def order(options: DiffusionSampleOptions, model: Told, *prompts: list[int]) -> list[list[int]]:
    """The places committed by each pass, of the first row."""
    rows = itertools.pairwise(passes(options, model, *prompts))
    return [[place for place, was in enumerate(old) if was == MASK != new[place]] for old, new in rows]


# ------------------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize(
    ("steps", "block"), [(None, None), (12, 12), (12, 4), (6, 4), (3, 4), (5, 12), (1, 12), (12, 1)]
)
def test_passes_are_steps_and_nothing_stays_hidden(steps: int | None, block: int | None) -> None:
    model = Told()
    done = filled(model, replace(GREEDY, steps=steps, block_length=block))
    assert done.passes == len(model.seen) == (steps or 12)
    assert done.rows[0][:3] == [1, 2, 3]
    assert len(done.rows[0]) == 15
    assert MASK not in done.rows[0]


def test_the_remainder_goes_to_the_first_passes() -> None:
    assert [len(each) for each in order(replace(GREEDY, steps=5), Told())] == [3, 3, 2, 2, 2]
    assert [len(each) for each in order(replace(GREEDY, steps=4, block_length=6), Told())] == [3, 3, 3, 3]
    assert [len(each) for each in order(replace(GREEDY, tokens=10, steps=6, block_length=5), Told())] == [2, 2, 1] * 2


def test_the_surest_come_first_and_stay_as_they_are() -> None:
    model, options = Told(), replace(GREEDY, steps=4)
    chances = (model.table.double() + BIAS).softmax(-1).amax(-1)[3:15]
    expected = (3 + chances.argsort(descending=True)).split(3)
    assert order(options, model) == [sorted(some.tolist()) for some in expected]
    rows = passes(options, Told())
    for before, after in itertools.pairwise(rows):
        assert all(was in (now, MASK) for was, now in zip(before, after, strict=True))
    assert [row.count(MASK) for row in rows] == [12, 9, 6, 3, 0]


def test_blocks_of_one_go_from_left_to_right() -> None:
    assert order(replace(GREEDY, block_length=1), Told()) == [[place] for place in range(3, 15)]
    assert order(GREEDY, Told()) != [[place] for place in range(3, 15)]


def test_a_block_ends_before_the_next_begins() -> None:
    places = order(replace(GREEDY, block_length=4, remasking="random", seed=1), Told())
    assert [sorted(place for each in places[at : at + 4] for place in each) for at in (0, 4, 8)] == [
        [*range(3, 7)], [*range(7, 11)], [*range(11, 15)]
    ]  # fmt: skip
    assert places != sorted(places)


def test_greedy_repeats_and_draws_follow_the_seed(llada: Llama) -> None:
    assert filled(llada, GREEDY) == filled(llada, replace(GREEDY, seed=9))
    warm = replace(GREEDY, temperature=1.0)
    assert filled(llada, warm) == filled(llada, warm)
    assert filled(llada, warm) != filled(llada, replace(warm, seed=9))


def test_the_mask_is_never_an_answer() -> None:
    """The model would say nothing else."""
    table = torch.zeros(64, IDS)
    table[:, MASK] = 50.0
    for temperature in (0.0, 1.0):
        assert MASK not in filled(Told(table), replace(GREEDY, temperature=temperature)).rows[0]
    with pytest.raises(AssertionError):  # what would happen without the objective's bias
        assert MASK not in generate(Told(table), [[1]], GREEDY, mask=MASK, bias_V=None).rows[0]


# ----------------------------------------------------------------------------------------------------------- threshold


def test_a_threshold_commits_all_that_are_sure_and_one_at_the_least() -> None:
    model = Told()
    chances = (model.table.double() + BIAS).softmax(-1).amax(-1)[3:15]
    level = float(chances.sort(descending=True).values[6:8].mean())  # seven are above
    assert [len(each) for each in order(replace(GREEDY, threshold=level), model)] == [7, 1, 1, 1, 1, 1]
    assert filled(Told(), replace(GREEDY, threshold=level)).passes == len(model.seen) == 6
    assert filled(Told(), replace(GREEDY, threshold=1.0)) == filled(Told(), GREEDY), "nobody is that sure"
    assert filled(Told(), replace(GREEDY, threshold=0.0, block_length=4)).passes == 3


# ------------------------------------------------------------------------------------------------------------ guidance


class Echo(Told):
    """Says the first id it is shown, a little."""

    def forward(self, inputs_BL: Tensor, *, places_M: Tensor, documents_BL: Tensor | None = None) -> Tensor:
        logits = super().forward(inputs_BL, places_M=places_M, documents_BL=documents_BL)
        return logits + nn.functional.one_hot(inputs_BL[places_M // inputs_BL.shape[1], 0], IDS)


def test_guidance_is_the_formula_and_scale_0_is_none() -> None:
    given, free = torch.randn(2, 5, IDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(guided(given, free, 0.0), free + (given - free))
    assert torch.allclose(guided(given, free, 1.5), 2.5 * given - 1.5 * free)
    assert not torch.allclose(guided(given, free, 1.5), free + 1.5 * (given - free)), "s and not s + 1: another formula"


def test_guidance_shows_the_row_with_and_without_its_prompt() -> None:
    model = Told()
    filled(model, replace(GREEDY, cfg_scale=2.0, steps=3), [1, MASK, 3])
    assert len(model.seen) == 3, "both in one pass"
    for seen in model.seen:
        given, free = seen
        assert given[[0, 2]].tolist() == [1, 3]
        assert free[:3].tolist() == [MASK] * 3, "the prompt is its places, whatever has been filled in there"
        assert torch.equal(given[3:], free[3:])


def test_guidance_makes_the_prompt_heard() -> None:
    table = torch.zeros(64, IDS)
    table[:, 7] = 1.9
    said = {
        scale: set(filled(Echo(table), replace(GREEDY, cfg_scale=scale), [4, 5]).rows[0][2:]) for scale in (0.0, 1.0)
    }
    assert said == {0.0: {7}, 1.0: {4}}
    assert set(filled(Echo(table), replace(GREEDY, cfg_scale=1.0), []).rows[0]) == {7}, "no prompt, nothing to hear"


# -------------------------------------------------------------------------------------------------------- ends of text


def ending(gap: float = 0.5) -> Told:
    """Would end everywhere, and says 7 next, less surely the further it is."""
    table = torch.zeros(64, IDS)
    table[:, END] = 6.0
    table[:, 7] = 6.0 - gap - 0.05 * torch.arange(64)
    return Told(table)


def test_ends_can_be_forbidden() -> None:
    assert set(filled(ending(), GREEDY).rows[0][3:]) == {END}
    assert set(filled(ending(), replace(GREEDY, forbid_eos=True)).rows[0][3:]) == {7}
    assert END not in filled(ending(), replace(GREEDY, forbid_eos=True, temperature=5.0, tokens=60)).rows[0]


def test_delayed_ends_come_after_all_else() -> None:
    table = ending().table.clone()
    table[6:10, 7] = 6.1  # four places have a word, less surely than the others their end
    assert order(replace(GREEDY, delay_eos=True), Told(table))[:4] == [[6], [7], [8], [9]]
    plain = order(GREEDY, Told(table))
    assert plain[:4] != [[6], [7], [8], [9]], "the other places are surer"
    done = filled(Told(table), replace(GREEDY, delay_eos=True, steps=3))
    assert done.rows[0][3:] == [END] * 3 + [7] * 4 + [END] * 5
    at_once = filled(Told(table), replace(GREEDY, delay_eos=True, threshold=0.3))
    assert (at_once.rows, at_once.passes) == (done.rows, 2), "when nothing else is left they are as good as others"


def test_a_sample_stops_at_its_end() -> None:
    table = torch.zeros(64, IDS)
    table[:, 7] = 3.0
    table[6:, END] = 4.0
    options = SampleOptions(tokens=12, temperature=0, stop=(END,))
    assert denoise.sample(Told(table), [1, 2, 3], options, mask=MASK, bias_V=BIAS) == [7, 7, 7, END]


# --------------------------------------------------------------------------------------------------- batches and blanks


@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_is_each_prompt_alone(llada: Llama, temperature: float, scale: float) -> None:
    prompts = [
        [1, 2, 3, 4, 5, 6, 7],
        [8],
        [9, 4],
        [2, 3, MASK, 1],
    ]  # no empty one: its places are all alike, and rounding decides
    options = replace(GREEDY, temperature=temperature, block_length=4, cfg_scale=scale, seed=3)
    together = filled(llada, options, *prompts)
    alone = [filled(llada, replace(options, seed=3 + row), prompt).rows[0] for row, prompt in enumerate(prompts)]
    assert together.rows == alone
    assert len({tuple(row[-12:]) for row in alone}) > 1


def test_padding_that_is_seen_would_tell(llada: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the original ignores the attention mask."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8]]
    right = filled(llada, GREEDY, *prompts)
    plain = Llama.forward
    monkeypatch.setattr(Llama, "forward", lambda self, ids, *, places_M, **_: plain(self, ids, places_M=places_M))
    assert filled(llada, GREEDY, *prompts).rows[1] != right.rows[1]


def test_blanks_of_the_prompt_are_filled_and_nothing_else_of_it_is_touched(llada: Llama) -> None:
    prompt = [1, MASK, 3, MASK, MASK, 6]
    done = filled(llada, replace(GREEDY, tokens=0), prompt)
    assert done.passes == 3
    assert [token for token, was in zip(done.rows[0], prompt, strict=True) if was != MASK] == [1, 3, 6]
    assert MASK not in done.rows[0]
    both = filled(llada, replace(GREEDY, block_length=4), prompt)
    assert (both.passes, len(both.rows[0])) == (15, 18)
    assert MASK not in both.rows[0]
    assert filled(llada, replace(GREEDY, block_length=4, steps=3), prompt).passes == 3
    options = SampleOptions(temperature=0)
    assert denoise.sample(llada, prompt, options, mask=MASK, bias_V=BIAS) == done.rows[0]


def test_blanks_come_with_the_first_block() -> None:
    places = order(replace(GREEDY, block_length=4), Told(), [1, MASK, 3])
    assert sorted(place for each in places[:5] for place in each) == [1, 3, 4, 5, 6]


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"block_length": 5}, "--block-length: 12 tokens are no whole number of blocks of 5"),
        ({"steps": 7, "block_length": 4}, "--steps: 7 are not the same for each of 3 blocks\n  try: --steps 9"),
        ({"steps": 13}, "--steps: 13 passes for 12 tokens: each commits one at the least\n  try: --steps 12"),
        ({"tokens": 62}, "--tokens: a prompt of 3 and 62 more are over the model's 64 positions\n  try: --tokens 61"),
        ({"tokens": 0}, "there is nothing to fill in"),
        ({"tokens": 0, "block_length": 4}, "nothing"),
        ({"threshold": 0.9, "steps": 4}, "--threshold: decides the number of steps by itself"),
        ({"threshold": 0.9, "remasking": "random"}, "--threshold: needs a confidence"),
        ({"remasking": "lowest"}, "--remasking: got 'lowest'\n  try: low_confidence or random"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_pass(change: dict[str, Any], what: str) -> None:
    model = Told()
    with pytest.raises(ConfigError) as refused:
        filled(model, replace(GREEDY, **change))
    assert what in str(refused.value)
    assert not model.seen


def test_a_broken_model_is_named() -> None:
    with pytest.raises(NonFiniteError, match="NaN"):
        filled(Told(torch.full((64, IDS), torch.nan)), GREEDY)


def test_noise_is_the_same_hash_as_elsewhere() -> None:
    import numpy as np

    from lockstep.runtime.splitmix import splitmix64

    numbers = np.random.default_rng(0).integers(0, 1 << 64, 1000, dtype=np.uint64)
    ours = denoise.mix(torch.from_numpy(numbers.view(np.int64)))
    assert np.array_equal(ours.numpy().view(np.uint64), splitmix64(numbers))
    drawn = denoise.uniform(torch.arange(100_000))
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.003)
