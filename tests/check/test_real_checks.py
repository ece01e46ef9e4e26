"""Whole checks with the real replica: what a fault is, and where it is. Long: with --full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.check import conduct, replica, schema
from lockstep.check.crew import Crew, Ending, Task
from lockstep.runtime import faults
from tests.check.tiny import GRADIENT, WEIGHT

pytestmark = pytest.mark.slow
FLIP = f"flip_grad@step=5,tensor={GRADIENT},index=131"
PLACE = {"step": 5, "tensor": f"gradients:{GRADIENT}", "elements": 1, "positions": [[0, 131]]}


class OneByOne(Crew):
    """Lets the real replicas run one after the other in this process, with one start of torch for all."""

    def run(self, tasks: Sequence[Task], **_: Any) -> list[Ending]:
        return [Ending(self._run_here(task)) for task in tasks]

    def _run_here(self, task: Task) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(faults.REPLICA, task.environ[faults.REPLICA])
            return replica.main(task.command[3:])


def check(fault: str, *, code: int, gpus: str = "3", slow: str = "100") -> dict[str, Any]:
    words = ["--device", "cpu", "--quick", "--workload", "llama", "--name", "run", "--slow", slow, "--gpus", gpus]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_FAULT", fault)
        assert cli.main(["check", *words]) == code
    return schema.read(Path("runs/run/check.json")).model_dump(mode="json")


@pytest.mark.parametrize(
    ("fault", "nature"),
    [
        (f"{FLIP},bit=4,rank=1,round=0", "transient"),
        (f"{FLIP},bit=4,rank=1", "persistent"),
        (f"{FLIP},bit=4,rank=1,round=0;{FLIP},bit=9,rank=1,round=2", "intermittent"),
    ],
)
def test_the_nature_of_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, nature: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conduct, "Crew", OneByOne)
    told = check(fault, code=3)
    assert [card["status"] for card in told["gpus"]] == ["PASS", "FAIL", "PASS"]
    first = told["gpus"][1]["difference"]
    assert {name: first[name] for name in PLACE} == PLACE
    assert first["nature"] == nature
    assert int(first["right"][0], 16) ^ int(first["wrong"][0], 16) == 1 << 4


WRONG_WEIGHT = f"flip_weight@step=7,tensor={WEIGHT},index=3,bit=30"


@pytest.mark.parametrize(
    ("fault", "code", "statuses"),
    [
        ("", 0, ["PASS"] * 4),
        (f"{WRONG_WEIGHT},rank=2;{WRONG_WEIGHT},rank=3", 3, ["UNDECIDED"] * 4),
        (f"{WRONG_WEIGHT},rank=0", 3, ["FAIL", "PASS", "PASS", "PASS"]),
    ],
)
def test_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, code: int, statuses: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = check(fault, code=code, gpus="4")
    assert [card["status"] for card in told["gpus"]] == statuses
    first = told["gpus"][0]["difference"]
    assert (first and (first["step"], first["tensor"])) == ((7, f"weights:{WEIGHT}") if fault else None)


def test_a_worker_that_is_three_times_as_slow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 165, with the steps of real replicas; the threshold is the user's."""
    monkeypatch.chdir(tmp_path)
    fault = "slow@rank=1,where=loader,factor=3"
    told = check(fault, code=3, slow="1.5")
    assert [card["status"] for card in told["gpus"]] == ["PASS", "FAIL", "PASS"]
    assert told["gpus"][1]["reasons"][0].startswith("slow in llama: its median step is ")
    (tmp_path / "runs/run").rename(tmp_path / "runs/first")
    assert [card["status"] for card in check(fault, code=0, slow="5")["gpus"]] == ["PASS"] * 3
