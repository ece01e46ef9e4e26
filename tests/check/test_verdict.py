"""Whom the judge blames, and when it blames nobody."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.check.golden import Golden, Known, digest
from lockstep.check.golden import key as golden_key
from lockstep.check.outcome import CardVerdict, Judgement, Status
from lockstep.check.records import CHAIN, Card, Replica, Work, Workload
from lockstep.check.verdict import judge
from lockstep.health.records import Stamp

TENSORS = ("gradients:a", "gradients:b", "weights:a", "weights:b", "moments:exp_avg.a")
STEPS = 12
VERSIONS = {"torch": "2.11.0", "cuda": "12.8"}
PASS, FAIL, UNDECIDED = Status.PASS, Status.FAIL, Status.UNDECIDED


def stamp(step: int, *, wrong: str = "", salt: int = 0, loss: str = "", seconds: float = 0.1) -> Stamp:
    """One step; `wrong`: the first tensor with other bits, and those after it; "loss": only the loss differs."""
    differs = False
    sums = ""
    for place, name in enumerate(TENSORS):
        differs = differs or name == wrong
        sums += f"{(step + 1) * 1000 + place + (1 + salt if differs else 0) * 7919:032x}"
    told = loss or (1.0 / (step + 1) + (salt + 1 if wrong == "loss" else 0)).hex()
    return Stamp(step, told, (0.5).hex(), sums, seconds)


def work(name: str = "production", *, wrong_at: int | None = None, tensor: str = "weights:b", **more: object) -> Work:
    salt, steps = int(str(more.pop("salt", 0))), int(str(more.pop("steps", STEPS)))
    stamps = tuple(
        stamp(step, wrong="" if wrong_at is None or step < wrong_at else tensor if step == wrong_at else TENSORS[0],
              salt=salt)
        for step in range(steps)
    )  # fmt: skip
    whole = Work(name, TENSORS, ((2, 3),) * len(TENSORS), ("float32",) * len(TENSORS), stamps, complete=True)
    return dataclasses.replace(whole, **more)  # type: ignore[arg-type] - fields by name


def card(index: int, **more: object) -> Card:
    told = {"uuid": f"GPU-{index}", "model": "H200", "driver": "570"} | more
    return Card(index, int(str(told.pop("slot", index))), **told)  # type: ignore[arg-type] - fields by name


def replica(index: int, *works: Work, **more: object) -> Replica:
    own = Replica(card(index), works or (work(),), VERSIONS, exit_code=0)
    return dataclasses.replace(own, **more)  # type: ignore[arg-type] - fields by name


def statuses(judgement: Judgement) -> list[Status]:
    return [verdict.status for verdict in judgement.verdicts]


def said(verdict: CardVerdict) -> str:
    return "; ".join(verdict.reasons)


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


# -- numbers that are none, bounds, several workloads ---------------------------------------------------------------


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


def probe(value: float | None) -> Work:
    return work("probe", facts={"bounds": {"dq deviation": [value, 0.25]}})


@pytest.mark.parametrize("value", [0.3, None, float("inf")])
def test_a_probe_beyond_its_bound_fails_the_card(value: float | None) -> None:
    judgement = judge([replica(0, probe(0.2)), replica(1, probe(0.25)), replica(2, probe(value))])
    assert statuses(judgement) == [PASS, PASS, FAIL]
    assert "dq deviation is" in said(judgement.verdicts[2])
    assert statuses(judge([replica(index, probe(value)) for index in range(2)])) == [UNDECIDED] * 2


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


def swapped(index: int, slot: int, *, wrong: bool) -> Replica:
    return replica(index, work(steps=5, wrong_at=4 if wrong else None), card=card(index, slot=slot))


@pytest.mark.parametrize(
    ("with_gpu", "with_slot", "follows"),
    [(True, False, "GPU"), (False, True, "slot"), (True, True, ""), (False, False, "")],
)
def test_a_swap_tells_the_card_from_its_slot(with_gpu: bool, with_slot: bool, follows: str) -> None:
    runs = [replica(0), replica(1, work(wrong_at=4)), replica(2)]
    reruns = [
        replica(1, work(steps=5, wrong_at=4)),
        swapped(1, 2, wrong=with_gpu),
        swapped(2, 1, wrong=with_slot),
    ]
    judgement = judge(runs, reruns=reruns)
    assert statuses(judgement) == [PASS, FAIL, PASS]  # a card that is wrong in a bad slot is not blamed for it
    assert judgement.verdicts[1].difference
    assert judgement.verdicts[1].difference.follows == follows


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


def health(before: dict[str, object], after: dict[str, object], *samples: dict[str, object]) -> CardVerdict:
    return judge([replica(0, before=before, after=after, samples=samples), replica(1)]).verdicts[0]


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


def test_a_new_xid_fails_the_card_and_an_old_one_does_not() -> None:
    verdict = health({"xid": [31]}, {"xid": [31, 79]})
    assert verdict.reasons == ("the driver reported Xid 79",)
    assert health({"xid": [31]}, {"xid": [31]}).status is PASS


def test_heat_fails_the_card_and_a_power_limit_is_a_note() -> None:
    hot = health({"slowdown_c": 90, "temperature_c": 40}, {"temperature_c": 60}, {"temperature_c": 91})
    assert hot.reasons == ("hot: 91 °C, and it slows down at 90 °C",)
    assert health({"slowdown_c": 90}, {}, {"temperature_c": 89}).status is PASS
    assert health({}, {}, {"throttle": ["power_cap"]}, {"throttle": ["hw_thermal"]}).status is FAIL
    capped = health({}, {}, {"throttle": ["power_cap"]})
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
