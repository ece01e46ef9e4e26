"""Masked diffusion: times, what is hidden, the loss against its formula, evaluation, and figures that cannot be."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lockstep.contracts import Batch, Draw, Rows, Vocabulary
from lockstep.models import llama
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.models.llama_shapes import LlamaShape
from lockstep.objectives import noise
from lockstep.objectives.diffusion import BUCKETS, Diffusion, build
from lockstep.objectives.options import DiffusionOptions

SIZE, MASK, EOS = 60, 60, 59  # the mask is the first row that no token has
VOCABULARY = Vocabulary(SIZE, {}, np.zeros(SIZE, bool))
ROWS, LENGTH = 8, 24
DRAW = Draw(seed=5, step=3, batch_rows=ROWS, steps=100)
EPS = 1e-3
SHAPE = LlamaShape(64, 32, 64, 2, 4, 2, 8, 64, 1e4, layout="llada", bidirectional=True)


def made(documents: str = "separated", **options: Any) -> Diffusion:
    wanted = {"random_length_probability": 0.0, **options}
    return build(DiffusionOptions.model_validate(wanted), documents=documents).with_vocabulary(VOCABULARY)


def text(rows: int = ROWS, length: int = LENGTH, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, EOS, (rows, length)).astype(np.int32)


def rows_of(tokens: np.ndarray, *, first: int = 0, epoch: int = 0, **columns: np.ndarray) -> Rows:
    ids = np.arange(first, first + len(tokens))
    return Rows(ids, np.full_like(ids, epoch), ids - first, {"tokens": tokens, **columns})


def conversations() -> tuple[np.ndarray, np.ndarray]:
    """Rows of prompts and answers of different lengths, ends after them; none as long as the row."""
    tokens, random = text(seed=1), np.random.default_rng(2)
    prompts = random.integers(0, 12, ROWS)
    ends = prompts + random.integers(1, 9, ROWS)
    for row, end in enumerate(ends):
        tokens[row, end - 1 :] = EOS
    return tokens, np.stack([prompts, ends], 1).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> Llama:
    """Rows 61 to 63 of its output matrix are nobody's."""
    made = Llama(SHAPE, attention="native_math")
    initialise(made, seed=1, std=0.2)
    return made.double()


# --------------------------------------------------------------------------------------------------------------- noise


