"""Settings of the data that act on what a run is built of: who prepares batches, and how documents share rows."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.load import load
from lockstep.contracts import Batch, Draw, Rows
from lockstep.engine import build
from lockstep.engine.build import Plan
from lockstep.engine.prepare import Prepared, is_prepared, prepare
from lockstep.errors import ConfigError
from lockstep.objectives.causal import Causal
from tests.gates.training import flags, run

pytestmark = pytest.mark.usefixtures("shared_cache")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHORT: dict[str, Any] = {
    "system.device": "cpu", "system.threads": 1, "training.context_length": 32, "training.max_steps": 4,
    "training.eval_interval": 0, "training.save_interval": 0, "data.num_workers": 0, "debug.digest_interval": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of which a row holds several."""
    file = tmp_path_factory.mktemp("short") / "short.jsonl"
    texts = [f"{number} and {number * number} are numbers" for number in range(200)]
    file.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts), encoding="utf-8")
    return str(file)


def planned(settings: dict[str, Any]) -> Plan:
    return build.plan(load("llama", preset="tiny", flags=flags({**SHORT, **settings})), CPU)


def prepared(plan: Plan) -> Prepared:
    return prepare(plan.config, plan.objective, vocab_limit=plan.shape.vocab_size)


class Noting(Causal):
    """Notes which steps were prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        self.made.add(draw.step)
        return super().collate(rows, draw)


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 4), (1, 1), (1, 5), (3, 2)])
def test_the_loader_works_ahead_as_told(workers: int, prefetch: int, short_documents: str) -> None:
    """data.num_workers threads, each with data.prefetch_factor steps in its queue and one more in its hand."""
    objective = Noting()
    told = {"data.num_workers": workers, "data.prefetch_factor": prefetch, "data.data_path": short_documents}
    plan = replace(planned(told), objective=objective)
    table, ahead = prepared(plan), workers * (prefetch + 1)
    with build.make_loader(plan, table, start_step=7):
        deadline = time.monotonic() + 20
        while len(objective.made) < ahead and time.monotonic() < deadline:
            time.sleep(0.01)
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("loader-")]
        time.sleep(0.05)  # nobody goes further
        assert len(threads) == workers
        assert sorted(objective.made) == list(range(7, 7 + ahead))


@pytest.mark.parametrize(("kind", "device", "workers"), [(Causal, CPU, 0), (Causal, GPU, 1), (Noting, CPU, 1)])
def test_where_nobody_says_there_is_a_thread_where_it_pays(
    kind: type[Causal], device: torch.device, workers: int, short_documents: str
) -> None:
    """Not for rows of a whole table that are merely cut, on the CPU: handing them over would cost more."""
    plan = planned({"data.num_workers": "auto", "data.pin_memory": False, "data.data_path": short_documents})
    plan = replace(plan, objective=kind(), device=device)
    with build.make_loader(plan, prepared(plan), start_step=0) as loader:
        assert loader.workers == workers


class Pinnable(Batch):
    """Says that it was asked to be pinned: without a GPU torch cannot."""

    def pin(self) -> Batch:
        return Batch({**self.tensors, "pinned": torch.ones(1)}, self.weights, self.rows, self.tokens)


class Pinning(Causal):
    def collate(self, rows: Rows, draw: Draw) -> Batch:
        batch = super().collate(rows, draw)
        return Pinnable(batch.tensors, batch.weights, batch.rows, batch.tokens)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("asked", "device", "pinned"), [(True, GPU, True), (False, GPU, False), (True, CPU, False)])
def test_every_batch_is_pinned_where_asked(
    asked: bool, device: torch.device, pinned: bool, workers: int, short_documents: str
) -> None:
    """data.pin_memory; tests/gpu shows the memory itself."""
    told = {"data.pin_memory": asked, "data.num_workers": workers, "data.data_path": short_documents}
    plan = planned({**told, "training.grad_accum_nums": 2})
    plan = replace(plan, objective=Pinning(), device=device)
    with build.make_loader(plan, prepared(plan), start_step=0) as loader:
        assert ["pinned" in batch.tensors for batch in next(loader)] == [pinned, pinned]


def test_documents_share_rows_as_told(short_documents: str, tmp_path: Path) -> None:
    """data.documents: no separators; separators; and a column that says where documents begin, which the model sees."""
    digests: set[str] = set()
    for mode, separated, columns in (("joined", False, 1), ("separated", True, 1), ("masked", True, 2)):
        settings = {**SHORT, "data.data_path": short_documents, "data.documents": mode}
        plan = planned(settings)
        made = prepared(plan)
        tokens = made.train.take(np.arange(made.train.rows))["tokens"]
        assert bool((tokens == made.tokenizer.separator).any()) == separated
        assert len(made.train.columns) == columns
        assert is_prepared(plan.config), "the key is known without the objective itself"
        digests.add(run(tmp_path / mode, settings)[1].records[-1].digest)
    assert len(digests) == 3


def test_an_objective_that_cannot_keep_them_apart_is_refused() -> None:
    config: Any = SimpleNamespace(
        objective=SimpleNamespace(name="tests.engine.test_data_settings:Noting"),
        data=SimpleNamespace(documents="masked"),
    )
    with pytest.raises(ConfigError, match="cannot keep documents apart") as caught:
        build.make_objective(config)
    assert caught.value.where == "data.documents"
