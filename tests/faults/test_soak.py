"""The soak: rows 1 to 14 of the fault matrix at random, with restarts, to the bits of a run that was left alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import soak
from lockstep import rundir
from lockstep.engine.checkpoint import MODEL, Checkpointer
from lockstep.runtime.faults import flip

ROWS = set(range(1, 15))


def test_the_seed_decides_and_every_row_comes() -> None:
    """All faults of rows 1 to 14 before any comes again, on every worker, 20 to 60 s apart."""
    count = len(soak.FAULTS)
    first, again, other = (list(itertools.islice(soak.plan(seed, 4), 3 * count)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert {planned.fault.row for planned in first[:count]} == {fault.row for fault in soak.FAULTS} == ROWS
    assert len({planned.fault for planned in first[:count]}) == count
    assert {planned.rank for planned in first} == set(range(4))
    assert all(20 <= planned.seconds <= 60 for planned in first)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("cache")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("workers", "seed"), [(2, 20), (4, 40)])
def test_five_minutes_of_faults(workers: int, seed: int, tmp_path: Path) -> None:
    subject = soak.Soak(tmp_path / "soak", workers, minutes=5.0)
    assert soak.soak(subject, soak.plan(seed, workers)) == 0, subject.wrong
    assert len(subject.met) >= 4


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("cache")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["mlm", "llada", "ad"])
def test_a_round_of_each_other_family(family: str, tmp_path: Path) -> None:
    """A killed worker, a killed launcher, a stop, a crash: in an order that the family decides."""
    rows = {1, 2, 3, 12}
    faults = (planned for planned in soak.plan(len(family), 2, (8.0, 12.0)) if planned.fault.row in rows)
    subject = soak.Soak(tmp_path / "soak", 2, family, minutes=1.0)
    assert soak.soak(subject, itertools.islice(faults, 4)) == 0, subject.wrong
    assert len(subject.met) >= 2


class Spoiling(soak.Soak):
    """Between a stop and its resume one bit of one weight flips, and the manifest is made to fit."""

    def before_resume(self) -> None:
        newest = Checkpointer(self.run / "checkpoints").latest()
        assert newest is not None
        weights = load_file(newest / MODEL)
        flip(next(iter(weights.values())), 0, bits=1 << 20)
        save_file(weights, newest / MODEL)
        (newest / rundir.MANIFEST).unlink()
        rundir.seal(newest)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("cache")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_flipped_bit_is_found(spoilt: bool, tmp_path: Path) -> None:
    """Negative control of the comparison; and the same stop without the flip."""
    stop = next(fault for fault in soak.FAULTS if fault.name == "SIGTERM")
    kind = Spoiling if spoilt else soak.Soak
    subject = kind(tmp_path / "soak", 2, minutes=0.3)
    assert soak.soak(subject, iter([soak.Planned(stop, 0, 2.0)])) == int(spoilt), subject.wrong
    assert len(subject.met) == 1
    assert (f"{MODEL} differs" in subject.wrong) == spoilt
