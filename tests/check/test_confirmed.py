"""What the judge makes of reruns, golden records, pace and the driver's counters."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from lockstep.check.golden import Golden, Known, digest
from lockstep.check.golden import key as golden_key
from lockstep.check.outcome import CardVerdict
from lockstep.check.records import Replica, Work
from lockstep.check.verdict import judge
from tests.check.runs import FAIL, PASS, STEPS, TENSORS, UNDECIDED, VERSIONS, card, replica, said, statuses, work

# -- reruns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("again", "nature"),
    [(work(steps=5), "transient"), (work(steps=5, wrong_at=4), "persistent"),
     (work(steps=5, wrong_at=4, salt=2), "intermittent"), (work(steps=5, wrong_at=1), "intermittent")],
)  # fmt: skip
def test_a_rerun_tells_the_nature_of_a_fault(again: Work, nature: str) -> None:
    runs = [replica(0), replica(1, work(wrong_at=4)), replica(2)]
    first = judge(runs).verdicts[1].difference
    assert first
    assert first.nature == ""
    judgement = judge(runs, reruns=[replica(1, again), replica(0, work(steps=5))])
    assert statuses(judgement) == [PASS, FAIL, PASS]
    assert judgement.verdicts[1].difference
    assert judgement.verdicts[1].difference.nature == nature


@pytest.mark.parametrize("second", [work(steps=5, wrong_at=4), work(steps=5, wrong_at=4, salt=2)])
def test_reruns_that_do_not_all_say_the_same_are_intermittent(second: Work) -> None:
    runs = [replica(0), replica(1, work(wrong_at=4)), replica(2)]
    found = judge(runs, reruns=[replica(1, work(steps=5)), replica(1, second)]).verdicts[1].difference
    assert found
    assert found.nature == "intermittent"


def test_a_damaged_rerun_says_nothing() -> None:
    runs = [replica(0), replica(1, work(wrong_at=4)), replica(2)]
    spoilt = work(steps=5, damaged=(3,))
    alone = judge(runs, reruns=[replica(1, spoilt)]).verdicts[1].difference
    again, wrong = replica(1, work(steps=5, wrong_at=4)), work(steps=5, wrong_at=4, damaged=(3,))
    both = judge(runs, reruns=[again, replica(1, wrong)]).verdicts[1].difference
    assert alone
    assert both
    assert (alone.nature, both.nature) == ("", "persistent")
    tie = [replica(0), replica(1, work(wrong_at=4))]
    assert statuses(judge(tie, reruns=[replica(0, work()), replica(1, spoilt)])) == [UNDECIDED, UNDECIDED]
    assert statuses(judge(tie, reruns=[replica(0, work()), replica(1, work(steps=5))])) == [PASS, FAIL], "the control"


def test_a_tie_of_two_is_resolved_by_who_repeats_its_bits() -> None:
    runs = [replica(0), replica(1, work(wrong_at=4))]
    judgement = judge(runs, reruns=[replica(0), replica(1)])
    assert statuses(judgement) == [PASS, FAIL]
    assert judgement.verdicts[1].difference
    assert judgement.verdicts[1].difference.nature == "transient"
    stays = judge(runs, reruns=[replica(0), replica(1, work(wrong_at=4))])
    assert statuses(stays) == [UNDECIDED] * 2  # both repeat: who is right?
    neither = judge(runs, reruns=[replica(0, work(wrong_at=2, salt=8)), replica(1)])
    assert statuses(neither) == [UNDECIDED] * 2  # none repeats: perhaps the workload itself cannot
    assert statuses(judge(runs, reruns=[replica(1)])) == [UNDECIDED] * 2  # one was not run again


def test_a_card_run_often_has_still_one_vote() -> None:
    runs = [replica(0), replica(1), replica(2, work(wrong_at=4))]
    reruns = [replica(2, work(wrong_at=4))] * 5
    assert statuses(judge(runs, reruns=reruns)) == [PASS, PASS, FAIL]


# -- golden -------------------------------------------------------------------------------------------------------


def golden(known: Work, *, seconds: float = 0.1) -> Golden:
    entry = {known.workload: Known({each.step: digest(each) for each in known.stamps}, seconds)}
    return Golden("hash", {golden_key(card(0), VERSIONS, "hash"): entry})


def test_golden_decides_between_two() -> None:
    judgement = judge([replica(0), replica(1, work(wrong_at=4, tensor="gradients:b"))], golden=golden(work()))
    assert statuses(judgement) == [PASS, FAIL]
    assert judgement.verdicts[1].difference
    assert (judgement.verdicts[1].difference.step, judgement.verdicts[1].difference.tensor) == (4, "gradients:b")
    assert "other bits than the golden record from step 4 on" in said(judgement.verdicts[1])


def test_golden_overrules_a_majority_that_is_wrong() -> None:
    runs = [replica(0), replica(1, work(wrong_at=4)), replica(2, work(wrong_at=4))]
    assert statuses(judge(runs)) == [FAIL, PASS, PASS]
    assert statuses(judge(runs, golden=golden(work()))) == [PASS, FAIL, FAIL]


def test_golden_of_other_bits_fails_all_and_says_that_they_agree() -> None:
    judgement = judge([replica(index) for index in range(3)], golden=golden(work(wrong_at=6)))
    assert statuses(judgement) == [FAIL] * 3
    assert "the cards agree, but have other bits than the golden record" in said(judgement.verdicts[0])


def test_golden_of_another_kind_or_config_says_nothing() -> None:
    other = dataclasses.replace(golden(work(wrong_at=6)), config_hash="another")
    assert statuses(judge([replica(index) for index in range(3)], golden=other)) == [PASS] * 3
    old = [replica(index, card=card(index, driver="535")) for index in range(3)]
    assert statuses(judge(old, golden=golden(work(wrong_at=6)))) == [PASS] * 3


def test_golden_is_company_for_one_card_and_its_times_are_a_note() -> None:
    judgement = judge([replica(0)], golden=golden(work(), seconds=0.05))
    assert statuses(judgement) == [PASS]
    assert judgement.verdicts[0].notes == ("production: 2.00 times the median step of the golden record",)
    assert statuses(judge([replica(0, work(wrong_at=3))], golden=golden(work()))) == [FAIL]


# -- speed and health ---------------------------------------------------------------------------------------------


def timed(index: int, factor: float, *, steps: int = 50) -> Replica:
    noise = random.Random(index)
    whole = work(steps=steps)
    stamps = tuple(dataclasses.replace(each, seconds=factor * noise.uniform(0.1, 0.101)) for each in whole.stamps)
    return replica(index, dataclasses.replace(whole, stamps=stamps))


def test_a_slow_card_fails_and_the_threshold_can_be_set() -> None:
    runs = [timed(index, 3.0 if index == 2 else 1.0) for index in range(4)]
    judgement = judge(runs)
    assert statuses(judgement) == [PASS, PASS, FAIL, PASS]
    assert "slow in production: its median step is 3.00 times the group's" in said(judgement.verdicts[2])
    assert [verdict.paces[0].slow for verdict in judgement.verdicts] == [False, False, True, False]
    assert statuses(judge(runs, slow_ratio=4.0)) == [PASS] * 4
    assert statuses(judge(runs, shortest_seconds=60.0)) == [PASS] * 4, "five seconds would be too short"


def test_processes_that_share_a_card_are_not_judged_by_their_times() -> None:
    """They take turns: a late one has other company than an early one."""
    runs = [timed(slot, 3.0 if slot == 2 else 1.0) for slot in range(4)]
    shared = [dataclasses.replace(each, card=card(0, slot=slot)) for slot, each in enumerate(runs)]
    assert statuses(judge(shared)) == [PASS] * 4
    assert statuses(judge(runs)) == [PASS, PASS, FAIL, PASS], "the control: a card for each"


def test_one_wrong_word_of_memory_fails_a_card_whatever_the_others_say() -> None:
    word = {"step": 2, "word": 9, "right": "00ff", "wrong": "01ff"}
    bad, good = (work("memory", facts={"wrong_words": words}) for words in ([word], []))
    judgement = judge([replica(0, good), replica(1, bad), replica(2, good)])
    assert statuses(judgement) == [PASS, FAIL, PASS]
    assert said(judgement.verdicts[1]) == "memory: word 9 of the pattern was 01ff instead of 00ff after step 2"
    assert statuses(judge([replica(index, bad) for index in range(2)])) == [FAIL] * 2
    assert statuses(judge([replica(0, good), replica(0, bad)])) == [FAIL], "a card alone, in its second run"


def health(before: dict[str, object], after: dict[str, object]) -> CardVerdict:
    return judge([replica(0, before=before, after=after), replica(1)]).verdicts[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [("ecc_uncorrected", "2 uncorrectable memory errors"), ("remapped_rows", "2 rows of memory were given up")],
)
def test_uncorrectable_errors_that_came_during_the_check_fail_the_card(name: str, words: str) -> None:
    verdict = health({name: 5}, {name: 7})
    assert verdict.status is FAIL
    assert words in said(verdict)
    assert health({name: 5}, {name: 5}).status is PASS
    assert health({}, {name: 7}).status is PASS  # nobody knows what it was before


@pytest.mark.parametrize("name", ["ecc_corrected", "remapped_rows_corrected"])
def test_corrected_errors_are_a_note(name: str) -> None:
    verdict = health({name: 5}, {name: 6})
    assert verdict.status is PASS
    assert verdict.notes


@pytest.mark.parametrize("name", ["remap_pending", "remap_failed"])
def test_a_card_that_waits_for_a_reset_fails(name: str) -> None:
    assert health({name: False}, {name: True}).status is FAIL
    assert health({name: True}, {}).status is FAIL
    assert health({name: False}, {name: False}).status is PASS


@pytest.mark.parametrize(
    ("name", "words"),
    [("thermal_seconds", "hot: heat held its clocks down for 3 s"),
     ("hw_thermal_seconds", "hot: the hardware slowed it down for heat for 3 s"),
     ("power_brake_seconds", "the power supply slowed it down for 3 s")],
)  # fmt: skip
def test_clocks_that_were_held_down_fail_the_card(name: str, words: str) -> None:
    verdict = health({name: 100.0}, {name: 103.0})
    assert (verdict.status, verdict.reasons) == (FAIL, (words,))
    assert health({name: 100.0}, {name: 100.5}).status is PASS
    assert health({}, {name: 103.0}).status is PASS  # nobody knows since when


def test_a_power_limit_is_a_note() -> None:
    capped = health({"power_cap_seconds": 1.0}, {"power_cap_seconds": 60.0})
    assert (capped.status, capped.notes) == (PASS, ("it ran at its power limit",))


def test_clean_groups_of_every_size_pass_and_a_random_flip_is_always_named() -> None:
    """The whole judge on made-up records: sizes, steps and tensors at random."""
    chance = random.Random(9)
    for _ in range(40):
        count, at = chance.randint(3, 16), chance.randrange(STEPS)
        who, tensor = chance.randrange(count), chance.choice(TENSORS)
        clean: Sequence[Replica] = [replica(index) for index in range(count)]
        assert judge(clean).passed
        spoilt = [*clean[:who], replica(who, work(wrong_at=at, tensor=tensor)), *clean[who + 1 :]]
        judgement = judge(spoilt)
        assert [verdict.status is FAIL for verdict in judgement.verdicts] == [index == who for index in range(count)]
        found = judgement.verdicts[who].difference
        assert found
        assert (found.step, found.tensor) == (at, tensor)