def test_times_are_spread_over_the_global_batch() -> None:
    """One t in each B-th part of [0, 1), each uniform by itself, and shares from eps to 1 (item 111)."""
    for count in (1, 2, 3, 7, 8, 12, 64, 100, 257):
        slots = np.arange(count)
        drawn = np.stack([noise.times(slots, seed=1, step=step, batch_rows=count) for step in range(400)])
        assert drawn.min() >= 0
        assert drawn.max() < 1
        strata = np.floor(np.sort((drawn - drawn[:, :1]) % 1.0, axis=1) * count + 0.5)
        assert np.array_equal(strata, np.tile(slots, (400, 1))), count
        for slot in {0, count // 2, count - 1}:  # Kolmogorov-Smirnov, one in a thousand
            ordered = np.sort(drawn[:, slot])
            assert np.abs(ordered - (np.arange(400) + 0.5) / 400).max() < 1.95 / math.sqrt(400)
    free = np.random.default_rng(0).random(64)
    assert len(set(np.floor(free * 64).tolist())) < 64, "negative control: free draws leave parts out"


@pytest.mark.parametrize("count", [6, 12, 64, 96, 512, 1000])
def test_every_micro_batch_spans_the_range(count: int) -> None:
    """Whatever run of neighbouring slots a micro-batch is: no gap much wider than evenly spread times would leave."""
    times = noise.times(np.arange(count), seed=1, step=0, batch_rows=count)
    for size in {2, 3, 4, 8, 16} - set(range(count, 17)):
        for first in range(0, count - size + 1, size):
            part = np.sort(times[first : first + size])
            gaps = np.diff(part, append=part[0] + 1)
            assert gaps.max() <= 2.0 / size + 1 / count, (size, first)
    assert np.diff(np.sort(np.arange(count)[:4] / count), append=1).max() > 0.3, "control: slots in their own order"


def test_the_hidden_share_is_p() -> None:
    """Item 111: each row by its own p; the smallest is eps, and at t near 1 all is hidden."""
    objective, tokens = made(), text(256, 4000)
    batch = objective.collate(rows_of(tokens), Draw(5, 0, 256, 100))
    shares = (1 - EPS) * batch.tensors["times"].double().numpy() + EPS
    assert shares.min() < 0.005
    assert shares.min() >= EPS
    assert 0.995 < shares.max() <= 1
    hidden = (batch.tensors["inputs"] == MASK).double().mean(1).numpy()
    error = np.sqrt(shares * (1 - shares) / 4000)
    assert (np.abs(hidden - shares) < 4.5 * error + 1e-9).all()
    assert not (np.abs(hidden - np.roll(shares, 1)) < 4.5 * error + 1e-9).all(), "control: another row's share"
    weights = batch.tensors["token_weights"].double()
    per_row = np.repeat(1 / shares, (batch.tensors["inputs"] == MASK).sum(1).numpy())
    assert np.allclose(weights.numpy(), per_row, rtol=1e-4)
    assert weights.max() < 1 / EPS


def test_what_is_hidden_and_nothing_else_changes() -> None:
    tokens = text()
    batch = made().collate(rows_of(tokens), DRAW)
    inputs, places = batch.tensors["inputs"].numpy().reshape(-1), batch.tensors["places"].numpy()
    flat = tokens.reshape(-1)
    assert np.array_equal(places, np.flatnonzero(inputs == MASK))
    assert np.array_equal(batch.tensors["targets"].numpy(), flat[places])
    assert np.array_equal(np.delete(inputs, places), np.delete(flat, places))
    assert batch.weights == {"loss": ROWS * LENGTH}
    assert (batch.rows, batch.tokens) == (ROWS, ROWS * LENGTH)


def parts_of(objective: Diffusion, rows: Rows, sizes: tuple[int, ...], draw: Draw) -> list[Batch]:
    cuts = [slice(first, last) for first, last in pairwise(np.cumsum((0, *sizes)).tolist())]
    return [
        objective.collate(
            Rows(rows.ids[c], rows.epochs[c], rows.slots[c], {name: col[c] for name, col in rows.columns.items()}), draw
        )
        for c in cuts
    ]


@pytest.mark.parametrize("documents", ["separated", "answers"])
def test_the_cut_changes_no_bit(documents: str) -> None:
    objective = made(documents)
    tokens, lengths = conversations()
    columns: dict[str, Any] = {"lengths": lengths} if documents == "answers" else {}
    rows, draw = rows_of(tokens, first=100, **columns), DRAW._replace(whole=columns)
    whole = objective.collate(rows, draw)
    for sizes in ((1,) * 8, (4, 4), (3, 5), (2, 2, 2, 2)):
        parts = parts_of(objective, rows, sizes, draw)
        for name in ("inputs", "targets", "token_weights", "times"):
            assert torch.equal(torch.cat([part.tensors[name] for part in parts]), whole.tensors[name])
        assert sum(part.weights["loss"] for part in parts) == whole.weights["loss"]


def test_seed_epoch_step_row_and_slot_each_decide() -> None:
    objective, tokens = made(), np.full((ROWS, 400), 7, np.int32)
    first = objective.collate(rows_of(tokens), DRAW).tensors
    others = {
        "epoch": objective.collate(rows_of(tokens, epoch=1), DRAW).tensors,
        "row": objective.collate(rows_of(tokens, first=ROWS), DRAW).tensors,
        "seed": objective.collate(rows_of(tokens), DRAW._replace(seed=6)).tensors,
        "step": objective.collate(rows_of(tokens), DRAW._replace(step=4)).tensors,
    }
    for name, other in others.items():
        moved = name in ("seed", "step")
        assert torch.equal(first["times"], other["times"]) != moved, "t is of the slot and the step"
        assert not torch.equal(first["inputs"], other["inputs"])
    both = ((first["inputs"] == MASK) & (others["epoch"]["inputs"] == MASK)).double().mean(1)
    share = (1 - EPS) * first["times"].double() + EPS
    assert torch.allclose(both, share**2, atol=4.5 * 0.5 / math.sqrt(400)), "a new epoch hides independently"


def test_rows_are_cut_in_one_of_a_hundred_steps() -> None:
    """Science 3.1: all rows of a step alike, uniform lengths, no validation, no answers."""
    drawn = [noise.cut_length(64, seed=1, step=step, probability=0.01) for step in range(10_000)]
    cut = [length for length in drawn if length < 64]
    assert len(cut) == pytest.approx(100 * 63 / 64, abs=4 * math.sqrt(100))
    assert min(cut) < 4
    assert 60 < max(cut) < 64
    assert np.mean(cut) == pytest.approx(32, abs=4 * 18.5 / math.sqrt(len(cut)))
    always, tokens = made(random_length_probability=1.0), text()
    widths = set()
    for step in range(40):
        draw = DRAW._replace(step=step)
        parts = parts_of(always, rows_of(tokens), (3, 5), draw)
        assert len({part.tensors["inputs"].shape[1] for part in parts}) == 1
        width = parts[0].tensors["inputs"].shape[1]
        assert [part.weights["loss"] for part in parts] == [3 * width, 5 * width]
        assert ("cut" in parts[0].tensors) == (width < LENGTH)
        widths.add(width)
    assert len(widths) > 15
    assert always.collate(rows_of(tokens), DRAW._replace(steps=0)).weights == {"loss": ROWS * LENGTH}
    default = DiffusionOptions().random_length_probability
    assert default == 0.01


# ---------------------------------------------------------------------------------------------------------------- loss


def reference(model: Llama, batch: Batch, tokens: np.ndarray, prompts: np.ndarray | None = None) -> torch.Tensor:
    """The formula of the guideline, row by row, with all logits; already divided."""
    total, inputs = torch.zeros((), dtype=torch.float64), batch.tensors["inputs"]
    length = inputs.shape[1]
    for row, t in enumerate(batch.tensors["times"].double().tolist()):
        logits = model(inputs[row : row + 1])[0]
        logits = torch.cat([logits[:, :SIZE], torch.full((length, 4), -math.inf, dtype=torch.float64)], 1)
        share = (1 - EPS) * t + EPS
        for place in (inputs[row] == MASK).nonzero().flatten().tolist():
            each = F.cross_entropy(logits[place], torch.tensor(int(tokens[row, place]))) / share
            total = total + (each / length if prompts is None else each / (length - prompts[row]))
    return total / len(inputs)


@pytest.mark.parametrize("documents", ["separated", "answers"])
def test_the_loss_is_the_formula(model: Llama, documents: str) -> None:
    """Items 111 and 112: pre-training and answers after prompts of different lengths, one row with nothing hidden."""
    objective, draw = made(documents), DRAW
    tokens, lengths = conversations()
    rows = rows_of(tokens)
    if documents == "answers":
        rows, draw = rows_of(tokens, lengths=lengths), DRAW._replace(whole={"lengths": lengths})
    batches = (objective.collate(rows, draw._replace(step=step)) for step in range(2000))
    batch = next(batch for batch in batches if int((batch.tensors["inputs"] == MASK).sum(1).min()) == 0)
    prompts = lengths[:, 0] if documents == "answers" else None
    if prompts is not None:
        assert batch.tensors["inputs"].shape[1] == lengths[:, 1].max() < LENGTH, "the longest of the batch"
        assert len(set(prompts.tolist())) > 3
        inside = np.arange(lengths[:, 1].max()) < prompts[:, None]
        assert not (inside & (batch.tensors["inputs"].numpy() == MASK)).any(), "a prompt is never hidden"
        assert (batch.tensors["targets"] == EOS).sum() > ROWS, "the ends after an answer are learnt"
    expected = reference(model, batch, tokens, prompts)
    found = objective.loss(model, batch)["loss"] / batch.weights["loss"]
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients, wanted = (torch.autograd.grad(each, list(model.parameters())) for each in (found, expected))
    for one, other in zip(gradients, wanted, strict=True):
        assert float((one - other).abs().max()) < 1e-6 * float(other.abs().max())
    hidden = len(batch.tensors["targets"])
    assert abs(batch.weights["loss"] / hidden - 1) > 0.3, "control: divided by the hidden ones it would be another"


def test_logits_are_never_clamped(model: Llama) -> None:
    """Contract 3.9.9: a model that is sure of itself keeps its loss; cut off at 100 it would be another."""
    objective, tokens, sure = made(), text(), copy.deepcopy(model)
    with torch.no_grad():
        sure.get_parameter("output.weight").mul_(80)
        batch = objective.collate(rows_of(tokens), DRAW)
        found = float(objective.loss(sure, batch)["loss"]) / batch.weights["loss"]
        assert float(sure(batch.tensors["inputs"]).abs().max()) > 200
        assert found == pytest.approx(float(reference(sure, batch, tokens)), rel=1e-6)
        clamped: Any = lambda inputs: sure(inputs).clamp(-100, 100)  # noqa: E731 - the fault
        assert abs(float(reference(clamped, batch, tokens)) / found - 1) > 0.05


def test_the_head_is_asked_at_hidden_places_only(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output matrix is half of the work of a small model, and most of its memory."""
    asked: list[int] = []
    for name in ("linear_cross_entropy", "score_targets"):
        kernel = getattr(llama, name)

        def noted(x_ND: torch.Tensor, *more: Any, kernel: Any = kernel, **named: Any) -> Any:
            asked.append(len(x_ND))
            return kernel(x_ND, *more, **named)

        monkeypatch.setattr(llama, name, noted)
    objective = made()
    batch = objective.collate(rows_of(text()), DRAW)
    objective.loss(model, batch)
    objective.evaluate(model, batch)
    hidden = int((batch.tensors["inputs"] == MASK).sum())
    assert asked == [hidden, hidden]
    assert hidden < 0.7 * ROWS * LENGTH


def test_nothing_hidden_is_zero_with_a_gradient(model: Llama) -> None:
    """Item 112: one row, or all of a batch."""
    objective = made(eps=1e-9)
    tokens = np.full((2, 4), MASK - 1, np.int32)
    batch = next(
        batch
        for batch in (objective.collate(rows_of(tokens[:1]), Draw(1, step, 1000, 9)) for step in range(9000))
        if not len(batch.tensors["places"])
    )
    total = objective.loss(model, batch)["loss"]
    assert float(total.detach()) == 0
    for gradient in torch.autograd.grad(total, list(model.parameters())):
        assert not gradient.any()
    assert {name: (float(part.total), part.weight) for name, part in objective.evaluate(model, batch).items()} == {
        "loss": (0.0, 4), "accuracy": (0.0, 0), **{f"loss_t_{bucket}": (0.0, 0) for bucket in range(BUCKETS)}
    }  # fmt: skip


class Even(Llama):
    """Finds every id alike."""

    def forward(self, inputs: Any, targets: Any = None, weights: Any = None, **named: Any) -> Any:  # pyright: ignore
        logits = torch.zeros(len(targets), self.shape.vocab_size) + named["logit_bias_V"]
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses, logits.argmax(-1) == targets) if named.get("per_target") else (losses * weights).sum()


def test_a_uniform_model_has_the_entropy_of_the_ids_it_may_name() -> None:
    """Science 3.6: ln V with all tokens as the divisor; with the hidden ones of each row it reads far above."""
    objective = made()
    even = Even(LlamaShape(64, 8, 8, 1, 1, 1, 8, 64, 1e4, layout="llada", bidirectional=True), attention="native_math")
    tokens, right, wrong = text(64, 64), [], []
    for step in range(60):
        batch = objective.collate(rows_of(tokens, epoch=step), Draw(1, step, 64, 60))
        total = float(objective.loss(even, batch)["loss"])
        right.append(total / batch.weights["loss"])
        counts = (batch.tensors["inputs"] == MASK).sum(1)
        per_row = torch.split(batch.tensors["token_weights"], counts.tolist())
        wrong.append(np.mean([math.log(SIZE) * float(w.sum()) / len(w) for w in per_row if len(w)]))
    error = float(np.std(right)) / math.sqrt(60)
    assert objective.possible_ids == SIZE
    assert np.mean(right) == pytest.approx(math.log(SIZE), abs=4 * error)
    assert error < 0.03
    assert np.mean(wrong) > 3 * math.log(SIZE), "one row at a time, divided by what is hidden in it"


def test_stratified_times_are_less_noisy() -> None:
    """Why t is not drawn freely: the weights of the tokens alone vary several times less."""
    slots = np.arange(32)
    drawn = [noise.times(slots, seed=1, step=step, batch_rows=32) for step in range(300)]
    free = np.random.default_rng(1).random((300, 32))
    assert np.std([each.mean() for each in drawn]) < 0.3 * np.std(free.mean(1))
