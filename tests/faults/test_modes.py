"""Every mode as a user starts it: three and four workers, stopped, resumed, killed; replicas that agree or do not."""

from __future__ import annotations

import re
import signal
from functools import cache as once
from pathlib import Path

import pytest

from tests.faults import trainer
from tests.faults.test_trainer_signals import check_saved, check_stopped
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
PACE = "hang@seconds=0.1"
MODES = {"ddp": 3, "fsdp": 3, "hsdp": 4}
SEVERAL = [pytest.param(mode, id=mode) for mode in MODES]


def words_of(mode: str) -> tuple[str, ...]:
    return ("--mode", mode, "--gpus", str(MODES[mode]))


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory):
    """A mode -> the losses of a run that nothing happens to; each is run once."""

    @once
    def run(mode: str) -> dict[int, tuple[str, str]]:
        cwd = tmp_path_factory.mktemp(mode)
        ended = trainer.run(cwd, *words_of(mode), DATASET_CACHE_DIR=str(prepared))
        assert ended.code == 0, ended.out
        ended.check_clean()
        assert ended.out.count(f"Number of processes: {MODES[mode]}") == 1
        return trainer.losses(trainer.run_folder(cwd))

    return run


def saved(cwd: Path) -> set[str]:
    return {path.name for path in (trainer.run_folder(cwd) / "checkpoints").glob("step_????????")}


@pytest.mark.slow
@pytest.mark.parametrize("mode", SEVERAL)
def test_stopped_and_resumed_to_the_same_bits(tmp_path: Path, mode: str, undisturbed) -> None:
    whole = undisturbed(mode)
    assert sorted(whole) == list(range(trainer.STEPS))
    job = trainer.start(tmp_path, *words_of(mode), LOCKSTEP_FAULT=PACE)
    trainer.wait_for_step(job, 13)
    job.send(signal.SIGTERM, trainer.launcher(job))
    check_stopped(job.finish(60), 143)
    assert 13 < check_saved(tmp_path) < trainer.STEPS
    ended = trainer.resume(tmp_path)
    assert ended.code == 0, ended.out
    ended.check_clean()
    assert trainer.losses(trainer.run_folder(tmp_path)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("mode", SEVERAL)
def test_a_killed_worker_ends_all_and_nothing_is_saved_after_it(tmp_path: Path, mode: str, undisturbed) -> None:
    """Row 1 with more than two workers; what was saved before is what the run goes on from, to the same bits."""
    rank = MODES[mode] - 1
    job = trainer.start(tmp_path, *words_of(mode), LOCKSTEP_FAULT=PACE)
    trainer.wait_for_step(job, 12)  # saved at 10, to be saved at 20
    before = saved(tmp_path)
    job.send(signal.SIGKILL, trainer.workers(job, MODES[mode])[rank])
    ended = job.finish(60)
    harness.check_failure(ended, trainer.run_folder(tmp_path), code=137, rank=rank, cause="killed by SIGKILL")
    assert ended.seconds <= 3.0
    assert before == saved(tmp_path) == {"step_00000010"}, "nothing newer than the kill"
    again = trainer.resume(tmp_path)
    assert again.code == 0, again.out
    assert trainer.losses(trainer.run_folder(tmp_path)) == undisturbed(mode)


@pytest.mark.slow
def test_replicas_agree(tmp_path: Path) -> None:
    ended = trainer.run(tmp_path, "--mode", "replicas", "--gpus", "3")
    assert ended.code == 0, ended.out
    assert len(re.findall(r"All 3 replicas agree", ended.out)) == 1
    ended.check_clean()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 1])
def test_a_replica_with_a_flipped_bit_is_named(tmp_path: Path, rank: int) -> None:
    """Exit 3, and the one that differs: two against one."""
    fault = f"flip_weight@rank={rank},step=3,bit=3"
    ended = trainer.run(tmp_path, "--mode", "replicas", "--gpus", "3", LOCKSTEP_FAULT=fault)
    assert ended.code == 3, ended.out
    ended.check_clean()
    assert 2 <= len(ended.block) <= 5
    assert "replicas agree" not in ended.out
    record = harness.failure(trainer.run_folder(tmp_path))
    assert record["exit_code"] == 3
    assert record["cause"].startswith(
        f"GPU {rank} ends step 3 with other bits than the other 2 replicas, first in weights:"
    )
    assert record["cause"] in ended.block[1]
    assert record["gpu"] == f"GPU{rank}", "the one that is wrong, not the one that told it"
    assert ended.block[0] == f"[FAILURE] Training failed on GPU {rank}"


@pytest.mark.slow
def test_when_a_replica_fails_the_others_bits_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    """The failure is what ends the run; that another had other bits before is said too."""
    fault = f"flip_weight@rank=1,step=3,bit=3;raise@rank=0,step={trainer.STEPS - 1};{PACE}"
    ended = trainer.run(tmp_path, "--mode", "replicas", "--gpus", "3", LOCKSTEP_FAULT=fault)
    assert ended.code == 1, ended.out
    assert "Before this, GPU 1 ends step 3 with other bits than the other 2 replicas, first in weights:" in ended.out
    assert harness.failure(trainer.run_folder(tmp_path))["gpu"] == "GPU0"
