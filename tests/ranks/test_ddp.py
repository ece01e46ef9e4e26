"""One model on several ranks is the model of one process with the same global batch."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.runtime.group import Group
from tests.ranks.data_parallel import EVERYTHING, Trained, end, train
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

EXACT, SINGLE = 1e-9, 1e-4
FEW_STEPS = 15  # more than once over the rows
CASES: dict[str, tuple[dict[str, Any], bool, float]] = {  # settings, odd batches, tolerance
    "fp64": ({"training.precision": "fp64"}, False, EXACT),
    "fp64-everything": ({"training.precision": "fp64", **EVERYTHING}, True, EXACT),
    "fp32-everything": (EVERYTHING, True, SINGLE),
}


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process makes of a case, trained once."""

    @functools.cache
    def trained(name: str, steps: int) -> Trained:
        settings, odd, _ = CASES[name]
        return train(Group(), tmp_path_factory.mktemp("one"), {**settings, "training.max_steps": steps}, odd)

    return trained


def difference(one: Trained, other: Trained, *, norms: bool = True) -> float:
    """The largest relative difference of any loss, norm, measure or weight.

    In fp32 one gradient norm of fifty may differ by more than the losses and weights do by a factor of thirty: that is
    rounding, since fp64 compares it too, so `norms` can be left out there.
    """
    measures = (np.array([trained.validation[name] for name in sorted(one.validation)]) for trained in (one, other))
    weights = np.linalg.norm(one.weights - other.weights) / np.linalg.norm(one.weights)
    shown = [0, 1, 2] if norms else [0, 2]  # loss, norm, tokens
    numbers = (np.array(trained.numbers)[:, shown] for trained in (one, other))
    return max(relative(*numbers), relative(*measures), float(weights))


def relative(one: Any, other: Any) -> float:
    return float(np.max(np.abs(one - other) / np.abs(one)))


@pytest.mark.parametrize(
    ("name", "world", "steps"),
    [
        ("fp64", 2, FEW_STEPS),
        ("fp64-everything", 3, FEW_STEPS),
        ("fp32-everything", 4, FEW_STEPS),
        *(pytest.param(name, world, 50, marks=pytest.mark.slow) for name in CASES for world in (2, 3, 4)),
    ],
)
def test_ranks_equal_one_process(
    ranks: Pool, one_process: Any, tmp_path: Path, name: str, world: int, steps: int
) -> None:
    settings, odd, tolerance = CASES[name]
    results = ranks(world, train, tmp_path, {**settings, "training.max_steps": steps}, odd)
    alone = one_process(name, steps)
    assert len(alone.numbers) == steps
    assert alone.numbers[-1][0] < alone.numbers[0][0], "it must learn, or equality says little"
    assert difference(alone, results[0], norms=tolerance == EXACT) < tolerance
    for other in results[1:]:  # among themselves: the same bits
        assert other.numbers == results[0].numbers
        assert other.validation == results[0].validation
        assert np.array_equal(other.weights, results[0].weights)


def test_bf16_is_that_of_one_process(ranks: Pool, tmp_path: Path) -> None:
    """Up to the order of sums, which in half precision is seen."""
    settings = {"training.precision": "bf16", "training.max_steps": 3}
    alone = train(Group(), tmp_path / "one", settings)
    first, second = ranks(2, train, tmp_path / "two", settings)
    assert relative(np.array(alone.numbers), np.array(first.numbers)) < 1e-2
    assert first.numbers == second.numbers
    assert np.array_equal(first.weights, second.weights)


@pytest.mark.parametrize("mistake", ["local weights", "average", "average of local means"])
def test_what_others_do_is_seen_to_differ(ranks: Pool, one_process: Any, tmp_path: Path, mistake: str) -> None:
    """Negative control: unequal weights make each of these another training."""
    settings, odd, _ = CASES["fp64-everything"]
    wrong = ranks(2, train, tmp_path, {**settings, "training.max_steps": 3}, odd, mistake)
    right = one_process("fp64-everything", FEW_STEPS).numbers[:3]
    assert relative(np.array(right), np.array(wrong[0].numbers)) > 1e-3


@pytest.mark.parametrize(
    "fault",
    [
        "nan_loss@rank=1,step=3",
        "nan_grad@rank=2,step=3",
        pytest.param("inf_loss@rank=0,step=3", marks=pytest.mark.slow),
    ],
)
def test_nan_on_one_rank_stops_all_at_the_same_step(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", fault)
    results = ranks(3, end, tmp_path, {"training.max_steps": 8})
    assert {(result.kind, result.code, result.step) for result in results} == {("NonFiniteError", 71, 3)}
    assert len({result.digest for result in results}) == 1
    said = {
        "nan_loss": "loss is nan on rank 1; ",
        "inf_loss": "loss is inf on rank 0; ",
        "nan_grad": "norm is nan on rank 2; ",
    }
    assert all(said[fault.partition("@")[0]] in result.words for result in results), results[0].words


def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "inf_grad@rank=1,step=2")
    results = ranks(2, end, tmp_path, {"training.max_steps": 5, "training.precision": "fp16"})
    assert [result.kind for result in results] == ["", ""]
    assert len({(result.digest, result.step, tuple(result.losses)) for result in results}) == 1


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stop_wish_of_one_rank_stops_all_after_the_same_step(ranks: Pool, tmp_path: Path, rank: int) -> None:
    results = ranks(3, end, tmp_path, {"training.max_steps": 30}, {rank: int(signal.SIGUSR1)})
    assert {(result.kind, result.code) for result in results} == {("Stopped", 75)}
    (step,) = {result.step for result in results}
    assert 4 < step <= 7
    assert len({result.digest for result in results}) == 1
    assert (tmp_path / "checkpoints" / f"step_{step:08d}").is_dir()


def test_different_signals_end_all_with_one_code(ranks: Pool, tmp_path: Path) -> None:
    heard = {0: int(signal.SIGINT), 1: int(signal.SIGTERM), 2: int(signal.SIGTERM)}
    results = ranks(3, end, tmp_path, {"training.max_steps": 30}, heard)
    assert {result.code for result in results} == {143}
    assert len({result.step for result in results}) == 1
