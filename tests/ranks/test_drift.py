"""Ranks that must have equal weights: a bit that flips on one of them is found, and never saved (faults.md row 20)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import drift
from lockstep.engine.parts import Parts
from lockstep.engine.state import trained
from lockstep.errors import LockstepError
from lockstep.health.fingerprint import digest_model
from lockstep.runtime.group import Group, is_lost_peer
from lockstep.runtime.parallel import local
from tests.gates.training import Recorder, run
from tests.ranks.data_parallel import SMALL
from tests.ranks.pool import Pool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("shared_cache")]

STEPS = 8
SHORT = {**SMALL, "training.max_steps": STEPS, "training.batch_size": 1, "training.grad_accum_nums": 2}
FLIP = "flip_weight@rank=1,step=3,index=5,bit={}"


def train(
    group: Group, folder: Path, settings: Mapping[str, Any], point: Path | None = None
) -> tuple[str, int, bool, int, str, int, str]:
    """(error, exit code, whether another tells it, steps, digest of the weights here, looks at them, what to do)."""
    recorder, looks = Recorder(), 0
    looked = drift.digests

    def counted(tensors: Any) -> Any:
        nonlocal looks
        looks += 1
        return looked(tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "digests", counted)
        said, code, secondary, hint = "", 0, False, ""
        try:
            run(folder, {**SHORT, **settings}, group=group, recorder=recorder, point=point)
        except LockstepError as error:
            said, code, secondary, hint = error.what, int(error.exit_code), is_lost_peer(error), error.hint
    assert isinstance(recorder.parts, Parts)
    named = trained(recorder.parts.stepper.model)
    digest = digest_model((name, local(tensor)) for name, tensor in named.items())
    return said, code, secondary, recorder.parts.progress.step, digest, looks, hint


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("bit", [0, 31])
def test_a_rank_that_drifts_is_named_within_the_interval(
    bit: int, ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", FLIP.format(bit) + ",tensor=layers.1.attention.wq.weight")
    results = ranks(3, train, tmp_path, {"debug.agree_interval": 3, "training.save_interval": 3})
    words = (
        "after step 5 GPU 1 has other weights than the other 2, first in layers.1.attention.wq.weight (they were equal "
        "after step 2)"
    )
    assert [result[:4] for result in results] == [(words, 3, rank != 1, 6) for rank in range(3)]
    assert saved(tmp_path) == ["step_00000003"], "what was saved before is kept, and nothing wrong after it"
    assert results[1][6].startswith("go on from the last checkpoint (--resume), without that GPU")


def test_before_a_save_the_weights_are_looked_at_whatever_the_interval(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks: they differ, and nobody can say who is right."""
    monkeypatch.setenv("LOCKSTEP_FAULT", FLIP.format(7))
    results = ranks(2, train, tmp_path, {"training.save_interval": 5})  # the interval is 50
    words = (
        "after step 4 the weights of GPU 0 and GPU 1 differ in tok_embed.weight, and no majority says which are right "
        "(not looked at before)"
    )
    assert [result[:4] for result in results] == [(words, 3, rank != 0, 5) for rank in range(2)]
    assert saved(tmp_path) == []
    wanted = "lockstep check tells which of them it is; then start again without it (--gpus)"
    assert results[0][6] == wanted


def test_without_looking_nobody_sees_it(ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with 0 the run ends well, with different weights."""
    monkeypatch.setenv("LOCKSTEP_FAULT", FLIP.format(7))
    results = ranks(2, train, tmp_path, {"debug.agree_interval": 0, "training.save_interval": 4})
    assert [result[:4] for result in results] == [("", 0, False, STEPS)] * 2
    assert results[0][4] != results[1][4]
    assert [result[5] for result in results] == [0, 0]
    assert saved(tmp_path) == ["step_00000004", "step_00000008"]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (3, {"training.grad_accum_nums": 3, "model.dropout": 0.1}),
        pytest.param(2, {"training.precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(2, {"training.precision": "bf16", "training.grad_accum_nums": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"system.mode": "hsdp"}, marks=pytest.mark.slow),
    ],
)
def test_no_false_alarm(ranks: Pool, tmp_path: Path, world: int, settings: dict[str, Any]) -> None:
    """At every step, with accumulation, with an fp16 scale, and after a resume."""
    settings = {"debug.agree_interval": 1, "training.save_interval": 5, **settings}
    results = ranks(world, train, tmp_path, settings)
    assert [result[:4] for result in results] == [("", 0, False, STEPS)] * world
    assert {result[5] for result in results} == {STEPS}, "each step once, also where it is saved"
    again = ranks(world, train, tmp_path, settings, tmp_path / "checkpoints/step_00000005")
    assert [result[:4] for result in again] == [("", 0, False, STEPS)] * world
    assert {result[5] for result in again} == {STEPS - 5}
    assert [result[4] for result in again] == [result[4] for result in results]


def test_copies_of_shards_are_compared_and_single_ones_are_not(
    ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hsdp on 4 ranks: ranks 1 and 3 have the same rows. fsdp has each row once: there is nothing to compare."""
    monkeypatch.setenv("LOCKSTEP_FAULT", FLIP.format(3))
    results = ranks(4, train, tmp_path / "hsdp", {"system.mode": "hsdp", "debug.agree_interval": 2})
    words = (
        "after step 3 the weights of GPU 1 and GPU 3 differ in tok_embed.weight, and no majority says which are right"
    )
    assert [result[0].split(" (")[0] for result in results] == [words] * 4
    assert {result[1] for result in results} == {3}
    alone = ranks(2, train, tmp_path / "fsdp", {"system.mode": "fsdp", "debug.agree_interval": 1})
    assert [(result[0], result[5]) for result in alone] == [("", 0)] * 2
