"""What every objective promises; a new file in objectives/ is tested the moment it exists."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import registry
from lockstep.contracts import PROMPT, Batch, Draw, Objective, Rows, SampleOptions, Vocabulary
from lockstep.errors import ConfigError
from lockstep.models import agent_shapes, encoder_shapes, llada_shapes, llama_shapes
from lockstep.models.agent import Agent
from lockstep.models.build import Model
from lockstep.models.encoder import Encoder
from lockstep.models.initialise import initialise
from lockstep.models.llama import Llama
from lockstep.objectives.options import CausalOptions, DiffusionOptions, DistillOptions, MlmOptions
from lockstep.worlds.observed import Histories

NAMES = registry.names("objectives")
OPTIONS: dict[str, Any] = {  # one with settings of its own adds its line
    "causal": CausalOptions(),
    "diffusion": DiffusionOptions(),
    "distill": DistillOptions(),
    "mlm": MlmOptions(),
}
OTHER_DOCUMENTS = {"diffusion": "answers"}  # the rest: masked
VOCABULARY = Vocabulary(512, {"pad": 300, "cls": 301, "sep": 256, "unk": 302, "mask": 303}, np.arange(512) % 3 == 0)
MASK = VOCABULARY.specials["mask"]
CONTEXT = 16
HISTORIES = Histories(
    np.random.default_rng(0).integers(0, 2, (3, 8, 40), np.uint8), size=5, horizon=8, actions=5, region=8
)


def test_there_are_objectives() -> None:
    assert {"causal", "diffusion", "distill", "mlm"} <= set(NAMES)
    assert set(NAMES) <= set(OPTIONS)


def can_keep_documents_apart(name: str) -> bool:
    return "documents" in inspect.signature(registry.load("objectives", name, "build")).parameters


@pytest.fixture(
    params=[(name, {}) for name in NAMES]
    + [(name, {"documents": OTHER_DOCUMENTS.get(name, "masked")}) for name in NAMES if can_keep_documents_apart(name)],
    ids=lambda case: "-".join((case[0], *case[1].values())),
)
def objective(request: pytest.FixtureRequest) -> Objective:
    name, mode = request.param
    made = registry.load("objectives", name, "build")(OPTIONS[name], **mode)
    if hasattr(made, "with_histories"):
        return made.with_histories(HISTORIES, length=CONTEXT, terms={})
    told = getattr(made, "with_vocabulary", None)
    return told(VOCABULARY) if told else made


def test_columns_are_known_before_torch_is_loaded(objective: Objective) -> None:
    known = [OPTIONS[name].columns_of(mode) for name in NAMES for mode in ("separated", "masked", "answers")]
    assert objective.columns in known


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """What can be trained on each; one of your own sees what came before."""
    made = {"causal": Llama(llama_shapes.KNOWN["lockstep/tiny"], attention="native_flash"),
            "diffusion": Llama(llada_shapes.KNOWN["lockstep/llada-tiny"], attention="native_flash"),
            "distill": Agent(agent_shapes.KNOWN["lockstep/ad-tiny"], attention="native_flash"),
            "mlm": Encoder(encoder_shapes.KNOWN["lockstep/mlm-tiny"], attention="native_flash")}  # fmt: skip
    for one in made.values():
        initialise(one, seed=1, std=0.1)
    return made


def name_of(objective: Objective) -> str:
    return type(objective).__module__.rpartition(".")[2]


@pytest.fixture
def model(models: dict[str, Model], objective: Objective) -> Model:
    return models[name_of(objective)]


@pytest.fixture
def rows(objective: Objective) -> Rows:
    places = np.arange(8)
    if not of_texts(objective):
        return Rows(places, np.zeros(8, dtype=np.int64), places, {"histories": places[:, None].astype(np.int32)})
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 256, generator.integers(1, 90)) for _ in range(12)]
    if "lengths" in objective.columns:
        documents = [np.append(ids[:5] | PROMPT, ids[5:]).astype(np.uint32) for ids in documents]
    blocks = list(objective.pack(documents, context_length=CONTEXT, separator=256))
    columns = {name: np.concatenate([block[name] for block in blocks])[:8] for name in objective.columns}
    assert all(set(block) == set(objective.columns) for block in blocks)
    return Rows(places, np.zeros(8, dtype=np.int64), places, columns)


def some(rows: Rows, which: slice) -> Rows:
    columns = {name: column[which] for name, column in rows.columns.items()}
    return Rows(rows.ids[which], rows.epochs[which], rows.slots[which], columns)


@pytest.fixture
def draw(objective: Objective, rows: Rows) -> Draw:
    whole = {name: rows.columns[name] for name in getattr(objective, "whole_columns", ())}
    return Draw(seed=1, step=3, batch_rows=8, steps=50, whole=whole)


def equal(a: Batch, b: Batch) -> bool:
    return a.weights == b.weights and all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def test_rows_have_the_columns_it_names(objective: Objective, rows: Rows) -> None:
    assert rows.columns
    for name, column in rows.columns.items():
        assert column.dtype == np.dtype(objective.columns[name])
        assert len(column) == 8


def of_texts(objective: Objective) -> bool:
    return "histories" not in objective.columns


def test_packing_repeats(objective: Objective) -> None:
    documents = [np.arange(50), np.arange(70)]
    if not of_texts(objective):
        with pytest.raises(ConfigError, match="not from text"):
            objective.pack(documents, context_length=CONTEXT, separator=256)
        return
    first, second = (list(objective.pack(documents, context_length=CONTEXT, separator=256)) for _ in range(2))
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


def test_collate_is_pure_and_knows_its_weights(objective: Objective, rows: Rows, draw: Draw) -> None:
    before = {name: column.copy() for name, column in rows.columns.items()}
    torch.manual_seed(1)
    first = objective.collate(rows, draw)
    torch.manual_seed(2)
    np.random.default_rng().random()
    assert equal(objective.collate(rows, draw), first)
    assert all(np.array_equal(rows.columns[name], before[name]) for name in before)
    assert set(first.weights) == set(objective.terms)
    assert all(isinstance(weight, int) and weight > 0 for weight in first.weights.values())
    assert first.rows == 8


def test_the_cut_into_micro_batches_changes_nothing(objective: Objective, rows: Rows, model: Model, draw: Draw) -> None:
    whole = objective.collate(rows, draw)
    parts = [objective.collate(some(rows, cut), draw) for cut in (slice(0, 3), slice(3, 8))]
    model.eval()
    with torch.no_grad():
        total = objective.loss(model, whole)
        pieces = [objective.loss(model, part) for part in parts]
    for term in objective.terms:
        assert sum(part.weights[term] for part in parts) == whole.weights[term]
        assert sum(float(piece[term]) for piece in pieces) == pytest.approx(float(total[term]), rel=1e-5)


def test_the_loss_is_a_differentiable_sum(objective: Objective, rows: Rows, model: Model, draw: Draw) -> None:
    model.train()
    losses = objective.loss(model, objective.collate(rows, draw))
    watched = {name: losses.pop(name) for name in set(losses) - set(objective.terms)}
    assert not any(total.requires_grad for total in watched.values()), "no part of the loss"
    assert set(losses) == set(objective.terms)
    for total in losses.values():
        assert total.shape == ()
        assert total.dtype == torch.float32
        gradient = torch.autograd.grad(total, model.tok_embed.weight, retain_graph=True)[0]
        assert bool(gradient.isfinite().all())
        assert bool(gradient.any())


def test_evaluation_has_a_loss_and_needs_no_gradient(
    objective: Objective, rows: Rows, model: Model, draw: Draw
) -> None:
    model.eval()
    scores = objective.evaluate(model, objective.collate(rows, draw))
    assert "loss" in scores
    assert scores["loss"].weight > 0
    for score in scores.values():
        assert not score.total.requires_grad
        assert isinstance(score.weight, int)
        assert score.weight >= 0


def test_samples_are_ids_and_repeat(objective: Objective, model: Model) -> None:
    if not of_texts(objective):
        with pytest.raises(ConfigError, match="not from text"):
            objective.sample(model, [1, 2, 3], SampleOptions(tokens=6))
        return
    marks = name_of(objective) == "mlm"
    options, prompt = SampleOptions(tokens=6, seed=3), [1, MASK, 3, MASK] if marks else [1, 2, 3]
    first = objective.sample(model, prompt, options)
    assert first == objective.sample(model, prompt, options)
    assert 0 < len(first) <= 6
    assert all(isinstance(token, int) and 0 <= token < 512 for token in first)
    assert MASK not in first or name_of(objective) == "causal"
