"""Who is called slow: with made-up noise, and with step times recorded from real replicas on a busy machine."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep.check import stragglers
from lockstep.check.outcome import Pace

STEPS = 40  # 50, without 10 of warm-up
RATIO = 1.05
RECORDED = json.loads((Path(__file__).parent / "step_times.json").read_text())


def paces(times: dict[str, list[float]], **limits: float) -> dict[str, Pace]:
    return stragglers.paces("llama", times, **{"slow_ratio": RATIO, "shortest_seconds": 0.0, **limits})


def group(chance: random.Random, *, cards: int, slow: float = 0.0, rough: float = 1.0) -> dict[str, list[float]]:
    """Step times of cards of which number 1 is slower: jitter to one side, slow drift, now and then a long step."""
    found: dict[str, list[float]] = {}
    for index in range(cards):
        base, drift, own = 1 + chance.gauss(0, 0.005 * rough), 0.0, list[float]()
        base *= 1 + slow if index == 1 else 1
        for _ in range(STEPS):
            drift = 0.9 * drift + chance.gauss(0, 0.0044 * rough)
            seconds = base * (1 + drift + abs(chance.gauss(0, 0.02 * rough)))
            own.append(seconds * (1 + chance.expovariate(2.0) if chance.random() < 0.02 * rough else 1))
        found[str(index)] = own
    return found


def rates(groups: int, *, slow: float, rough: float = 1.0) -> tuple[float, float]:
    """(share of groups whose slow card is named, share of groups in which another is)."""
    chance = random.Random(f"{slow} {rough}")
    named = false = 0
    for turn in range(groups):
        found = paces(group(chance, cards=(2, 3, 4, 8)[turn % 4], slow=slow, rough=rough))
        named += found["1"].slow and slow > 0
        false += any(pace.slow for name, pace in found.items() if name != "1" or slow == 0)
    return named / groups, false / groups


def recorded(clock: str, start: int, *, cards: int, slow: float = 0.0, steps: int = STEPS) -> dict[str, list[float]]:
    return {
        str(index): [value * (1 + slow if index == 1 else 1) for value in RECORDED[clock][index][start : start + steps]]
        for index in range(cards)
    }


def test_a_thousand_clean_groups_have_at_most_one_in_a_hundred_called_slow() -> None:
    assert rates(1000, slow=0.0) == (0, 0)
    assert rates(200, slow=0.0, rough=2.0)[1] <= 0.01


@pytest.mark.slow
def test_many_more_clean_groups() -> None:
    assert rates(10_000, slow=0.0)[1] <= 0.001
    assert rates(4_000, slow=0.0, rough=2.0)[1] <= 0.01


@pytest.mark.parametrize(("slow", "least"), [(0.1, 0.98), (0.3, 1.0), (2.0, 1.0)])
def test_delays_are_named_within_fifty_steps(slow: float, least: float) -> None:
    named, false = rates(200, slow=slow)
    assert named >= least
    assert false == 0


def test_a_delay_of_the_threshold_itself_blames_no_other_card() -> None:
    named, false = rates(200, slow=0.05)
    assert false == 0
    assert 0 < named < 1  # at five percent it is for chance to say


@pytest.mark.parametrize("cards", [2, 3, 4])
def test_real_times_of_a_busy_machine(cards: int) -> None:
    """Recorded at a load of 18 on two cores. The control: on the wall clock the same delay drowns."""
    starts = range(10, 300 - STEPS, 10)

    def named(slow: float) -> list[set[str]]:
        found = [paces(recorded("own", start, cards=cards, slow=slow)) for start in starts]
        return [{name for name, pace in each.items() if pace.slow} for each in found]

    assert named(0.0) == [set()] * len(starts)
    assert named(0.3) == [{"1"}] * len(starts)
    for fewer, more in pairwise([named(slow).count({"1"}) for slow in (0.0, 0.1, 0.2, 0.3)]):
        assert fewer <= more
    drowned = 0
    for start in starts:
        times = recorded("wall", start, cards=cards)
        delay = recorded("own", start, cards=cards)["1"]
        times["1"] = [seconds + 0.3 * own for seconds, own in zip(times["1"], delay, strict=True)]
        drowned += not paces(times)["1"].slow
    assert drowned > len(starts) / 2


def test_three_times_as_slow_is_named_and_the_threshold_can_be_set() -> None:
    times = recorded("own", 10, cards=4, slow=2.0)
    found = paces(times)
    assert [name for name, pace in found.items() if pace.slow] == ["1"]
    assert 2.5 < found["1"].ratio < 3.5
    assert not any(pace.slow for pace in paces(times, slow_ratio=4.0).values())


def test_with_two_cards_the_faster_is_the_measure_and_one_card_is_never_slow() -> None:
    pair = group(random.Random(1), cards=2, slow=0.3)
    assert [pace.slow for pace in paces(pair).values()] == [False, True]
    lone = paces({"1": pair["1"]})["1"]
    assert (lone.slow, lone.ratio) == (False, 1.0)


def test_two_slow_of_four_are_both_named() -> None:
    times = group(random.Random(2), cards=4, slow=0.3)
    times["2"] = [1.3 * seconds for seconds in times["2"]]
    assert [name for name, pace in paces(times).items() if pace.slow] == ["1", "2"]


def test_a_card_that_slows_down_later_is_named() -> None:
    times = {str(index): [0.1 + 0.0001 * (step % 3) for step in range(200)] for index in range(4)}
    times["3"][150:] = [0.13] * 50
    found = paces(times)["3"]
    assert found.slow
    assert found.ratio < 1.01  # over the whole run it looks fine
    assert found.slow_ratio == pytest.approx(1.3, rel=0.01)
    times["3"][150:] = times["2"][150:]
    times["3"][40:55] = [0.2] * 15  # less than a window: a hiccup
    assert not paces(times)["3"].slow


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_too_few_steps_are_not_judged(steps: int) -> None:
    found = paces({"0": [0.1] * steps, "1": [0.5] * steps})
    assert not any(pace.slow for pace in found.values())
    assert len(found) == (2 if steps else 0)


def test_what_is_over_in_a_moment_says_nothing() -> None:
    """Milliseconds of a probe, say: five percent of them are any hiccup of the host."""
    times = {"0": [0.01] * 40, "1": [0.03] * 40, "2": [0.01] * 40}
    assert [pace.slow for pace in paces(times, shortest_seconds=1.0).values()] == [False] * 3
    assert [pace.slow for pace in paces(times, shortest_seconds=0.3).values()] == [False, True, False]


def test_nine_steps_are_enough_for_a_gross_case() -> None:
    found = paces({"0": [0.1] * 9, "1": [0.5] * 9, "2": [0.1] * 9})
    assert [pace.slow for pace in found.values()] == [False, True, False]


def test_percentiles() -> None:
    assert stragglers.percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert stragglers.percentile([float(value) for value in range(1, 101)], 0.95) == 95.0
