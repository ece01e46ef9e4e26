"""The order of rows: every row once per epoch, another order each epoch, the same for ever."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import order as module
from lockstep.data.order import ROUNDS, WINDOW_POSITIONS, Order, epoch_keys, permute, splitmix64

EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 13, 31, 32, 33, 127, 128, 129, 997, 1023, 1024, 1025, 65_521, 65_535, 65_536, 65_537]


@pytest.mark.parametrize("rows", EDGES)
def test_every_row_once_per_epoch(rows: int) -> None:
    """Item 30, at the root of it."""
    order = Order(rows, 7)
    for epoch in (0, 1, 5):
        ids, epochs = order.at(epoch * rows, rows)
        assert (epochs == epoch).all()
        assert (np.bincount(ids, minlength=rows) == 1).all()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_bijection_for_any_size_seed_and_epoch(rows: int, seed: int, epoch: int) -> None:
    offsets = np.arange(rows, dtype=np.uint64)
    keys = np.repeat(epoch_keys(seed, np.array([epoch], np.uint64)), rows)
    assert sorted(permute(offsets, keys, rows=rows).tolist()) == list(range(rows))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200_000),
    position=st.integers(0, 10 * WINDOW_POSITIONS),
    count=st.integers(0, 3000),
    seed=st.integers(0, 100),
)
def test_any_cut_gives_the_same_order(rows: int, position: int, count: int, seed: int) -> None:
    """A position means one row, whatever was asked for before and together with it: also across windows and epochs."""
    ids, epochs = Order(rows, seed).at(position, count)
    other = Order(rows, seed)
    half = count // 2
    later = other.at(position + half, count - half)
    earlier = other.at(position, half)
    assert np.array_equal(ids, np.concatenate([earlier[0], later[0]]))
    assert np.array_equal(epochs, np.concatenate([earlier[1], later[1]]))
    assert np.array_equal(epochs, (position + np.arange(count)) // rows)


def test_windows_and_epochs_join() -> None:
    rows = WINDOW_POSITIONS // 3
    whole, epochs = Order(rows, 3).at(0, 3 * WINDOW_POSITIONS)
    assert epochs[-1] == 9
    order = Order(rows, 3)
    for start in (0, rows - 2, WINDOW_POSITIONS - 2, 2 * WINDOW_POSITIONS - 1):
        assert np.array_equal(order.at(start, 5)[0], whole[start : start + 5])
    assert (np.bincount(whole[: 9 * rows], minlength=rows) == 9).all()


def test_seeds_and_epochs_differ() -> None:
    order = Order(1000, 1)
    first, second = order.at(0, 1000)[0], order.at(1000, 1000)[0]
    other = Order(1000, 2).at(0, 1000)[0]
    for left, right in ((first, second), (first, other), (first, np.arange(1000))):
        assert (left == right).mean() < 0.02  # equal places of two random permutations: 1 in 1000


def test_the_order_never_changes_between_versions() -> None:
    """Runs in the wild resume by this order: it is a format."""
    assert splitmix64(np.array([0, 1], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert Order(10, 42).at(0, 12)[0].tolist() == [3, 4, 9, 8, 1, 6, 2, 5, 0, 7, 1, 7]


def chi_square(rows: int, epochs: int) -> float:
    """Of how often each row comes in each place, over what it is when all are equally likely."""
    ids = Order(rows, 11).at(0, rows * epochs)[0].reshape(epochs, rows)
    expected = epochs / rows
    table = np.stack([np.bincount(ids[:, place], minlength=rows) for place in range(rows)])
    return float(((table - expected) ** 2 / expected).sum() / (rows * (rows - 1)))


@pytest.mark.parametrize("rows", [2, 3, 7, 8, 24, 33])
def test_rows_fall_evenly(rows: int) -> None:
    assert abs(chi_square(rows, 20_000) - 1) < 4 * 2**0.5 / (rows - 1)  # four standard deviations


def test_the_evenness_test_sees_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(module, "ROUNDS", 2)
    assert chi_square(33, 20_000) > 10


def test_the_evenness_test_sees_related_round_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the fault this code once had."""
    monkeypatch.setattr(module, "round_keys", lambda: np.arange(ROUNDS, dtype=np.uint64))
    assert chi_square(24, 20_000) > 2


def test_neighbours_are_unrelated() -> None:
    ids = Order(1000, 5).at(0, 200_000)[0].reshape(200, 1000)
    steps = np.bincount((np.diff(ids, axis=1) % 1000).ravel(), minlength=1000)[1:]
    freedom = 998
    assert abs(((steps - steps.mean()) ** 2 / steps.mean()).sum() / freedom - 1) < 5 * (2 / freedom) ** 0.5


def peak_bytes(action: Callable[[], object]) -> int:
    """The most memory that numpy and Python took for it."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def asked(rows: int, epoch: int) -> Callable[[], object]:
    """At the beginning of an epoch, in its middle, near its end, and over the edge into the next."""
    starts = (0, rows // 2, max(0, rows - 500), rows - 1)
    return lambda: [Order(rows, 7).at(epoch * rows + start, 256) for start in starts]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("rows", [10**9, 2**30 + 1, 10**12])  # just above a power of two most values fall outside
def test_the_order_of_very_many_rows_takes_no_more_memory(rows: int, epoch: int) -> None:
    """No array has an entry for each row: a window of positions is all there ever is."""
    few = peak_bytes(asked(10**3, epoch))
    assert peak_bytes(asked(rows, epoch)) < 1.1 * few < 16 << 20


def test_the_measurement_sees_a_shuffled_list() -> None:
    """Negative control: the usual way, at a hundredth of those rows."""
    few = peak_bytes(asked(10**3, 0))
    assert peak_bytes(lambda: np.random.default_rng(7).permutation(10**7)) > 4 * few


def test_very_many_rows_are_in_range_and_never_twice() -> None:
    """The last 200,000 positions of an epoch of 10^9 rows, and the first of the next."""
    rows = 10**9
    order = Order(rows, 7)
    ids, epochs = order.at(4 * rows - 200_000, 200_001)
    assert (epochs[:-1] == 3).all()
    assert epochs[-1] == 4
    assert len(np.unique(ids[:-1])) == 200_000
    assert 0 <= ids.min() < ids.max() < rows
    begin = order.at(3 * rows, 200_000)[0]
    assert not np.intersect1d(begin, ids[:-1]).size
