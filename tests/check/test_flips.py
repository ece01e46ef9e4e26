"""Every bit of a weight and of a gradient, flipped in one of four real replicas: named by card, step, tensor, element.

The replicas train on the CPU in the test's own process. All 64 bits with --full, a few by default.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lockstep.check import locate, training
from lockstep.check.errand import Dump
from lockstep.check.outcome import Difference, Judgement
from lockstep.check.records import Card, Replica
from lockstep.check.verdict import judge
from lockstep.health.prints import as_hex
from tests.check import tiny
from tests.check.runs import FAIL, PASS, UNDECIDED, said, statuses

WORKLOAD = dataclasses.replace(tiny.LLAMA, steps=4)
STEP, ELEMENT, WRONG = 2, 131, 2
TENSORS = {"grad": f"gradients:{tiny.GRADIENT}", "weight": f"weights:{tiny.WEIGHT}"}
EVERY = [(kind, 1 << bit) for kind in TENSORS for bit in range(32)]
MASKS = [(kind, mask) for kind in TENSORS for mask in (0x3, 0x80000001, 0x00FF00FF, 0xFFFFFFFF)]
FEW = [("grad", 1), ("weight", 1 << 30), ("weight", 0x00FF00FF)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[Replica]:
    folder = tmp_path_factory.mktemp("healthy")
    return [tiny.done(folder / str(card), WORKLOAD, card=card) for card in range(4)]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a healthy card has in each tensor at the step, as a rerun keeps it."""
    return {kind: dump(tmp_path_factory.mktemp(kind), kind) for kind in TENSORS}


def dump(folder: Path, kind: str, fault: str = "") -> bytes:
    own = tiny.errand(folder, WORKLOAD, card=WRONG, until=STEP, dump=Dump("llama", STEP, TENSORS[kind]))
    tiny.run(own, fault)
    return locate.read_dump(own.dump_file)


def fault_of(kind: str, mask: int) -> str:
    name = TENSORS[kind].partition(":")[2]
    bits = [bit for bit in range(32) if mask >> bit & 1]
    return ";".join(f"flip_{kind}@rank={WRONG},step={STEP},tensor={name},index={ELEMENT},bit={bit}" for bit in bits)


def flipped(folder: Path, kind: str, mask: int) -> Replica:
    """The replica with the fault; a loss that is no number ends it, as it would on a card."""
    return tiny.run(tiny.errand(folder, WORKLOAD, card=WRONG), fault_of(kind, mask))[1]


def with_wrong(healthy: list[Replica], wrong: Replica) -> Judgement:
    return judge([*healthy[:WRONG], wrong, *healthy[WRONG + 1 :]], workloads=[WORKLOAD])


def named(judgement: Judgement, kind: str) -> Difference:
    """The first difference, after a look at who has it."""
    assert statuses(judgement) == [PASS, PASS, FAIL, PASS], [said(verdict) for verdict in judgement.verdicts]
    first = judgement.verdicts[WRONG].difference
    assert first
    assert (first.workload, first.step, first.tensor) == ("llama", STEP, TENSORS[kind])
    return first


def check_one(healthy: list[Replica], dumps: dict[str, bytes], folder: Path, kind: str, mask: int) -> None:
    wrong = flipped(folder, kind, mask)
    first = named(with_wrong(healthy, wrong), kind)
    works = [each.work("llama") for each in (healthy[0], wrong)]
    assert works[0]
    assert works[1]
    told = locate.describe(first, right=works[0], wrong=works[1], right_dump=dumps[kind])
    place = works[0].tensors.index(TENSORS[kind])
    assert (told.elements, told.positions) == (1, (locate.unravel(ELEMENT, works[0].shapes[place]),))
    right = int.from_bytes(dumps[kind][4 * ELEMENT : 4 * ELEMENT + 4], "little")
    assert (told.right, told.wrong) == ((f"0x{right:08x}",), (f"0x{right ^ mask:08x}",))


@pytest.mark.parametrize(("kind", "mask"), FEW)
def test_a_flipped_bit_is_named_and_located(
    healthy: list[Replica], dumps: dict[str, bytes], tmp_path: Path, kind: str, mask: int
) -> None:
    check_one(healthy, dumps, tmp_path, kind, mask)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mask"), EVERY + MASKS)
def test_every_bit_and_many_at_once(
    healthy: list[Replica], dumps: dict[str, bytes], tmp_path: Path, kind: str, mask: int
) -> None:
    check_one(healthy, dumps, tmp_path, kind, mask)


@pytest.mark.parametrize(("kind", "mask"), [("grad", 1), ("weight", 1 << 30)])
def test_two_of_four_corrupted_alike_are_undecided(
    healthy: list[Replica], tmp_path: Path, kind: str, mask: int
) -> None:
    """Even if they end with numbers that are none: that follows from the bits which nobody can judge."""
    wrong = flipped(tmp_path, kind, mask)
    assert wrong.works[0].complete == (kind == "grad")
    group = [healthy[0], healthy[1], wrong, dataclasses.replace(wrong, card=Card(3, 3))]
    assert statuses(judge(group, workloads=[WORKLOAD])) == [UNDECIDED] * 4
    assert statuses(judge(group[:3], workloads=[WORKLOAD])) == [PASS, PASS, FAIL], "the control: one alone is named"


def test_a_sum_that_flips_on_its_way_to_the_record_blames_no_card(
    healthy: list[Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host spoils its copy; the card itself has added up the right sums."""
    count = iter(range(WORKLOAD.steps + 1))  # a copy a step; the chain is told from elsewhere

    def spoilt(sums: list[list[int]]) -> str:
        return as_hex([[sums[0][0] ^ (1 << 17 if next(count) == STEP else 0), sums[0][1]], *sums[1:]])

    monkeypatch.setattr(training, "as_hex", spoilt)
    judgement = with_wrong(healthy, tiny.done(tmp_path, WORKLOAD, card=WRONG))
    assert statuses(judgement) == [PASS, PASS, UNDECIDED, PASS]
    assert "other sums than the card has added up" in said(judgement.verdicts[WRONG])
