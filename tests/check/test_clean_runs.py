"""No false alarm: real replicas that nothing has happened to are never called wrong. All 1,000 runs with --full."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lockstep.check.outcome import Status
from lockstep.check.records import Replica
from lockstep.check.verdict import judge
from tests.check import tiny

CARDS = 4
SEEDS = 10  # slices of the thousand, each with weights and rows of its own
GROUPS = 25  # of four replicas in a slice


def replicas(folder: Path, *, seed: int, fault: str = "") -> list[Replica]:
    workload = dataclasses.replace(tiny.LLAMA, steps=3, settings={**tiny.SMALL, "system.seed": seed})
    return [tiny.done(folder / str(card), workload, card=card, fault=fault) for card in range(CARDS)]


def test_clean_replicas_pass_and_one_flipped_bit_does_not(tmp_path: Path) -> None:
    judgement = judge(replicas(tmp_path, seed=1))
    assert judgement.passed, [verdict.reasons for verdict in judgement.verdicts]
    fault = f"flip_grad@rank=2,step=1,tensor={tiny.GRADIENT},index=7,bit=0"  # the control: the judge can say no
    judgement = judge(replicas(tmp_path, seed=1, fault=fault))
    assert [verdict.status is Status.FAIL for verdict in judgement.verdicts] == [False, False, True, False]
    first = judgement.verdicts[2].difference
    assert first
    assert (first.step, first.tensor) == (1, f"gradients:{tiny.GRADIENT}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_hundred_clean_runs_raise_no_alarm(tmp_path: Path, seed: int) -> None:
    for group in range(GROUPS):
        judgement = judge(replicas(tmp_path / str(group), seed=seed))
        assert judgement.passed, [verdict.reasons for verdict in judgement.verdicts]
