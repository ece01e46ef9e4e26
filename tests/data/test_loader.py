"""The loader: the same batches for any number of workers and any first step, errors where they belong, a quick end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from lockstep.contracts import Batch, Draw, Rows
from lockstep.data import loader as loader_module
from lockstep.data.cache import Table, write_table
from lockstep.data.loader import Loader, validation_batches
from lockstep.objectives.causal import Causal, expanded
from tests.data.coverage import Seen, faults, seen_in
from tests.data.stand_in import Plain, table

SLOW = pytest.mark.slow


@pytest.fixture
def numbers(tmp_path: Path) -> Table:
    return table(tmp_path / "train", 23)


def steps(loader: Loader, count: int) -> list[list[Batch]]:
    with loader:
        return list(islice(loader, count))


def make(source: Table, objective: Plain | None = None, *, workers: int = 0, start_step: int = 0) -> Loader:
    return Loader(
        source,
        objective or Plain(),
        seed=5,
        micro_rows=3,
        micro_batches=2,
        start_step=start_step,
        workers=workers,
        prefetch=2,
        pin=False,
    )


def same(left: list[list[Batch]], right: list[list[Batch]]) -> bool:
    pairs = [(one, other) for a, b in zip(left, right, strict=True) for one, other in zip(a, b, strict=True)]
    return all(
        one.weights == other.weights
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
        for one, other in pairs
    )


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=SLOW), 3, pytest.param(7, marks=SLOW)])
@pytest.mark.parametrize("start", [0, 1, pytest.param(6, marks=SLOW), 20])
def test_batches_do_not_depend_on_workers_or_start(numbers: Table, workers: int, start: int) -> None:
    straight = steps(make(numbers), 30)
    assert same(straight[start:], steps(make(numbers, workers=workers, start_step=start), 30 - start))


@pytest.mark.parametrize("window_bytes", [1, 100, 1 << 12])
@pytest.mark.parametrize(("rank", "world", "workers"), [(0, 1, 0), (2, 3, 0), (1, 2, 3)])
def test_batches_do_not_depend_on_how_many_are_fetched_together(
    numbers: Table, monkeypatch: pytest.MonkeyPatch, window_bytes: int, rank: int, world: int, workers: int
) -> None:
    """From a step in the middle of what would be one window, over the edge of an epoch."""

    def made(size: int) -> list[list[Batch]]:
        monkeypatch.setattr(loader_module, "WINDOW_BYTES", size)
        place = {"rank": rank, "world": world, "workers": workers, "start_step": 5}
        with Loader(numbers, Plain(), seed=3, micro_rows=2, micro_batches=3, **place) as loader:
            return list(islice(loader, 40))

    for one, other in zip(made(loader_module.WINDOW_BYTES), made(window_bytes), strict=True):
        for batch, same in zip(one, other, strict=True):
            assert all(torch.equal(tensor, same.tensors[name]) for name, tensor in batch.tensors.items())


class OneByOne(Causal):
    """Has an idea of its own of what a batch is: what its parent makes of many at once would pass it by."""

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        return super().collate(rows, draw)


@pytest.mark.parametrize("documents", ["separated", "masked"])
@pytest.mark.parametrize(("rank", "world", "workers"), [(0, 1, 0), (1, 2, 3)])
def test_batches_made_together_are_those_made_one_by_one(
    tmp_path: Path, documents: str, rank: int, world: int, workers: int
) -> None:
    rows = {"tokens": np.arange(23 * 9, dtype=np.int32).reshape(23, 9)}
    if documents == "masked":
        rows["starts"] = (rows["tokens"] % 5 == 0).astype(np.uint8)
    objectives = Causal(documents=documents), OneByOne(documents=documents)
    write_table(tmp_path / "rows", [rows], columns=objectives[0].columns, stored={})
    place = {"rank": rank, "world": world, "workers": workers, "start_step": 5}
    made: list[list[list[Batch]]] = []
    for objective in objectives:
        loader = Loader(Table(tmp_path / "rows"), objective, seed=3, micro_rows=2, micro_batches=3, **place)
        made.append(steps(loader, 40))
    assert same(*made)
    assert len({batch.weights["loss"] for step in made[0] for batch in step}) > (documents == "masked")


def test_rows_stay_narrow_until_the_device(tmp_path: Path) -> None:
    """Two bytes a token go to the device, where they become what a collate of wide rows would have made of them."""
    rows = {"tokens": np.arange(65_536 - 90, 65_536, dtype=np.int32).reshape(10, 9)}
    write_table(tmp_path / "rows", [rows], columns=Causal().columns, stored={"tokens": "uint16"})
    table = Table(tmp_path / "rows")
    (batch,) = next(iter(Loader(table, Causal(), seed=3, micro_rows=10, micro_batches=1)))
    assert batch.tensors["tokens"].dtype == torch.uint16
    (wide,) = next(iter(Loader(table, OneByOne(), seed=3, micro_rows=10, micro_batches=1)))
    assert wide.tensors["tokens"].dtype == torch.int32
    for name, tensor in expanded(wide).items():
        assert torch.equal(expanded(batch)[name], tensor)
        assert int(tensor.max()) >= 65_534


class Knowing(Plain):
    """Asks for a column of all rows of the global batch, and shows it."""

    whole_columns = ("tokens",)

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        batch = super().collate(rows, draw)
        return batch._replace(tensors={**batch.tensors, "whole": torch.from_numpy(draw.whole["tokens"][:, 0] // 10)})


@pytest.mark.parametrize("window_bytes", [1, 100, loader_module.WINDOW_BYTES])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (3, 2)])
def test_a_column_of_the_whole_batch_is_there_on_every_rank(
    numbers: Table, monkeypatch: pytest.MonkeyPatch, window_bytes: int, world: int, workers: int
) -> None:
    """Rows of the other ranks too, in the order of their slots, whatever was fetched together."""
    monkeypatch.setattr(loader_module, "WINDOW_BYTES", window_bytes)
    micro = 6 // world
    made = []
    for rank in range(world):
        place = {"rank": rank, "world": world, "workers": workers, "start_step": 2}
        made.append(steps(Loader(numbers, Knowing(), seed=3, micro_rows=1, micro_batches=micro, **place), 12))
    for batches in zip(*made, strict=True):
        own = torch.cat([batch.tensors["ids"] for part in batches for batch in part])
        for part in batches:
            for batch in part:
                assert batch.tensors["whole"].tolist() == own.tolist()
    for batch in validation_batches(numbers, Knowing(), micro_rows=4, rows=10, seed=1):
        assert batch.tensors["whole"].tolist() == list(range(10))


def test_the_comparison_sees_another_seed(numbers: Table) -> None:
    """Negative control."""
    other = Loader(numbers, Plain(), seed=6, micro_rows=3, micro_batches=2)
    assert not same(steps(make(numbers), 3), steps(other, 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_shows_each_row_once(numbers: Table, workers: int) -> None:
    """Item 30; batches of 6 straddle the epochs of 23 rows."""
    shown = [batch for step in steps(make(numbers, workers=workers), 23) for batch in step]
    ids = torch.cat([batch.tensors["ids"] for batch in shown])
    epochs = torch.cat([batch.tensors["epochs"] for batch in shown])
    assert len(ids) == 6 * 23
    for epoch in range(6):
        assert sorted(ids[epochs == epoch].tolist()) == list(range(23))
    tokens = torch.cat([batch.tensors["tokens"] for batch in shown])
    assert torch.equal(tokens, 10 * ids[:, None] + torch.arange(5))


def test_slots_and_draws(numbers: Table) -> None:
    for step, batches in enumerate(steps(make(numbers), 3)):
        assert [batch.tensors["slots"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
        assert all(batch.tensors["draw"].tolist() == [5, step, 6] for batch in batches)


class Failing(Plain):
    """Refuses one step."""

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        if draw.step == 4:
            raise ZeroDivisionError("step four")
        return super().collate(rows, draw)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_at_its_step_with_its_cause(numbers: Table, workers: int) -> None:
    loader = make(numbers, Failing(), workers=workers)
    assert len(list(islice(loader, 4))) == 4
    with pytest.raises(ZeroDivisionError, match="step four") as caught:
        next(loader)
    assert caught.value.__notes__ == ["while preparing the batch of step 4"]
    assert "collate" in [entry.name for entry in caught.traceback]
    assert not alive()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader-")]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_is_quick_and_leaves_nobody(numbers: Table, taken: int) -> None:
    loader = make(numbers, workers=4)
    list(islice(loader, taken))
    if not taken:
        time.sleep(0.05)  # all queues full, all workers blocked
    assert len(alive()) == 4
    start = time.perf_counter()
    loader.close()
    loader.close()
    assert time.perf_counter() - start < 1
    assert not alive()


class Counting(Plain):
    """Notes the furthest step that was prepared."""

    furthest = -1

    def collate(self, rows: Rows, draw: Draw) -> Batch:
        self.furthest = max(self.furthest, draw.step)
        return super().collate(rows, draw)


def test_workers_stay_within_the_prefetch(numbers: Table) -> None:
    objective = Counting()
    with make(numbers, objective, workers=2):
        until = time.monotonic() + 30
        while objective.furthest < 0 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
        assert 0 <= objective.furthest <= 2 * (2 + 1)  # two each in the queue, one each in the hand


def test_validation_is_always_the_same(numbers: Table) -> None:
    first, second = (validation_batches(numbers, Plain(), micro_rows=4, rows=12, seed=1) for _ in range(2))
    assert same([first], [second])
    assert torch.cat([batch.tensors["ids"] for batch in first]).tolist() == list(range(12))
    assert all((batch.tensors["epochs"] == 0).all() for batch in first)


def test_validation_of_a_small_table_ends_with_a_short_batch(numbers: Table) -> None:
    batches = validation_batches(numbers, Plain(), micro_rows=10, rows=80, seed=1)
    assert [(batch.rows, batch.is_short) for batch in batches] == [(10, False), (10, False), (3, True)]
    assert [batch.to(torch.device("cpu")).is_short for batch in batches] == [False, False, True]
    assert np.concatenate([batch.tensors["ids"] for batch in batches]).tolist() == list(range(23))


@pytest.mark.parametrize(("rows", "short"), [(23, {2: 3}), (20, {}), (7, {})])
def test_which_cut_is_short_depends_on_no_rank(numbers: Table, rows: int, short: dict[int, int]) -> None:
    """7 rows are one cut, the only number of rows there is."""
    for world in (1, 2, 3, 4):
        for rank in range(world):
            share = (rank, world)
            batches = validation_batches(numbers, Plain(), micro_rows=10, rows=rows, seed=1, share=share)
            found = {rank + place * world: batch.rows for place, batch in enumerate(batches) if batch.is_short}
            assert found == {cut: size for cut, size in short.items() if cut % world == rank}


def test_ranks_make_the_micro_batches_of_one_process_between_them(numbers: Table) -> None:
    """World 3 x 2 micro-batches is world 1 x 6: same rows, epochs, slots and draws, over several epochs."""
    settings = {"seed": 5, "micro_rows": 3}
    alone = steps(Loader(numbers, Plain(), micro_batches=6, **settings), 9)
    shares = [
        steps(Loader(numbers, Plain(), micro_batches=2, rank=rank, world=3, workers=rank, start_step=2, **settings), 7)
        for rank in range(3)
    ]
    together = [[batch for share in shares for batch in share[step]] for step in range(7)]
    assert same(alone[2:], together)


BATCH_ROWS = 12  # of a global batch: divided by 1, 2, 3 and 4 ranks


def dealt(
    source: Table, world: int, steps_of: range, *, workers: int = 0, other_seed_per_rank: bool = False
) -> list[Seen]:
    """What all ranks of a run are given in some of its steps."""
    found: list[Seen] = []
    for rank in range(world):
        seed = 5 + rank if other_seed_per_rank else 5
        loader = Loader(
            source, Plain(), seed=seed, micro_rows=1, micro_batches=BATCH_ROWS // world, rank=rank, world=world,
            start_step=steps_of.start, workers=workers,
        )  # fmt: skip
        shown = steps(loader, len(steps_of))
        found += seen_in(zip(steps_of, shown, strict=True), rank=rank, batch_rows=BATCH_ROWS)
    return found


@pytest.mark.parametrize("workers", [pytest.param(0, marks=SLOW), 2])
@pytest.mark.parametrize("rows", [7, 23, 24, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_row_once_per_epoch_across_ranks(world: int, rows: int, workers: int, tmp_path: Path) -> None:
    """Items 30, 96, 115, 140: full coverage, no overlap, a new order each epoch; also where batches straddle epochs."""
    steps_of = range(-(-3 * rows // BATCH_ROWS))
    found = dealt(table(tmp_path / "train", rows), world, steps_of, workers=workers)
    assert len(found) == len(steps_of) * BATCH_ROWS >= 3 * rows
    assert faults(found, rows=rows, epochs=3) == set()


def test_every_row_once_per_epoch_across_resumes_with_other_world_sizes(tmp_path: Path) -> None:
    """2 ranks stop in the middle of an epoch, 3 go on, then 4, then 1: the position is all they need to know."""
    source = table(tmp_path / "train", 101)
    cuts = ((2, range(4)), (3, range(4, 9)), (4, range(9, 17)), (1, range(17, 18)), (2, range(18, 26)))
    found = [entry for world, steps_of in cuts for entry in dealt(source, world, steps_of, workers=world % 2)]
    assert faults(found, rows=101, epochs=3) == set()
    alone = dealt(source, 1, range(26))
    assert [(entry.position, entry.epoch, entry.row) for entry in sorted(found)] == [
        (entry.position, entry.epoch, entry.row) for entry in sorted(alone)
    ]


def test_the_check_sees_an_order_seeded_by_rank(tmp_path: Path) -> None:
    """Negative control: ranks that shuffle by themselves see some rows twice and some never."""
    found = dealt(table(tmp_path / "train", 24), 3, range(4), other_seed_per_rank=True)
    assert {"a row twice in an epoch", "a row never seen in an epoch", "a row on two ranks in an epoch"} <= faults(
        found, rows=24, epochs=2
    )


def test_the_check_sees_a_resume_that_begins_anew(tmp_path: Path) -> None:
    """Negative control: the position forgotten, as by a sampler that is not told where it was."""
    source = table(tmp_path / "train", 48)
    again = [replace(entry, position=entry.position + 24) for entry in dealt(source, 3, range(2))]
    found = faults([*dealt(source, 2, range(2)), *again], rows=48, epochs=1)
    assert {"a row twice in an epoch", "a row never seen in an epoch"} <= found


@pytest.mark.parametrize("told", [True, False])
def test_the_check_sees_a_sampler_that_is_not_told_the_epoch(told: bool) -> None:
    """Negative control: torch's DistributedSampler without set_epoch; with it, it passes the same check."""
    found: list[Seen] = []
    for rank in range(3):
        sampler = DistributedSampler(range(24), num_replicas=3, rank=rank, shuffle=True, seed=5)
        for epoch in range(2):
            if told:
                sampler.set_epoch(epoch)
            found += [Seen(24 * epoch + 3 * place + rank, rank, epoch, row) for place, row in enumerate(sampler)]
    assert faults(found, rows=24, epochs=2) == (set() if told else {"two epochs in the same order"})


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_validation_is_dealt_to_ranks_in_equal_numbers(numbers: Table, world: int) -> None:
    cut = {"micro_rows": 4, "rows": 100, "seed": 1}
    alone = validation_batches(numbers, Plain(), **cut)
    shares = [validation_batches(numbers, Plain(), **cut, share=(rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    dealt = [share[index] for index in range(len(shares[0])) for share in shares]
    assert same([alone], [[batch for batch in dealt if batch.rows]])
    fillers = [batch for batch in dealt if not batch.rows]
    assert len(fillers) == -len(alone) % world
    assert all(set(batch.weights.values()) == {0} and batch.tensors["ids"].numel() for batch in fillers)


@pytest.mark.parametrize("micro_rows", [1, 3, 8, 16, 100])
def test_validation_is_one_batch_however_it_is_cut(numbers: Table, micro_rows: int) -> None:
    """Rows, slots and draws: also an objective that draws at random sees the same validation."""
    parts = validation_batches(numbers, Plain(), micro_rows=micro_rows, rows=16, seed=1)
    (whole,) = validation_batches(numbers, Plain(), micro_rows=16, rows=16, seed=1)
    for name in ("ids", "epochs", "slots", "tokens"):
        assert torch.equal(torch.cat([part.tensors[name] for part in parts]), whole.tensors[name])
    assert all(torch.equal(part.tensors["draw"], whole.tensors["draw"]) for part in parts)
    assert sum(part.weights["loss"] for part in parts) == whole.weights["loss"]
