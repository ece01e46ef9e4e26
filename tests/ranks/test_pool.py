"""The pool itself: results in order, a failing rank fails the test with its words, a dead one is replaced."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from lockstep.runtime.group import Group
from tests.ranks.pool import Died, Pool, RankFailed, Silent


def place(group: Group, plus: int) -> tuple[int, int, int]:
    return group.rank, group.world, plus


def fail_on_one(group: Group) -> None:
    if group.rank == 1:
        raise ValueError("rank 1 has its reasons")


def wait_for_ever(group: Group) -> None:
    time.sleep(60)


def die(group: Group) -> None:
    if group.rank == 0:
        os._exit(9)


def test_results_come_in_the_order_of_ranks(ranks: Pool) -> None:
    for count in (2, 3, 4, 2):
        assert ranks(count, place, 7) == [(rank, count, 7) for rank in range(count)]


def test_a_failing_rank_fails_the_test_with_its_traceback(ranks: Pool) -> None:
    with pytest.raises(RankFailed, match="rank 1 has its reasons"):
        ranks(2, fail_on_one)


@pytest.mark.parametrize(("function", "expected"), [(die, Died), (wait_for_ever, Silent)])
def test_the_dead_and_the_silent_do_not_hold_up_the_tests(ranks: Pool, function: Any, expected: type) -> None:
    before = time.monotonic()
    first = ranks(2, function, may_fail=True, timeout_seconds=2.0)[0]
    assert isinstance(first, expected)
    assert time.monotonic() - before < 30
