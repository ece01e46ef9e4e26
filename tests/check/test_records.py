"""What is read back of a record: what was damaged on its way is said to be, and blames nobody."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lockstep.check.records import CHAIN, Card, Replica, read
from lockstep.check.verdict import judge
from lockstep.health.records import Stamp, chain_of, checksum, line

STAMPS = [Stamp(step, (1.0).hex(), (2.0).hex(), f"{step + 7:032x}{step + 9:032x}", 0.1) for step in range(4)]


def write(path: Path, stamps: list[Stamp], *, chain: str) -> None:
    about = {"tensors": ["gradients:a", "weights:a"], "shapes": [[2], [2]], "dtypes": ["float32"] * 2}
    lines = [line("about", versions={"torch": "2"}), line("workload", workload="llama", facts={}, **about)]
    lines += [line("step", **vars(stamp)) for stamp in stamps]
    path.write_text("".join(f"{each}\n" for each in [*lines, line("done", facts={}, chain=chain)]))


def told(folder: Path, index: int) -> Replica:
    return read(folder / str(index), Card(index, index))


def three(folder: Path) -> list[Replica]:
    for index in range(3):
        if not (folder / str(index)).exists():
            write(folder / str(index), STAMPS, chain=chain_of(STAMPS))
    return [told(folder, index) for index in range(3)]


def test_whole_records_agree(tmp_path: Path) -> None:
    assert [replica.works[0].damaged for replica in three(tmp_path)] == [()] * 3
    assert judge(three(tmp_path)).passed


@pytest.mark.parametrize("line_number", range(1, 7))
def test_a_flipped_byte_in_any_line_blames_no_card(tmp_path: Path, line_number: int) -> None:
    three(tmp_path)
    lines = (tmp_path / "1").read_bytes().splitlines(keepends=True)
    place = len(lines[line_number]) // 2
    spoilt = bytearray(lines[line_number])
    spoilt[place] ^= 1
    (tmp_path / "1").write_bytes(b"".join([*lines[:line_number], bytes(spoilt), *lines[line_number + 1 :]]))
    judgement = judge(three(tmp_path))
    assert [str(verdict.status) for verdict in judgement.verdicts] == ["PASS", "UNDECIDED", "PASS"]
    assert "damaged" in judgement.verdicts[1].reasons[0]


def test_a_record_cut_short_of_a_process_that_ended_well_blames_no_card(tmp_path: Path) -> None:
    """Lost with its file, or the newline of the last line flipped: whoever ended with code 0 had told all of it."""
    three(tmp_path)
    whole = (tmp_path / "1").read_bytes()
    for kept in (whole[:-1], whole[: len(whole) // 2], b""):
        (tmp_path / "1").write_bytes(kept)
        for code, status in ((0, "UNDECIDED"), (-9, "FAIL")):  # the control: killed
            error = "" if code == 0 else "killed by SIGKILL"
            replicas = [dataclasses.replace(each, exit_code=0) for each in three(tmp_path)]
            replicas[1] = dataclasses.replace(replicas[1], exit_code=code, error=error)
            judgement = judge(replicas)
            assert [str(verdict.status) for verdict in judgement.verdicts] == ["PASS", status, "PASS"]
            assert not any("not all alike" in note for verdict in judgement.verdicts for note in verdict.notes)


@pytest.mark.parametrize(
    "strange",
    [
        line("step", step=1, colour="red"),
        line("step", step="one"),
        line("step", step=1, loss="high"),
        line("step", step=1, sums="zz" * 32),
        line("step", step=1, sums="0" * 33),
        line("workload", tensors=["weights:a"]),
        line("workload", workload="llama", shapes=[["two"]]),
        line("done", surprise=1),
        line("about", driver=1),
        json.dumps({"sum": checksum('{"a": 1}'), "line": '{"a": 1}'}),
    ],
)
def test_whole_lines_that_no_replica_writes_are_damage_and_cost_nobody_else(tmp_path: Path, strange: str) -> None:
    three(tmp_path)
    lines = (tmp_path / "1").read_text().splitlines()
    (tmp_path / "1").write_text("\n".join([*lines[:3], strange, *lines[3:]]) + "\n")
    assert 3 in told(tmp_path, 1).works[0].damaged
    assert [str(verdict.status) for verdict in judge(three(tmp_path)).verdicts] == ["PASS", "UNDECIDED", "PASS"]


def test_a_record_that_cannot_be_read_blames_no_card(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert [str(verdict.status) for verdict in judge(three(tmp_path)).verdicts] == ["PASS", "UNDECIDED", "PASS"]


def test_a_copy_that_was_spoilt_before_it_was_written_blames_no_card(tmp_path: Path) -> None:
    """The lines are whole, but the card itself has added up other sums."""
    spoilt = [*STAMPS[:2], Stamp(2, STAMPS[2].loss, STAMPS[2].norm, "f" * 64, 0.1), *STAMPS[3:]]
    write(tmp_path / "1", spoilt, chain=chain_of(STAMPS))
    judgement = judge(three(tmp_path))
    assert told(tmp_path, 1).works[0].damaged == (CHAIN,)
    assert [str(verdict.status) for verdict in judgement.verdicts] == ["PASS", "UNDECIDED", "PASS"]
    write(tmp_path / "1", spoilt, chain=chain_of(spoilt))  # the control: so the card itself was wrong
    assert [str(verdict.status) for verdict in judge(three(tmp_path)).verdicts] == ["PASS", "FAIL", "PASS"]
