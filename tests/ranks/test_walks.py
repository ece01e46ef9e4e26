"""Walks shared out to ranks are the walks of one process, bit for bit; and no rank waits in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import unseen
from lockstep.engine.walks import Journey, walk, whole_agent
from lockstep.runtime.group import Group
from lockstep.runtime.precision import Precision
from lockstep.worlds import darkroom
from tests.engine.walkers import small_agent
from tests.gates.training import run
from tests.ranks.pool import Pool

pytestmark = pytest.mark.ranks

ROWS_OF_A_CHUNK = 4
SETTINGS: dict[str, Any] = {
    "training.max_steps": 2, "training.eval_interval": 0, "training.save_interval": 0, "training.eval_batches": 1,
    "training.gen_interval": 1, "training.gen_episodes": 2, "training.gen_repeats": 2, "training.batch_size": 2,
    "data.num_workers": 0, "data.horizon": 10, "data.n_process": 1, "training.context_length": 40,
}  # fmt: skip


class Sections:
    """Marks that are kept."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.section = "data"

    def enter(self, section: str, step: int = -1) -> None:
        del step
        self.section = section
        self.entered.append(section)

    def busy(self, step: int, seconds: float) -> None: ...


def walked(group: Group, tasks: int) -> tuple[Any, int]:
    """The returns, and how often this rank has shown that it lives."""
    room = darkroom.build(size=5, horizon=6)
    journey = Journey(room, tuple(range(tasks)), episodes=3, repeats=2, context_length=12, seed=1)
    link = Sections()
    precision = Precision("fp32", torch.device("cpu"))
    found = walk(small_agent(), journey, precision, group=group, link=link, chunk_rows=ROWS_OF_A_CHUNK)
    return found, link.entered.count("evaluate")


@pytest.mark.parametrize(("count", "tasks"), [(2, 9), (3, 9), (3, 2)])
def test_ranks_walk_as_one_process_does(ranks: Pool, count: int, tasks: int) -> None:
    """With 5 chunks for 2 or 3 ranks, and with one chunk only."""
    alone, signs = walked(Group(), tasks)
    results = ranks(count, walked, tasks)
    chunks = -(-2 * tasks // ROWS_OF_A_CHUNK)
    assert signs >= 18 * chunks
    assert alone.max() > 0 or tasks < 9  # in two tasks nothing may be found
    for rank, (found, signs_of_rank) in enumerate(results):
        assert (found == alone).all()
        assert signs_of_rank >= 18 * len(range(rank, chunks, count))


def trained(group: Group, folder: Path, settings: dict[str, Any]) -> tuple[list[Any], Any, list[float]]:
    """Train with walks: what was told of them, and the last ones once more by this rank alone."""
    own = {"data.data_path": str(folder / f"histories-{group.rank}"), **SETTINGS, **settings}
    parts, recorder = run(folder, own, family="ad", group=group)
    assert parts.outcome is not None
    told = [fields for kind, fields in recorder.events if kind == "walk"]
    agent, config = whole_agent(parts.stepper.model), parts.config  # pyright: ignore[reportArgumentType] - an agent
    world, tasks = unseen.unseen_tasks(config)
    journey = Journey(world, tasks, 2, 2, context_length=40, seed=config.system.seed, temperature=unseen.TEMPERATURE)
    again = walk(agent, journey, parts.stepper.precision)
    return told, (parts.outcome.returns == again).all(), [record.loss for record in recorder.records]


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_run_walks_with_all_its_ranks(ranks: Pool, tmp_path: Path, mode: str) -> None:
    results = ranks(2, trained, tmp_path, {"system.mode": mode})
    told = results[0][0]
    assert [event["step"] for event in told] == [1, 2]
    assert all(same for _, same, _ in results)
    assert all(event == told for event, _, _ in results)


def test_walks_change_no_number_of_the_training(tmp_path: Path) -> None:
    with_walks = run(
        tmp_path / "a", {**SETTINGS, "data.data_path": str(tmp_path / "h"), "model.dropout": 0.1}, family="ad"
    )
    quiet = {**SETTINGS, "training.gen_interval": 0, "training.gen_episodes": 0}
    without = run(tmp_path / "b", {**quiet, "data.data_path": str(tmp_path / "h"), "model.dropout": 0.1}, family="ad")
    assert without[0].outcome is None
    assert [kind for kind, _ in without[1].events].count("walk") == 0
    assert with_walks[1].trace == without[1].trace
    pairs = zip(with_walks[0].stepper.model.parameters(), without[0].stepper.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
