"""Whom the judge blames, and when it blames nobody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.check.records import CHAIN, Replica, Work, Workload
from lockstep.check.verdict import judge
from tests.check.runs import FAIL, PASS, STEPS, TENSORS, UNDECIDED, card, replica, said, stamp, statuses, work


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_cards_that_agree_pass(count: int) -> None:
    judgement = judge([replica(index) for index in range(count)])
    assert statuses(judgement) == [PASS] * count
    assert judgement.passed
    assert not any(verdict.reasons or verdict.notes for verdict in judgement.verdicts)
    assert set(judgement.agreement["production"].values()) == {"." * STEPS}
    assert len(judgement.agreement["production"]) == count


@pytest.mark.parametrize("count", [3, 4, 5, 64])
@pytest.mark.parametrize("tensor", [*TENSORS, "loss"])
def test_the_one_that_differs_is_named_with_step_and_tensor(count: int, tensor: str) -> None:
    judgement = judge(
        [replica(index, work(wrong_at=4 if index == 1 else None, tensor=tensor)) for index in range(count)]
    )
    assert statuses(judgement) == [FAIL if index == 1 else PASS for index in range(count)]
    wrong = judgement.verdicts[1]
    assert wrong.difference
    assert (wrong.difference.workload, wrong.difference.step, wrong.difference.tensor) == ("production", 4, tensor)
    assert said(wrong) == f"production: other bits than {count - 1} of {count} cards from step 4 on, first in {tensor}"
    assert judgement.agreement["production"]["GPU 1"] == "...." + "x" * 8


def test_two_that_differ_are_both_undecided() -> None:
    judgement = judge([replica(0), replica(1, work(wrong_at=7))])
    assert statuses(judgement) == [UNDECIDED] * 2
    assert "GPU 0, GPU 1 have different bits, and no majority" in said(judgement.verdicts[0])
    assert all(verdict.difference and verdict.difference.step == 7 for verdict in judgement.verdicts)
    assert judgement.agreement["production"] == dict.fromkeys(("GPU 0", "GPU 1"), "." * 7 + "?" * 5)


def test_two_alike_of_four_are_a_tie_and_nobody_is_blamed() -> None:
    judgement = judge([replica(index, work(wrong_at=3 if index > 1 else None)) for index in range(4)])
    assert statuses(judgement) == [UNDECIDED] * 4


@pytest.mark.parametrize("count", [4, 5, 9])
def test_the_largest_group_is_not_enough_it_must_be_more_than_half(count: int) -> None:
    """Two agree, and all others differ each in its own way: the two may as well be wrong alike."""
    group = [replica(0), replica(1), *(replica(index, work(wrong_at=4, salt=index)) for index in range(2, count))]
    assert statuses(judge(group)) == [UNDECIDED] * count


def test_three_that_all_differ_are_undecided() -> None:
    works = [work(), work(wrong_at=3), work(wrong_at=3, salt=1)]
    assert statuses(judge([replica(index, each) for index, each in enumerate(works)])) == [UNDECIDED] * 3


def test_two_faulty_cards_at_different_steps_are_both_named() -> None:
    works = [work(), work(wrong_at=2), work(), work(wrong_at=9, tensor="gradients:b"), work()]
    judgement = judge([replica(index, each) for index, each in enumerate(works)])
    assert statuses(judgement) == [PASS, FAIL, PASS, FAIL, PASS]
    steps = [verdict.difference.step for verdict in judgement.verdicts if verdict.difference]
    assert steps == [2, 9]


def test_a_majority_that_falls_apart_later_is_undecided_from_there() -> None:
    works = [work(), work(wrong_at=8), work(wrong_at=2, salt=3)]
    judgement = judge([replica(index, each) for index, each in enumerate(works)])
    assert statuses(judgement) == [UNDECIDED, UNDECIDED, FAIL]
    assert judgement.agreement["production"]["GPU 0"] == "." * 8 + "?" * 4
    assert judgement.agreement["production"]["GPU 2"] == ".." + "x" * 10


def test_an_outvoted_card_has_no_vote_later() -> None:
    """Cards 3 and 4 went wrong alike at steps 1 and 1; afterwards they must not outvote the rest."""
    works = [work(), work(), work(), work(wrong_at=1), work(wrong_at=1), work(wrong_at=6, salt=5)]
    judgement = judge([replica(index, each) for index, each in enumerate(works)])
    assert statuses(judgement) == [PASS, PASS, PASS, FAIL, FAIL, FAIL]


def test_one_card_passes_only_if_it_repeats_its_bits() -> None:
    assert statuses(judge([replica(0)])) == [UNDECIDED]
    assert statuses(judge([replica(0), replica(0)])) == [PASS]
    twice = judge([replica(0), replica(0, work(wrong_at=5))])
    assert statuses(twice) == [UNDECIDED]
    assert "its own runs have different bits" in said(twice.verdicts[0])
    assert twice.verdicts[0].difference


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_third_run_of_one_card_tells_which_run_was_wrong(wrong: int) -> None:
    runs = [replica(0, work(wrong_at=5 if place == wrong else None)) for place in range(2)]
    judgement = judge(runs, reruns=[replica(0, work(steps=6))])
    assert statuses(judgement) == [FAIL]
    assert "other bits than 2 of 3 runs from step 5 on" in said(judgement.verdicts[0])
    assert len(judgement.verdicts[0].reasons) == 1


def test_processes_that_share_one_card_are_told_apart() -> None:
    runs = [replica(0, work(wrong_at=4 if slot == 2 else None), card=card(0, slot=slot)) for slot in range(4)]
    judgement = judge(runs)
    assert statuses(judgement) == [PASS, PASS, FAIL, PASS]
    assert judgement.agreement["production"]["GPU 0 (slot 2)"].endswith("x")


def test_nodes_are_named() -> None:
    cards = [card(0, node=node, host=f"host{node}", uuid=f"GPU-{node}") for node in range(3)]
    runs = [replica(0, work(wrong_at=4 if own.node == 2 else None), card=own) for own in cards]
    judgement = judge(runs)
    assert statuses(judgement) == [PASS, PASS, FAIL]
    assert "host2 GPU 0" in judgement.agreement["production"]


# -- records that are damaged, short or foreign -------------------------------------------------------------------


@pytest.mark.parametrize("damage", [(5,), (CHAIN,)])
def test_a_damaged_record_blames_no_card(damage: tuple[int, ...]) -> None:
    broken = work(wrong_at=4, damaged=damage)
    judgement = judge([replica(0), replica(1, broken), replica(2)])
    assert statuses(judgement) == [PASS, UNDECIDED, PASS]
    assert "its record is damaged" in said(judgement.verdicts[1])
    assert judgement.verdicts[1].difference is None
    assert judgement.agreement["production"]["GPU 1"] == "?" * STEPS
    assert statuses(judge([replica(0), replica(1, work(wrong_at=4)), replica(2)])) == [PASS, FAIL, PASS]  # control


def test_a_record_whose_beginning_is_damaged_blames_no_card() -> None:
    judgement = judge([replica(0), replica(1), replica(2, Work("?", damaged=(0,)))])
    assert statuses(judgement) == [PASS, PASS, UNDECIDED]
    assert "?" not in judgement.agreement


def test_a_card_whose_process_died_fails_and_the_others_go_on() -> None:
    short = work(steps=5, complete=False)
    judgement = judge([replica(0), replica(1, short, error="killed by SIGKILL", exit_code=-9), replica(2)])
    assert statuses(judgement) == [PASS, FAIL, PASS]
    assert said(judgement.verdicts[1]) == "production: ended after step 4: killed by SIGKILL"
    assert judgement.agreement["production"]["GPU 1"] == "....." + "-" * 7


def test_a_process_that_died_before_its_first_record_fails() -> None:
    judgement = judge([replica(0), replica(1), replica(2, error="hangs", works=())], workloads=[Workload("production")])
    assert statuses(judgement) == [PASS, PASS, FAIL]
    assert said(judgement.verdicts[2]) == "did not finish: hangs"
    assert judgement.agreement["production"]["GPU 2"] == "-" * STEPS


def test_a_process_that_died_after_its_work_fails_too() -> None:
    judgement = judge([replica(0), replica(1, error="segmentation fault")])
    assert statuses(judgement) == [PASS, FAIL]


def test_steps_that_only_one_card_reached_are_not_called_right() -> None:
    judgement = judge([replica(0), replica(1, work(steps=5, complete=False, error="out of memory"))])
    assert statuses(judgement) == [UNDECIDED, FAIL]
    assert "from step 5 on nothing to compare it with" in said(judgement.verdicts[0])


def test_an_error_of_every_card_alike_blames_none() -> None:
    failed = [work(steps=0, complete=False, error=f"needs {index} more MiB") for index in range(3)]
    judgement = judge([replica(index, each) for index, each in enumerate(failed)])
    assert statuses(judgement) == [UNDECIDED] * 3
    assert "on every card alike" in said(judgement.verdicts[0])
    other = [*failed[:2], work(steps=0, complete=False, error="CUDA error")]
    assert statuses(judge([replica(index, each) for index, each in enumerate(other)])) == [FAIL] * 3


def test_a_record_without_a_step_that_others_have_is_undecided() -> None:
    whole = work()
    gap = dataclasses.replace(whole, stamps=whole.stamps[:3] + whole.stamps[4:])
    judgement = judge([replica(0), replica(1, gap), replica(2)])
    assert statuses(judgement) == [PASS, UNDECIDED, PASS]
    assert "lacks step 3" in said(judgement.verdicts[1])


@pytest.mark.parametrize("other", [{"tensors": (*TENSORS[:-1], "moments:x")}, {"shapes": ((9,),) * 5},
                                   {"dtypes": ("bfloat16",) * 5}, {"facts": {"data": "rows2"}}])  # fmt: skip
def test_other_software_is_said_and_not_blamed_on_a_card(other: dict[str, Any]) -> None:
    judgement = judge([replica(0), replica(1), replica(2, work(wrong_at=2, **other))])
    assert statuses(judgement) == [PASS, PASS, UNDECIDED]
    assert "not the same software" in said(judgement.verdicts[2])
    assert statuses(judge([replica(0), replica(1, work(**other))])) == [UNDECIDED] * 2


def test_a_skipped_workload_is_a_note() -> None:
    skipped = Work("fp8", facts={"skipped": "the card has no fp8"}, complete=True)
    judgement = judge([replica(index, work(), skipped) for index in range(2)])
    assert statuses(judgement) == [PASS] * 2
    assert judgement.verdicts[0].notes == ("fp8: not run here: the card has no fp8",)


def test_no_fingerprints_at_all_is_no_pass() -> None:
    assert statuses(judge([replica(index, work(steps=0)) for index in range(3)])) == [UNDECIDED] * 3


# -- kinds of cards ---------------------------------------------------------------------------------------------


def of_kind(index: int, driver: str, *works: Work) -> Replica:
    return replica(index, *works, card=card(index, driver=driver))


def test_cards_of_different_kinds_are_compared_with_their_own() -> None:
    """Two drivers, other bits in each: nothing is wrong. In the second group one card differs."""
    mixed = [of_kind(index, "570") for index in range(3)]
    mixed += [of_kind(index, "580", work(wrong_at=0)) for index in range(3, 6)]
    judgement = judge(mixed)
    assert statuses(judgement) == [PASS] * 6
    assert "this one is H200, driver 580, torch 2.11.0; compared with GPU 3, GPU 5" in judgement.verdicts[4].notes[0]
    mixed[4] = of_kind(4, "580", work(wrong_at=0, salt=7))
    assert statuses(judge(mixed)) == [PASS] * 4 + [FAIL] + [PASS]


def test_the_only_card_of_its_kind_passes_if_its_bits_are_those_of_the_others() -> None:
    assert statuses(judge([of_kind(0, "570"), of_kind(1, "570"), of_kind(2, "580")])) == [PASS] * 3
    apart = judge([of_kind(0, "570"), of_kind(1, "570"), of_kind(2, "580", work(wrong_at=6))])
    assert statuses(apart) == [PASS, PASS, UNDECIDED]
    assert "no other card is of its kind" in apart.verdicts[2].notes[0]
    assert "from step 6 on nothing to compare" in said(apart.verdicts[2])


# -- numbers that are none, several workloads -----------------------------------------------------------------------


def nan_from(step: int) -> Work:
    whole = work()
    stamps = tuple(stamp(each.step, loss="nan") if each.step >= step else each for each in whole.stamps)
    return dataclasses.replace(whole, stamps=stamps)


def test_a_loss_that_is_no_number_on_one_card_is_its_fault_and_on_all_is_nobodys() -> None:
    judgement = judge([replica(0), replica(1, nan_from(3)), replica(2)])
    assert statuses(judgement) == [PASS, FAIL, PASS]
    assert "its loss is no number" in said(judgement.verdicts[1])
    everywhere = judge([replica(index, nan_from(3)) for index in range(3)])
    assert statuses(everywhere) == [UNDECIDED] * 3
    assert "not this card's fault" in said(everywhere.verdicts[0])


def test_each_workload_is_voted_on_by_itself() -> None:
    runs = [
        replica(0, work("a"), work("b")),
        replica(1, work("a", wrong_at=9), work("b", wrong_at=1)),
        replica(2, work("a"), work("b")),
        replica(3, work("a"), work("b", wrong_at=2, tensor="gradients:b", salt=4)),
    ]
    judgement = judge(runs)
    assert statuses(judgement) == [PASS, FAIL, PASS, FAIL]
    first, second = judgement.verdicts[1].difference, judgement.verdicts[3].difference
    assert first
    assert second
    assert (first.workload, first.step) == ("a", 9)
    assert (second.workload, second.step, second.tensor) == ("b", 2, "gradients:b")
    assert len(judgement.verdicts[1].reasons) == 2
    assert set(judgement.agreement) == {"a", "b"}
