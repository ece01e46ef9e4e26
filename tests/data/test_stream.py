"""A table that grows while it is read: its order, waiting for rows, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.contracts import Batch
from lockstep.data import cache, stream
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.stream import StreamOrder, StreamTable, chunk_folder, chunk_seed, reading
from lockstep.errors import DataError
from tests.data import small_stream
from tests.data.small_stream import SIZES, add, begin, whole
from tests.data.stand_in import Plain

TOTAL = sum(SIZES)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.01)


@pytest.fixture
def numbers(tmp_path: Path) -> StreamTable:
    return StreamTable(whole(tmp_path))


def ids_of(table: StreamTable, start: int, count: int, *, seed: int = 3) -> tuple[list[int], list[int]]:
    ids, epochs = table.order(seed).at(start, count)
    return ids.tolist(), epochs.tolist()


# ------------------------------------------------------------------------------------------------------------ the order


def test_every_epoch_shows_every_row_once_chunk_after_chunk(numbers: StreamTable) -> None:
    ids, epochs = ids_of(numbers, 0, 3 * TOTAL)
    assert epochs == [epoch for epoch in range(3) for _ in range(TOTAL)]
    for epoch in range(3):
        of_epoch, first = ids[epoch * TOTAL : (epoch + 1) * TOTAL], 0
        for size in SIZES:
            assert sorted(of_epoch[first : first + size]) == list(range(first, first + size))
            first += size


def test_epochs_chunks_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    table = StreamTable(whole(tmp_path, (40, 40, 40)))
    ids, _ = ids_of(table, 0, 240)
    orders = [tuple(i % 40 for i in ids[first : first + 40]) for first in range(0, 240, 40)]
    assert len(set(orders)) == 6
    assert tuple(range(40)) not in orders
    assert ids_of(table, 0, 120, seed=4) != ids_of(table, 0, 120)
    assert len({chunk_seed(seed, number) for seed in range(50) for number in range(50)}) == 2500


@pytest.mark.parametrize("step", [1, 2, 5, 13, 64])
def test_the_order_is_a_function_of_the_position(numbers: StreamTable, step: int) -> None:
    """However many are asked for at a time, and wherever one begins."""
    ids, epochs = ids_of(numbers, 0, 2 * TOTAL)
    for start in range(0, 2 * TOTAL - step, 7):
        assert ids_of(numbers, start, step) == (ids[start : start + step], epochs[start : start + step])


def test_the_order_does_not_depend_on_how_fast_chunks_come(tmp_path: Path) -> None:
    expected = ids_of(StreamTable(whole(tmp_path / "there")), 0, 2 * TOTAL)
    table = StreamTable(begin(tmp_path / "coming"))
    order = table.order(3)
    ids: list[int] = []
    epochs: list[int] = []
    for number in range(1, len(SIZES) + 1):
        there = table.rows if number < len(SIZES) else 2 * TOTAL
        if there > len(ids):
            more, of_epoch = order.at(len(ids), there - len(ids))
            ids += more.tolist()
            epochs += of_epoch.tolist()
        if number < len(SIZES):
            add(table.base, number)
    assert (ids, epochs) == expected


class ByWorld(StreamOrder):
    """The known bug: the order of a chunk depends on how many ranks there are."""

    world = 1

    def _of(self, number: int, rows: int) -> Order:
        return Order(rows, chunk_seed(self.seed, number) ^ self.world)


def steps(table: Any, count: int, **more: Any) -> list[list[Batch]]:
    with Loader(table, Plain(), seed=5, micro_rows=2, **more) as loader:
        return list(islice(loader, count))


def rows_in_order(base: Path, world: int, *, workers: int = 0, start: int = 0, order: Any = StreamOrder) -> list[Any]:
    """(row, epoch, first token) in the order of slots of 24 rows a step, made by so many ranks."""
    table = StreamTable(base)
    setattr(table, "order", lambda seed: order(table, seed))  # noqa: B010 - a control: the order that is to be caught
    ByWorld.world = world
    shares = [
        steps(table, 8 - start, micro_batches=12 // world, rank=rank, world=world, workers=workers, start_step=start)
        for rank in range(world)
    ]
    seen: list[Any] = []
    for step in range(8 - start):
        for batch in [batch for share in shares for batch in share[step]]:
            parts = (batch.tensors[name] for name in ("ids", "epochs", "tokens", "slots"))
            seen += [(int(i), int(e), int(t[0]), int(s)) for i, e, t, s in zip(*parts, strict=True)]
    return seen


QUICK = ((1, 2), (2, 0), (3, 1), (4, 2))


@pytest.mark.parametrize(
    ("world", "workers"),
    [
        pytest.param(world, workers, marks=() if (world, workers) in QUICK else pytest.mark.slow)
        for world in (1, 2, 3, 4)
        for workers in (0, 1, 2)
    ],
)
def test_world_size_and_threads_change_nothing(tmp_path: Path, world: int, workers: int) -> None:
    """Item 30, for streams; batches of 24 straddle chunks and epochs of 54 rows."""
    base = whole(tmp_path)
    alone = rows_in_order(base, 1)
    assert [entry[3] for entry in alone] == [slot for _ in range(8) for slot in range(24)]
    assert all(token == 10 * row for row, _, token, _ in alone)
    for epoch in range(3):
        assert sorted(row for row, seen, _, _ in alone if seen == epoch) == list(range(TOTAL))
    assert rows_in_order(base, world, workers=workers) == alone
    assert rows_in_order(base, world, workers=workers, start=3) == alone[3 * 24 :]  # as after a resume


def test_an_order_that_depends_on_the_world_size_is_seen(tmp_path: Path) -> None:
    """Negative control."""
    base = whole(tmp_path)
    assert rows_in_order(base, 2, order=ByWorld) != rows_in_order(base, 1, order=ByWorld)


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_several_chunks_come_in_the_order_asked_for(numbers: StreamTable) -> None:
    ids = np.array([TOTAL - 1, 0, 11, 12, 12, 41, 42, 6, 7])
    taken = numbers.take(ids)["tokens"]
    assert taken.dtype == np.int32
    assert np.array_equal(taken, 10 * ids[:, None] + np.arange(5))
    assert numbers.take(ids[:0])["tokens"].shape == (0, 5)


def test_few_tables_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (2,) * 30
    table = StreamTable(whole(tmp_path, sizes))
    checked: list[int] = []
    check = stream.check_chunk
    monkeypatch.setattr(stream, "check_chunk", lambda base, number: (checked.append(number), check(base, number)))
    for _ in range(2):
        for row in range(60):
            assert table.take(np.array([row]))["tokens"][0, 0] == 10 * row
            assert len(table._tables) <= stream.OPEN_TABLES
    assert checked == list(range(1, 30)), "each is hashed once"


def test_who_asks_for_rows_to_come_waits_for_them(tmp_path: Path) -> None:
    table = StreamTable(begin(tmp_path))
    assert (table.rows, table.chunks, table.ended, table.epoch_rows) == (7, 1, False, stream.ENDLESS_ROWS)
    assert table.is_ready(6)
    assert not table.is_ready(7)
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda: found.update(order=table.order(3).at(0, 12))),
        threading.Thread(target=lambda: found.update(rows=table.take(np.array([0, 11])))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not found
    add(table.base, 1)
    for thread in threads:
        thread.join(10)
    assert sorted(found["order"][0].tolist()) == list(range(12))
    assert found["rows"]["tokens"][:, 0].tolist() == [0, 110]
    for number in range(2, len(SIZES)):
        add(table.base, number)
    assert (table.rows, table.ended, table.epoch_rows) == (TOTAL, True, TOTAL)
    assert table.is_ready(10 * TOTAL)


@pytest.mark.parametrize("workers", [1, 3])
def test_closing_ends_threads_that_wait_for_rows(tmp_path: Path, workers: int) -> None:
    table = StreamTable(begin(tmp_path))
    loader = Loader(table, Plain(), seed=5, micro_rows=2, micro_batches=1, workers=workers)
    assert len(list(islice(loader, 3))) == 3
    time.sleep(0.05)  # they wait for the row after the seventh
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


# --------------------------------------------------------------------------------------------------------- what is bad


def test_a_chunk_with_one_changed_token_is_refused(tmp_path: Path) -> None:
    base = whole(tmp_path)
    path = chunk_folder(base, 3) / "rows" / "tokens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    table = StreamTable(base)
    assert table.take(np.array([11]))["tokens"][0, 0] == 110  # another chunk
    with pytest.raises(DataError, match="SHA-256") as caught:
        table.take(np.array([12]))
    assert str(path) in str(caught.value)
    assert f"rm -r {chunk_folder(base, 3)}" in caught.value.hint
    with pytest.raises(DataError):
        table.is_ready(12)


def test_a_damaged_chunk_that_is_about_to_be_mended_is_waited_for(tmp_path: Path) -> None:
    base = whole(tmp_path)
    path = chunk_folder(base, 3) / "rows" / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    (chunk_folder(base, 5) / "chunk.json").write_text("{}", encoding="utf-8")
    table = StreamTable(base)
    table.vouched = lambda _: False
    assert not table.is_ready(12)
    assert table.rows == TOTAL - SIZES[-1]
    for number in (3, 5):
        add(base, number)
    assert table.is_ready(12)
    assert table.take(np.array([12]))["tokens"][0, 0] == 120
    assert table.rows == TOTAL


@pytest.mark.parametrize("said", ["{", "{}", '{"number": 9}', json.dumps({**small_stream.described(4).to_json()})])
def test_a_description_that_is_none_is_refused(tmp_path: Path, said: str) -> None:
    base = whole(tmp_path)
    (chunk_folder(base, 3) / "chunk.json").write_text(said, encoding="utf-8")
    with pytest.raises(DataError, match="not a chunk") as caught:
        StreamTable(base).order(1).at(0, 20)
    assert caught.value.where == str(chunk_folder(base, 3))


def test_a_cache_that_is_no_stream_is_refused(tmp_path: Path) -> None:
    base = begin(tmp_path)
    (base / "meta.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="not the beginning of a stream"):
        StreamTable(base)


def test_half_a_chunk_is_none(tmp_path: Path) -> None:
    base = begin(tmp_path)
    add(base, 1)
    (chunk_folder(base, 1) / "manifest.json").unlink()
    add(base, 2).rename(chunk_folder(base, 2).with_name("000002.tmp-1"))
    assert StreamTable(base).rows == 7


def test_tensors_of_a_batch_are_those_of_a_plain_table(numbers: StreamTable) -> None:
    """The loader makes the same kind of batches of both."""
    (batch,) = steps(numbers, 1, micro_batches=1)[0]
    assert batch.tensors["tokens"].dtype == torch.int32
    assert batch.tensors["tokens"].shape == (2, 5)


def test_what_somebody_reads_is_not_cleared_away(tmp_path: Path) -> None:
    """Several may read at once; who reads last decides. The name of a cache is its key."""
    base = whole(tmp_path).rename(tmp_path / ("0" * 40))
    chunk_folder(base, 1).parent.mkdir(exist_ok=True)
    with reading(base):
        with reading(base):
            assert cache.clean(tmp_path) == []
        assert cache.clean(tmp_path) == []
        assert chunk_folder(base, 1).parent.is_dir()
    assert f"{base.name}.chunks" in cache.clean(tmp_path)
    assert not list(tmp_path.glob(f"{base.name}*.lock"))


def test_a_stream_in_a_place_that_cannot_be_written_to_is_read(tmp_path: Path) -> None:
    base = tmp_path / "nowhere" / "base"
    with reading(base):
        assert not base.parent.exists()
