"""Masked-LM with as many places in every batch: the same sums, and steps that can be recorded."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contracts import Batch, Draw
from lockstep.engine import graphs
from lockstep.engine import replay as replaying
from lockstep.errors import NonFiniteError
from lockstep.health.finding import from_json
from lockstep.kernels.linear_cross_entropy import IGNORE
from lockstep.models.encoder import Encoder
from lockstep.models.encoder_shapes import EncoderShape
from lockstep.models.initialise import initialise
from lockstep.objectives import mlm
from tests.engine.taped import Taped
from tests.gates.training import run
from tests.objectives.test_mlm import DRAW, SIZE, made, rows_of, text

ROWS, LENGTH = 12, 40
NAMES = ("targets", "places", "channels")


def model() -> Encoder:
    found = Encoder(EncoderShape("bert", SIZE, 16, 32, 2, 2, LENGTH, 1e-12), attention="native_math").double()
    initialise(found, seed=3, std=0.3)
    return found


def both(seed: int = 0, **options: Any) -> tuple[Batch, Batch]:
    """The same rows, plainly and with places to spare."""
    objective, rows = made(**options), rows_of(text(ROWS, LENGTH, seed=seed), first=ROWS * seed)
    return objective.collate(rows, DRAW), objective.steadied().collate(rows, DRAW)


@pytest.mark.parametrize("options", [{}, {"whole_words": True}, {"last_mask_probability": 0.3}])
def test_every_batch_looks_alike_and_says_the_same(options: dict[str, Any]) -> None:
    looks, counts = set[Any](), set[int]()
    for seed in range(60):
        plain, steady = both(seed, **options)
        count = plain.weights["loss"]
        assert steady.weights == plain.weights
        assert (steady.rows, steady.tokens) == (plain.rows, plain.tokens)
        assert torch.equal(steady.tensors["inputs"], plain.tensors["inputs"])
        for name, empty in (("targets", IGNORE), ("channels", mlm.NO_CHANNEL), ("places", None)):
            assert torch.equal(steady.tensors[name][:count], plain.tensors[name])
            rest = steady.tensors[name][count:]
            assert torch.equal(rest, torch.arange(len(rest))) if empty is None else (rest == empty).all()
            assert steady.tensors[name].dtype == plain.tensors[name].dtype
        looks.add(tuple((name, steady.tensors[name].shape) for name in NAMES))
        counts.add(count)
    assert len(looks) == 1
    assert len(counts) > 5, "the control: they had another number each"


def test_more_places_than_there_is_room_for_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlm, "ROOM_SPREADS", -6)
    plain, steady = both()
    assert all(torch.equal(steady.tensors[name], plain.tensors[name]) for name in NAMES)
    monkeypatch.setattr(mlm, "ROOM_SPREADS", 10_000)
    assert len(both()[1].tensors["places"]) == ROWS * LENGTH, "no more than there are tokens"


@pytest.mark.parametrize("whole_words", [False, True])
def test_hardly_a_batch_has_more(whole_words: bool) -> None:
    """Small ones, where chance is greatest, of words of three tokens."""
    objective = made(whole_words=whole_words).steadied()
    sizes = set[int]()
    for seed in range(400):
        batch = objective.collate(rows_of(text(4, 64, seed=seed), first=4 * seed), Draw(seed=1, step=0, batch_rows=4))
        sizes.add(len(batch.tensors["places"]))
    assert len(sizes) == 1
    assert max(sizes) < 0.5 * 4 * 64


def test_loss_gradients_and_scores_are_the_same() -> None:
    encoder, objective = model(), made().steadied()
    found: list[list[torch.Tensor]] = []
    scores: list[dict[str, tuple[float, int]]] = []
    for batch in both():
        total = objective.loss(encoder, batch)["loss"]
        found.append([total, *torch.autograd.grad(total, list(encoder.parameters()), allow_unused=True)])
        measured = objective.evaluate(encoder, batch)
        scores.append({name: (float(each.total), each.weight) for name, each in measured.items()})
    for plain, steady in zip(*found, strict=True):
        assert (plain is None) is (steady is None)
        if plain is not None:
            torch.testing.assert_close(steady, plain, rtol=1e-10, atol=1e-10)
    assert scores[0].keys() == scores[1].keys()
    for name, (total, weight) in scores[0].items():
        assert scores[1][name] == (pytest.approx(total, rel=1e-10), weight)
    spoilt = both()[1]
    spoilt.tensors["targets"][-1] = 5  # the control: a place that counts
    assert objective.loss(encoder, spoilt)["loss"].item() != pytest.approx(found[0][0].item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- runs

SETTINGS: dict[str, Any] = {
    "training.max_steps": 8, "training.save_interval": 4, "training.eval_interval": 4, "training.eval_batches": 1,
    "debug.digest_interval": 1, "data.num_workers": 0, "model.dropout": 0.1, "report.sample_prompt": "",
}  # fmt: skip


@pytest.fixture
def _recordable(monkeypatch: pytest.MonkeyPatch, shared_cache: None) -> None:
    """The CPU stands for a GPU, and does again what a graph would."""
    monkeypatch.setattr(graphs, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(graphs, "choose", partial(graphs.choose, record=Taped))


@pytest.mark.usefixtures("_recordable")
@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("fp32", {}),
        ("bf16", {"data.documents": "separated"}),
        ("fp16", {"data.documents": "padded"}),
        ("fp32", {"model.architecture": "modern"}),
    ],
)
def test_a_recorded_run_has_the_bits_of_a_plain_one_and_goes_on_either_way(
    precision: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(name: str, least: float, point: Path | None = None) -> list[tuple[Any, ...]]:
        monkeypatch.setattr(graphs, "LAUNCH_BOUND", least)
        given = {**SETTINGS, **settings, "training.precision": precision}
        parts, found = run(tmp_path / name, given, family="mlm", point=point)
        graph = parts.stepper.graph
        assert (graph is not None) is (least == 0)
        if graph is not None:
            recording: Any = graph._recording
            assert recording.replays >= len(found.records) - 1, "at most one batch has more places than usual"
        return found.trace

    graph, plain = ran("graph", 0.0), ran("plain", math.inf)
    assert len(graph) == 8
    assert graph == plain
    for name, least in (("graph", math.inf), ("plain", 0.0)):
        point = tmp_path / name / "checkpoints" / "step_00000004"
        assert ran(f"on from {name}", least, point) == graph[4:]


def host_number(self: mlm.Mlm, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """A loss that depends on what only the host knows."""
    return {"loss": PLAIN_LOSS(self, model, batch)["loss"] * (1 + 1e-3 * batch.weights["loss"])}


def look(self: mlm.Mlm, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """One that has to look at the device."""
    return {"loss": PLAIN_LOSS(self, model, batch)["loss"] * (1 + 1e-3 * int((batch.tensors["targets"] >= 0).sum()))}


PLAIN_LOSS = mlm.Mlm.loss


@pytest.mark.usefixtures("_recordable")
def test_what_a_graph_would_get_wrong_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The controls of the test above: a number of the host is frozen, a look at the device cannot be recorded."""

    def ran(name: str, least: float) -> tuple[list[tuple[Any, ...]], bool]:
        monkeypatch.setattr(graphs, "LAUNCH_BOUND", least)
        parts, found = run(tmp_path / name, {**SETTINGS, "training.max_steps": 4}, family="mlm")
        return found.trace, parts.stepper.graph is not None

    monkeypatch.setattr(mlm.Mlm, "loss", host_number)
    (graph, recorded), (plain, _) = ran("graph", 0.0), ran("plain", math.inf)
    assert recorded
    assert graph != plain
    monkeypatch.setattr(mlm.Mlm, "loss", look)
    (graph, recorded), (plain, _) = ran("looks", 0.0), ran("looks plainly", math.inf)
    assert not recorded
    assert graph == plain
    assert "recording it failed: operation not permitted when stream is capturing: _local_scalar_dense" in caplog.text


