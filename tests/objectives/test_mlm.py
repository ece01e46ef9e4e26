"""Masked-LM: rows, what is chosen and what becomes of it, sums, blanks, and accuracies that cannot be."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from lockstep.contracts import Batch, Draw, Rows, SampleOptions, Vocabulary
from lockstep.errors import ConfigError
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import EncoderShape
from lockstep.models.initialise import initialise
from lockstep.objectives.mlm import Mlm, build
from lockstep.objectives.options import MlmOptions

SIZE = 64
PAD, CLS, SEP, UNK, MASK = 0, 7, 9, 3, 63  # scattered: nothing may rely on 0..4
SPECIALS = {"pad": PAD, "cls": CLS, "sep": SEP, "unk": UNK, "mask": MASK}
ORDINARY = [token for token in range(SIZE) if token not in SPECIALS.values()]
LETTERS = st.sampled_from(ORDINARY[:40])
GOES_ON = np.isin(np.arange(SIZE), ORDINARY[20:])
VOCABULARY = Vocabulary(SIZE, SPECIALS, GOES_ON)
DRAW = Draw(seed=5, step=0, batch_rows=1)


def made(documents: str = "masked", **options: object) -> Mlm:
    return build(MlmOptions.model_validate(options), documents=documents).with_vocabulary(VOCABULARY)


def rows_of(tokens: np.ndarray, *, first: int = 0, epoch: int = 0) -> Rows:
    ids = np.arange(first, first + len(tokens))
    return Rows(ids, np.full_like(ids, epoch), ids, {"tokens": tokens.astype(np.int32)})


# ------------------------------------------------------------------------------------------------------------- masking


def text(rows: int, length: int, *, seed: int = 0) -> np.ndarray:
    """Rows of ordinary tokens, [UNK]s among them, between [CLS] and [SEP], some with padding."""
    random = np.random.default_rng(seed)
    tokens = random.choice([*ORDINARY, UNK], (rows, length))
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    tokens[::4, length // 2], tokens[::4, length // 2 + 1 :] = SEP, PAD
    return tokens.astype(np.int32)


def seen(tokens: np.ndarray, batch: Batch) -> dict[str, float]:
    """Shares of what happened, and what must never happen."""
    inputs, places, targets, channels = (batch.tensors[name].numpy() for name in ("inputs", "places", "targets",
                                                                                 "channels"))  # fmt: skip
    before, after = tokens.reshape(-1), inputs.reshape(-1)
    ordinary = np.isin(before, ORDINARY)
    assert (np.diff(places) > 0).all()
    assert np.array_equal(before[places], targets)
    assert ordinary[places].all(), "a special token was chosen"
    untouched = np.ones(len(before), bool)
    untouched[places] = False
    assert np.array_equal(before[untouched], after[untouched])
    drawn = after[places[channels == 1]]
    assert np.isin(drawn, ORDINARY).all(), "a special token was put in"
    assert (after[places[channels == 0]] == MASK).all()
    assert (after[places[channels == 2]] == targets[channels == 2]).all()
    counts = np.bincount(drawn, minlength=SIZE)[ORDINARY]
    expected = len(drawn) / len(ORDINARY)
    assert ((counts - expected) ** 2 / expected).sum() < len(ORDINARY) + 6 * math.sqrt(2 * len(ORDINARY)), "chi squared"
    shares = np.bincount(channels, minlength=3) / len(places)
    return {"chosen": len(places) / ordinary.sum(), "masked": shares[0], "random": shares[1], "kept": shares[2]}


def right(found: dict[str, float], p: float = 0.15) -> bool:
    """The tolerances of science 2.3."""
    shares = (found["masked"] - 0.8, found["random"] - 0.1, found["kept"] - 0.1)
    return abs(found["chosen"] - p) < 0.001 and max(map(abs, shares)) < 0.003


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_million_tokens_are_masked_as_they_should(whole_words: bool) -> None:
    """Science 2.1, contract 91: .150 +- .001 chosen, 80/10/10 +- .3 %, specials neither chosen nor put in."""
    tokens = text(10_000, 130)
    assert np.isin(tokens, ORDINARY).sum() > 1_000_000
    objective = made(whole_words=whole_words)
    parts = [objective.collate(rows_of(tokens[at : at + 500], first=at), DRAW) for at in range(0, len(tokens), 500)]
    offsets = [500 * 130 * number for number in range(len(parts))]
    whole = {name: torch.cat([part.tensors[name] for part in parts]) for name in ("inputs", "targets", "channels")}
    whole["places"] = torch.cat([part.tensors["places"] + at for part, at in zip(parts, offsets, strict=True)])
    found = seen(tokens, Batch(whole, {"loss": len(whole["places"])}, len(tokens), 0))
    if whole_words:  # fewer choices, of some three tokens each
        assert abs(found["chosen"] - 0.15) < 0.003
        found["chosen"] = 0.15
    assert right(found), found
    assert all(part.weights == {"loss": len(part.tensors["places"])} for part in parts)
    assert sum(part.tokens for part in parts) == int((tokens != PAD).sum())
    # negative controls: a share off by half a percent, and 15 % of all tokens instead of the ordinary ones
    assert not right({**found, "masked": 0.795, "random": 0.105})
    assert not right({**found, "chosen": 0.15 * np.isin(tokens, ORDINARY).mean()})


def test_special_tokens_that_are_chosen_are_seen() -> None:
    """Negative control of the checks above: the same objective, not told that [UNK] is special."""
    tokens = text(400, 130)
    fewer = Vocabulary(SIZE, {name: SPECIALS[name] for name in SPECIALS if name != "unk"}, GOES_ON)
    loose = build(MlmOptions()).with_vocabulary(fewer).collate(rows_of(tokens), DRAW)
    with pytest.raises(AssertionError, match="was chosen"):
        seen(tokens, loose)


def test_shares_can_be_set() -> None:
    tokens = text(400, 130)
    for masked, random in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.5), (0.7, 0.1)):
        batch = made(masked_share=masked, random_share=random).collate(rows_of(tokens), DRAW)
        shares = torch.bincount(batch.tensors["channels"], minlength=3) / batch.weights["loss"]
        assert shares.tolist() == pytest.approx([masked, random, 1 - masked - random], abs=0.03)
        assert [share > 0 for share in shares.tolist()] == [masked > 0, random > 0, masked + random < 1]
    with pytest.raises(ConfigError, match="more than all"):
        build(MlmOptions(masked_share=0.8, random_share=0.3))


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("whole_words", [False, True])
def test_the_cut_changes_no_bit(whole_words: bool) -> None:
    """Rows one by one, in another order, at another slot: what happens to a row is its own affair."""
    objective, tokens = made(whole_words=whole_words), text(24, 50)
    whole = objective.collate(rows_of(tokens, first=100), Draw(5, 7, 24, 50))
    inputs = []
    for row in reversed(range(24)):
        alone = Rows(np.array([100 + row]), np.zeros(1, int), np.array([row % 3]), {"tokens": tokens[row : row + 1]})
        inputs.insert(0, objective.collate(alone, Draw(5, 9, 3, 50)).tensors["inputs"])
    assert torch.equal(torch.cat(inputs), whole.tensors["inputs"])


def test_seed_epoch_row_and_position_each_decide() -> None:
    objective, tokens = made(), np.tile(text(1, 200, seed=1), (6, 1))
    tokens[:, 1:-1] = 20  # every place of every row alike: only its number can tell
    first = objective.collate(rows_of(tokens), DRAW)
    assert same(first, objective.collate(rows_of(tokens), DRAW._replace(step=3)))
    assert same(first, objective.collate(rows_of(tokens), Draw(5, 0, 99, 1000)))
    others = [
        objective.collate(rows_of(tokens, epoch=1), DRAW),
        objective.collate(rows_of(tokens, first=6), DRAW),
        objective.collate(rows_of(tokens), DRAW._replace(seed=6)),
        objective.collate(rows_of(tokens), DRAW._replace(seed=-5)),
    ]
    for other in others:
        chosen, again = set(first.tensors["places"].tolist()), set(other.tensors["places"].tolist())
        assert len(chosen & again) < 0.4 * len(chosen), "about 15 % by chance"
    per_row = [set((row.nonzero().flatten()).tolist()) for row in (first.tensors["inputs"] == MASK)]
    assert all(len(one & other) < 0.5 * len(one) for one, other in pairwise(per_row))


def test_neighbouring_keys_are_independent() -> None:
    """Rows, epochs and positions that follow each other: every pair of neighbours is chosen together p * p often."""
    objective, p = made(mask_probability=0.3), 0.3
    tokens = np.full((4000, 64), 20)
    grids = []
    for epoch in (0, 1):
        batch = objective.collate(rows_of(tokens, epoch=epoch), DRAW)
        grid = np.zeros(tokens.size, bool)
        grid[batch.tensors["places"].numpy()] = True
        grids.append(grid.reshape(tokens.shape))
    error = 4 * math.sqrt(p * p * (1 - p * p) / tokens.size)
    for one, other in ((grids[0], grids[1]), (grids[0][1:], grids[0][:-1]), (grids[0][:, 1:], grids[0][:, :-1])):
        assert (one & other).mean() == pytest.approx(p * p, abs=error)


def test_the_share_goes_on_a_straight_line() -> None:
    objective = made(mask_probability=0.3, last_mask_probability=0.15)
    line = [objective.probability(Draw(0, step, 1, 101)) for step in (0, 25, 50, 100, 200)]
    assert line == pytest.approx([0.3, 0.2625, 0.225, 0.15, 0.15])
    assert objective.probability(Draw(0, 0, 1)) == 0.15, "validation: the last"
    assert objective.probability(Draw(0, 0, 1, 1)) == 0.3
    assert made(mask_probability=0.3).probability(Draw(0, 70, 1, 101)) == 0.3
    tokens = text(2000, 130)
    for step, expected in ((0, 0.3), (50, 0.225), (100, 0.15)):
        found = seen(tokens, objective.collate(rows_of(tokens), Draw(5, step, 1, 101)))
        assert found["chosen"] == pytest.approx(expected, abs=0.005)


def words_of(row: list[int]) -> list[list[int]]:
    """Places of the words of a row, the slow way."""
    words: list[list[int]] = []
    for place, token in enumerate(row):
        if token not in ORDINARY:
            continue
        if GOES_ON[token] and place and row[place - 1] in ORDINARY:
            words[-1].append(place)
        else:
            words.append([place])
    return words


def halves(tokens: np.ndarray, batch: Batch) -> int:
    """Words of which some tokens are chosen, and some are not."""
    chosen = set(batch.tensors["places"].tolist())
    width = tokens.shape[1]
    parts = [[number * width + place in chosen for place in word]
             for number, row in enumerate(tokens.tolist()) for word in words_of(row)]  # fmt: skip
    return sum(any(word) and not all(word) for word in parts)


def test_whole_words_are_chosen_whole_and_end_with_their_document() -> None:
    tokens = text(300, 60)
    tokens[:, 20:22] = SEP, CLS
    tokens[:, 19], tokens[:, 22] = 40, 41  # would be one word but for the edge
    batch = made(whole_words=True).collate(rows_of(tokens), DRAW)
    assert halves(tokens, batch) == 0
    longest = max(len(word) for row in tokens.tolist() for word in words_of(row))
    assert longest > 4
    edges = [{row * 60 + 19, row * 60 + 22} & set(batch.tensors["places"].tolist()) for row in range(300)]
    assert any(len(edge) == 1 for edge in edges), "both sides of an edge are not one choice"
    assert halves(tokens, made().collate(rows_of(tokens), DRAW)) > 100, "negative control: token by token"
    channels = dict(zip(batch.tensors["places"].tolist(), batch.tensors["channels"].tolist(), strict=True))
    became = [{channels.get(number * 60 + place, -1) for place in word}
              for number, row in enumerate(tokens.tolist()) for word in words_of(row)]  # fmt: skip
    assert sum(len(kinds) > 1 for kinds in became) > 20, "what becomes of each is drawn token by token"


# --------------------------------------------------------------------------------------------------------------- model


@pytest.fixture(scope="module")
def model() -> Encoder:
    made = Encoder(EncoderShape("prenorm", SIZE + 8, 32, 64, 2, 2, 64, 1e-12), attention="native_math")
    initialise(made, seed=1, std=0.3)
    return made


@pytest.mark.parametrize("mode", ["masked", "padded", "separated"])
def test_loss_and_accuracies_are_those_of_the_logits(model: Encoder, mode: str) -> None:
    objective = made(mode, mask_probability=0.5)
    documents = [np.random.default_rng(n).choice(ORDINARY, 3 + 5 * n) for n in range(12)]
    tokens = next(objective.pack(documents, context_length=32, separator=1))["tokens"]
    batch = objective.collate(rows_of(tokens), DRAW)
    numbers = None
    if mode != "separated":
        numbers = torch.from_numpy(np.where(tokens == PAD, 0, (tokens == CLS).cumsum(1)))
    logits = model(batch.tensors["inputs"], documents_BL=numbers).detach().flatten(0, 1)[batch.tensors["places"]]
    each = torch.nn.functional.cross_entropy(logits, batch.tensors["targets"], reduction="none")
    hits, channels = logits.argmax(-1) == batch.tensors["targets"], batch.tensors["channels"]
    total = objective.loss(model, batch)["loss"]
    assert float(total.detach()) == pytest.approx(float(each.sum()), rel=1e-5)
    sums = objective.evaluate(model, batch)
    assert float(sums["loss"].total) == pytest.approx(float(each.sum()), rel=1e-5)
    assert sums["loss"].weight == sums["accuracy"].weight == batch.weights["loss"] == len(each)
    assert int(sums["accuracy"].total) == int(hits.sum())
    for channel, name in enumerate(("masked", "random", "kept")):
        assert sums[f"accuracy_{name}"].weight == int((channels == channel).sum()) > 0
        assert int(sums[f"accuracy_{name}"].total) == int(hits[channels == channel].sum())


def test_a_batch_in_which_nothing_was_chosen_is_no_fault(model: Encoder) -> None:
    batch = made().collate(rows_of(np.full((2, 8), PAD)), DRAW)
    assert batch.weights == {"loss": 0}
    assert float(made().loss(model, batch)["loss"].detach()) == 0
    assert {part.weight for part in made().evaluate(model, batch).values()} == {0}


def test_blanks_are_filled_the_surest_first(model: Encoder) -> None:
    objective, prompt = made(), [20, MASK, 30, MASK, 40]
    greedy = SampleOptions(temperature=0.0)
    model.train()
    filled = objective.sample(model, prompt, greedy)
    assert model.training  # left as it was
    assert [filled[at] for at in (0, 2, 4)] == [20, 30, 40]
    assert all(filled[at] in ORDINARY for at in (1, 3))
    answers = objective.fill(model, prompt, top=3)
    assert [place for place, _ in answers] == [1, 3]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[CLS, *prompt, SEP]]))[0, [2, 4]]
    likely = logits.index_fill(1, torch.tensor([*SPECIALS.values(), *range(SIZE, SIZE + 8)]), -math.inf).softmax(-1)
    for (_, answer), chances in zip(answers, likely, strict=True):
        assert [token for token, _ in answer] == chances.topk(3).indices.tolist()
        assert [chance for _, chance in answer] == pytest.approx(chances.topk(3).values.tolist(), rel=1e-4)
    surest = int(likely.amax(-1).argmax())
    assert filled[answers[surest][0]] == answers[surest][1][0][0]
    hot = SampleOptions(temperature=5.0, top_k=0, seed=3)
    assert objective.sample(model, prompt, hot) == objective.sample(model, prompt, hot)
    drawn = {tuple(objective.sample(model, prompt, SampleOptions(temperature=5.0, top_k=0, seed=n))) for n in range(9)}
    assert len(drawn) > 2
    with pytest.raises(ConfigError, match="nothing to fill"):
        objective.sample(model, [20, 21], greedy)


def test_long_prompts_are_seen_around_each_blank(model: Encoder) -> None:
    prompt = [20] * 500
    for place in (0, 250, 499):
        prompt[place] = MASK
    answers = made().fill(model, prompt)
    assert [place for place, _ in answers] == [0, 250, 499]
    window = prompt[:62]
    assert dict(made().fill(model, window)[0][1]) == pytest.approx(dict(answers[0][1]))
    assert MASK not in made().sample(model, prompt, SampleOptions(temperature=0.0))


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    bare = Vocabulary(9, {"sep": 0, "pad": 1}, np.zeros(9, bool))
    with pytest.raises(ConfigError, match=r"\[CLS\], \[MASK\]") as caught:
        build(MlmOptions()).with_vocabulary(bare)
    assert "wordpiece" in str(caught.value)
    assert made().columns == MlmOptions.columns_of("masked")
