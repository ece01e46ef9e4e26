"""The comparison with random first weights: it sees a difference where there is one, and none where there is none."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from lockstep.engine import downstream
from lockstep.engine.downstream import How, Rows, Side, compare, features, probe
from lockstep.engine.labelled import Labelled
from lockstep.runtime.precision import Precision

CPU = torch.device("cpu")
WORDS, WIDTH = 400, 4


class Knowing(nn.Module):
    """A stand-in for an encoder: an embedding; `seed` None: its first number tells the two kinds of words apart."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        weight = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(seed or 0))
        if seed is None:
            weight[:, 0] = torch.where(torch.arange(WORDS) % 2 == 0, 1.0, -1.0)
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.seen: list[torch.Tensor] = []

    def hidden(self, inputs_BL: torch.Tensor, documents_BL: torch.Tensor) -> torch.Tensor:
        self.seen.append(documents_BL)
        return self.embedding(inputs_BL) + 100 * (documents_BL == 0).unsqueeze(-1)  # padding must not be heard


def two_kinds(count: int, *, shuffled: bool = False) -> tuple[Rows, Labelled]:
    """Texts whose label is whether they have more words of even or of odd number."""
    drawn = random.Random(7)
    ids: list[tuple[int, ...]] = []
    labels: list[int] = []
    for place in range(count):
        label = place % 2
        kinds = [label if drawn.random() < 0.7 else 1 - label for _ in range(drawn.randrange(9, 30))]
        ids.append(tuple(2 * drawn.randrange(5, WORDS // 2) + kind for kind in kinds))
        labels.append(label)
    if shuffled:
        drawn.shuffle(labels)
    texts = tuple(" ".join(map(str, row)) for row in ids)
    return Rows(tuple(ids), 0, cut=0), Labelled(texts, tuple(labels), ("even", "odd"), "here")


@pytest.mark.parametrize("method", ["probe", "finetune"])
def test_a_real_difference_is_seen(method: str) -> None:
    rows, labelled = two_kinds(600)
    found = compare(Knowing(None), Knowing, rows, labelled, How(method, seeds=3, epochs=2))
    assert found.pretrained.mean > 0.85
    assert found.difference > 0.1
    assert found.deviations > downstream.CLEAR
    assert found.verdict == "pretraining helps"
    assert found.lines()[-1] == "Verdict: pretraining helps"


@pytest.mark.parametrize("method", ["probe", "finetune"])
def test_shuffled_labels_give_none(method: str) -> None:
    """The control: where labels mean nothing, nobody is better than chance."""
    rows, labelled = two_kinds(600, shuffled=True)
    found = compare(Knowing(None), Knowing, rows, labelled, How(method, seeds=3, epochs=1))
    assert abs(found.deviations) <= downstream.CLEAR
    assert found.verdict.startswith("no clear difference")
    assert abs(found.pretrained.mean - 0.5) < 0.1


def test_an_encoder_that_forgot_is_told_so() -> None:
    rows, labelled = two_kinds(600)
    found = compare(Knowing(5), lambda _: Knowing(None), rows, labelled, How(seeds=3))
    assert found.verdict.startswith("pretraining harms")
    assert found.lines()[0].endswith(", 3 seeds")
    assert replace(found, how=How(seeds=1)).lines()[0].endswith(", 1 seed")


@pytest.mark.parametrize("method", ["probe", "finetune"])
def test_the_same_twice_and_the_model_is_left_as_it_was(method: str) -> None:
    rows, labelled = two_kinds(200)
    model = Knowing(None)
    before = model.embedding.weight.detach().clone()
    first, second = (compare(model, Knowing, rows, labelled, How(method, seeds=2)).fields() for _ in range(2))
    assert first == second
    assert torch.equal(before, model.embedding.weight)


def test_both_encoders_of_a_seed_see_the_same() -> None:
    """Untrained weights that are those of the pretrained model: not the least difference is left."""
    rows, labelled = two_kinds(200)
    for method in ("probe", "finetune"):
        found = compare(Knowing(3), lambda _: Knowing(3), rows, labelled, How(method, seeds=2))
        assert found.pretrained.accuracies == found.random.accuracies


def test_features_are_the_mean_over_the_tokens_whatever_stands_beside_a_text() -> None:
    rows, _ = two_kinds(100)
    model = Knowing(1)
    found = features(model, rows, Precision("fp32", CPU))
    for place, ids in enumerate(rows.ids):
        expected = model.embedding(torch.tensor(ids)).double().mean(0)
        assert torch.allclose(found[place], expected, atol=1e-5)
    assert any((documents_BL == 0).any() for documents_BL in model.seen)


def test_the_probe_is_the_optimum_of_its_loss() -> None:
    """Against gradient descent on the same convex function, started elsewhere."""
    drawn = torch.Generator().manual_seed(0)
    x_ND = torch.randn(300, 5, generator=drawn, dtype=torch.float64)
    logits = x_ND @ torch.tensor([6.0, -3, 0, 0, 1.5], dtype=torch.float64)
    labels_N = (torch.rand(300, generator=drawn, dtype=torch.float64) < torch.sigmoid(logits)).long()
    train, test = list(range(240)), list(range(240, 300))
    task = downstream.Task(Rows((), 0, 0), labels_N, train, test, 2)
    mean, scale = x_ND[train].mean(0), x_ND[train].std(0, correction=0)
    z_ND = (x_ND - mean) / scale
    weight = torch.randn(2, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        loss = nn.functional.cross_entropy(z_ND[train] @ weight.T + bias, labels_N[train], reduction="sum")
        (loss + downstream.L2 / 2 * weight.square().sum()).backward()
        with torch.no_grad():
            for parameter in (weight, bias):
                assert parameter.grad is not None
                parameter -= 5e-3 * parameter.grad
                parameter.grad = None
    guessed = (z_ND[test] @ weight.T + bias).argmax(1)
    assert probe(x_ND, task) == (guessed == labels_N[test]).double().mean().item()
    assert probe(x_ND, task) > 0.8


def test_few_test_texts_are_never_a_proof() -> None:
    """Seeds that agree by luck have no deviation; ten texts still leave much open."""
    lucky = Side((0.8, 0.8, 0.8), texts=10)
    assert lucky.deviation == 0
    assert lucky.noise == pytest.approx(math.sqrt(0.8 * 0.2 / 10))
    assert Side((1.0, 1.0), texts=10).noise > 0
    assert Side((0.5, 0.9), texts=10_000).noise == pytest.approx(Side((0.5, 0.9), texts=10_000).deviation)


def test_texts_are_cut_to_a_row_and_marked() -> None:
    from lockstep.data.tokenize import train_words

    tokenizer = train_words(["a b c d e"], 20)
    rows = downstream.encode(["a b c d e", "b", ""], tokenizer, longest=5)
    begin, end = 1, 2
    assert [len(ids) for ids in rows.ids] == [5, 3, 2]
    assert all(ids[0] == begin and ids[-1] == end for ids in rows.ids)
    assert rows.cut == 1
    inputs_BL, documents_BL = rows.batch([0, 1], CPU)
    assert documents_BL.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert inputs_BL[1, 3:].tolist() == [rows.pad, rows.pad]


def test_a_gpu_sees_few_widths_and_none_beyond_the_longest_text() -> None:
    rows = Rows(tuple((1,) * length for length in range(3, 401)), 0, cut=0)
    on = {kind: [rows.width([place], torch.device(kind)) for place in range(398)] for kind in ("cpu", "cuda")}
    assert on["cpu"] == list(range(3, 401))
    assert set(on["cuda"]) == {128, 256, 400}
    assert all(wide >= needed for wide, needed in zip(on["cuda"], on["cpu"], strict=True))
