"""Verdicts from readings: who hangs, who is slow, which node is silent; and who is not."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

import pytest

from lockstep.launch.beats import RING, Beat
from lockstep.launch.watchdog import Hang, Slowness, counted_from, find_hang, limit, probe_nodes

SECOND = 1_000_000_000
NOW = 1_000 * SECOND


def beat(slot: int, section: str, step: int, age: float) -> Beat:
    return Beat(slot, pid=100 + slot, mark_ns=NOW - int(age * SECOND), section=section, step=step, rank=slot)


def verdict(*beats: Beat, stopped: int | None = None) -> Hang | None:
    return find_hang(
        beats,
        now_ns=NOW,
        hang_seconds=5,
        state_of=lambda pid: "T" if stopped is not None and pid == 100 + stopped else "S",
    )


def test_nobody_late() -> None:
    assert verdict(beat(0, "forward", 3, 4.9), beat(1, "communication", 3, 4)) is None


def test_blames_who_works_not_who_waits() -> None:
    found = verdict(beat(0, "communication", 7, 5.1), beat(1, "forward", 7, 5.2), beat(2, "communication", 7, 5.1))
    assert found is not None
    assert (found.slot, found.section, found.step) == (1, "forward", 7)


def test_blames_who_is_furthest_behind() -> None:
    found = verdict(beat(0, "data", 8, 6), beat(1, "save", 7, 5.5), beat(2, "data", 8, 7))
    assert found is not None
    assert found.slot == 1


def test_blames_the_stopped_one_even_while_it_waits() -> None:
    found = verdict(beat(0, "forward", 7, 6), beat(1, "communication", 7, 6), stopped=1)
    assert found is not None
    assert (found.slot, found.stopped) == (1, True)


def test_who_waits_for_somebody_that_works_is_not_late() -> None:
    assert verdict(beat(0, "communication", 7, 60), beat(1, "evaluate", 7, 1)) is None
    assert verdict(beat(0, "communication", 7, 60), beat(1, "prepare", -1, 500)) is None


def test_all_waiting_is_another_nodes_fault() -> None:
    found = verdict(beat(0, "communication", 7, 6), beat(1, "communication", 7, 5.5))
    assert found is not None
    assert found.slot is None


def test_waiting_in_different_steps_blames_the_one_behind() -> None:
    found = verdict(beat(0, "communication", 8, 6), beat(1, "communication", 7, 5.5))
    assert found is not None
    assert found.slot == 1


def test_sections_without_a_limit() -> None:
    assert limit("prepare", 5) == limit("done", 5) == float("inf")
    assert limit("start", 5) == 50
    assert verdict(beat(0, "prepare", -1, 500), beat(1, "done", 9, 500), beat(2, "start", -1, 49)) is None
    found = verdict(beat(0, "start", -1, 51), beat(1, "communication", 0, 3))
    assert found is not None
    assert found.slot == 0


@pytest.mark.parametrize("section", ["start", "prepare", "done"])
def test_a_stopped_process_has_no_excuse(section: str) -> None:
    found = verdict(beat(0, "data", 3, 1), beat(1, section, -1, 5.1), stopped=1)
    assert found is not None
    assert (found.slot, found.stopped) == (1, True)
    assert verdict(beat(0, "data", 3, 1), beat(1, section, -1, 4.9), stopped=1) is None
    assert verdict(beat(0, "data", 3, 1), beat(1, section, -1, 40)) is None


def test_nobody_stays_when_all_are_done() -> None:
    found = verdict(beat(1, "done", 9, 6))
    assert found is not None
    assert (found.slot, found.section) == (1, "done")
    assert verdict(beat(0, "save", 9, 4), beat(1, "done", 9, 60)) is None
    assert verdict(beat(0, "done", 9, 1), beat(1, "done", 9, 60)) is None, "it had waited for the other"
    assert verdict(*counted_from([beat(1, "done", 9, 60)], awake_ns=0, ended_ns=NOW - SECOND)) is None


def test_silence_that_does_not_count() -> None:
    late = [beat(0, "forward", 9, 60), beat(1, "done", 9, 60)]
    assert verdict(*counted_from(late, awake_ns=0, ended_ns=NOW)) is not None, "an end excuses only who is done"
    assert verdict(*counted_from(late, awake_ns=NOW - SECOND, ended_ns=0)) is None


class Workers:
    """Workers whose own work per step has the noise of real ones: a spread, and now and then a hiccup."""

    def __init__(self, factors: Sequence[float], *, seed: int, spread: float) -> None:
        self.factors = factors
        self._chance = random.Random(seed)
        self._spread = spread
        self._busy: list[list[float]] = [[] for _ in factors]

    def step(self) -> None:
        for busy, factor in zip(self._busy, self.factors, strict=True):
            hiccup = self._chance.uniform(1, 4) if self._chance.random() < 0.02 else 1.0
            busy.append(0.1 * factor * hiccup * self._chance.lognormvariate(0, self._spread))

    def read(self) -> list[Beat]:
        return [
            Beat(slot, pid=1, busy_count=len(busy), busy=tuple(busy[-RING:])) for slot, busy in enumerate(self._busy)
        ]


def flagged_at(factors: Sequence[float], *, seed: int, steps: int, factor: float, spread: float) -> dict[int, int]:
    """slot -> step at which it was named, by readings every few steps as a launcher makes them."""
    workers, slowness = Workers(factors, seed=seed, spread=spread), Slowness(factor)
    chance = random.Random(seed + 1)
    found: dict[int, int] = {}
    for step in range(steps):
        workers.step()
        if chance.random() < 0.3:
            found |= dict.fromkeys(slowness.feed(workers.read()), step)
    return found


@pytest.mark.parametrize("count", [2, 4, 8])
def test_slow_worker_is_named_within_fifty_steps(count: int) -> None:
    """Row 15: +30 % in at least 99 of 100 runs, and nobody else."""
    factors = [1.0] * (count - 1) + [1.3]
    runs = [flagged_at(factors, seed=seed, steps=50, factor=1.2, spread=0.1) for seed in range(100)]
    assert sum(run.keys() == {count - 1} for run in runs) >= 99


@pytest.mark.parametrize("count", [2, 4, 8])
def test_quiet_run_has_no_slow_worker(count: int) -> None:
    """Row 15: at most 1 false name in 100 runs of 200 steps."""
    runs = [flagged_at([1.0] * count, seed=seed, steps=200, factor=1.2, spread=0.1) for seed in range(100)]
    assert sum(bool(run) for run in runs) <= 1


def test_ten_percent_can_be_seen() -> None:
    """With slow_factor 1.05 and quiet steps; and a quiet run stays quiet."""
    runs = [flagged_at([1, 1, 1, 1.1], seed=seed, steps=50, factor=1.05, spread=0.02) for seed in range(100)]
    assert sum(run.keys() == {3} for run in runs) >= 99
    quiet = [flagged_at([1, 1, 1, 1], seed=seed, steps=200, factor=1.05, spread=0.02) for seed in range(100)]
    assert sum(bool(run) for run in quiet) <= 1


def test_named_once_and_with_how_much() -> None:
    workers, slowness = Workers([1, 3.0], seed=5, spread=0.02), Slowness(1.2)
    named = []
    for _ in range(200):
        workers.step()
        named += slowness.feed(workers.read())
    assert named == [1]
    assert 2.8 < slowness.slow[1] < 3.2


def test_independent_replicas_need_not_be_at_the_same_step() -> None:
    """A worker three times as slow falls behind by more than the ring holds and is named all the same."""
    workers, slowness = Workers([1, 3.0], seed=5, spread=0.02), Slowness(1.2)
    named = []
    for number in range(400):
        workers.step()
        if number % 3:
            workers._busy[1].pop()
        named += slowness.feed(workers.read())
    assert named == [1]


def test_one_worker_has_nobody_to_be_compared_with() -> None:
    workers, slowness = Workers([1], seed=5, spread=0.02), Slowness(1.2)
    for _ in range(100):
        workers.step()
    assert slowness.feed(workers.read()) == []


def node(number: int, address: str, port: int) -> dict[str, object]:
    return {"node": number, "host": f"h{number}", "address": address, "port": port}


def test_probing_nodes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        nodes = [
            node(0, "127.0.0.1", 1),
            node(1, "127.0.0.1", listening.getsockname()[1]),
            node(2, "127.0.0.1", closed.getsockname()[1]),
        ]
        found = probe_nodes(nodes, own=0, seconds=1)
    assert [str(silent) for silent in found] == ["the workers of node 2 (h2, 127.0.0.1) have ended"]


def test_probing_a_silent_node() -> None:
    """A full backlog answers nothing, as a cut link does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        address = listening.getsockname()
        knocks = [socket.socket() for _ in range(4)]
        for knock in knocks:
            knock.setblocking(False)
            knock.connect_ex(address)
        found = probe_nodes([node(3, *address)], own=0, seconds=0.5)
        for knock in knocks:
            knock.close()
    assert [str(silent) for silent in found] == ["node 3 (h3, 127.0.0.1) does not answer"]