@pytest.mark.usefixtures("_recordable")
def test_only_small_models_are_steady_and_only_where_steps_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steady() -> bool:
        return run(tmp_path / "run", {**SETTINGS, "training.max_steps": 1}, family="mlm")[0].stepper.steady

    assert steady()
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "SMALL_MODEL", 10)
        assert not steady()
    monkeypatch.setattr(graphs, "RECORDABLE", ("cuda",))
    assert not steady()


@pytest.mark.usefixtures("_recordable")
def test_a_bad_step_is_run_again_as_it_was_and_without_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "nan_grad@step=1,tensor=tok_embed.weight")
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, SETTINGS, family="mlm")
    steady: list[bool] = []
    plain = replaying._stepper

    def noted(*args: Any, **named: Any) -> Any:
        made = plain(*args, **named)
        steady.append(made[0].steady)
        return made

    monkeypatch.setattr(replaying, "_stepper", noted)
    bundle = Path(from_json(caught.value.finding).files["bundle"])
    replayed, _ = replaying.replay(bundle, drop=0, device="cpu")
    assert replayed.reproduced
    assert len(steady) > 1
    assert all(steady), "by the rule of the run"


def test_how_much_room_there_is() -> None:
    """0.15 of 1,000 is 150, and 11.3 its standard deviation; whole words come in lumps."""
    assert made().steadied()._room(1000) == 224
    assert made(whole_words=True).steadied()._room(1000) == 288
    assert graphs.SMALL_MODEL == 20_000_000, "as docs/speed.md says"


def test_room_is_for_the_largest_share_of_a_schedule() -> None:
    objective = made(mask_probability=0.1, last_mask_probability=0.4).steadied()
    tokens = text(ROWS, LENGTH)
    sizes = {
        len(objective.collate(rows_of(tokens), Draw(seed=1, step=step, batch_rows=ROWS, steps=10)).tensors["places"])
        for step in range(10)
    }
    assert sizes == {objective._room(tokens.size)}
    assert np.ceil(0.4 * tokens.size) < min(sizes) <= tokens.size
