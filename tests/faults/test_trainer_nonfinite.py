"""NaN with several workers of the real trainer: items 62, 63, 122; who it was, what is kept, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.folder import FILES_LOCK
from tests.faults import trainer
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
WORDS = ("--max-steps", "8", "training.checkpoint_dir=.checkpoints", "debug.enabled=true", "training.save_interval=0")
NAMES = ["debug/nan_debug_step_2.pkl", "nan_grad_step_2.pt"]


def files(folder: Path) -> list[str]:
    """But for the lock of a worker that was killed while it ended, which keeps nobody out."""
    there = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in there if name != FILES_LOCK)


def test_replicas_keep_a_file_each_and_the_first_at_the_documented_place(tmp_path: Path) -> None:
    """Item 63: GPU 1 fails; its files are its own, and the documented ones are the same files."""
    fault = "nan_grad@rank=1,step=2,tensor=layers.0.attention.wq.weight"
    ended = trainer.run(tmp_path, *WORDS, "system.mode=replicas", "report.log_all_ranks=true", LOCKSTEP_FAULT=fault)
    record = harness.check_failure(ended, trainer.run_folder(tmp_path), code=71, rank=1, cause="gradient norm is nan")
    assert (record["module"], record["ranks"], record["finding"]) == ("layers.0.attention.wq", [1], "nan_grad")
    assert "NaN GRADIENT DETECTED [GPU 1]" in ended.out
    assert "EXITING DUE TO NaN [GPU 1]" in ended.out
    own, documented = trainer.run_folder(tmp_path) / "workers" / "n0-GPU1", tmp_path / ".checkpoints"
    assert set(NAMES) <= set(files(documented))
    for name in NAMES:
        assert (own / name).samefile(documented / name)
    assert not (trainer.run_folder(tmp_path) / "workers" / "n0-GPU0" / NAMES[1]).exists()


def test_replicas_that_all_fail_speak_once_at_the_documented_place(tmp_path: Path) -> None:
    """Upstream eight writers met on one file."""
    ended = trainer.run(tmp_path, *WORDS, "system.mode=replicas", LOCKSTEP_FAULT="nan_grad@step=2")
    assert ended.code == 71
    assert files(tmp_path / ".checkpoints") == NAMES
    owners = [
        tag for tag in ("n0-GPU0", "n0-GPU1") if (trainer.run_folder(tmp_path) / "workers" / tag / NAMES[1]).is_file()
    ]
    assert owners
    same = [
        (trainer.run_folder(tmp_path) / "workers" / tag / NAMES[1]).samefile(tmp_path / ".checkpoints" / NAMES[1])
        for tag in owners
    ]
    assert same.count(True) == 1


def test_one_model_on_two_workers(tmp_path: Path) -> None:
    """Item 122: all stop together; the report of the guilty worker is on the screen, whoever it is."""
    fault = "nan_act@rank=1,step=2,module=layers.1.mlp.w1"
    ended = trainer.run(tmp_path, *WORDS, "system.mode=ddp", LOCKSTEP_FAULT=fault)
    record = harness.check_failure(ended, trainer.run_folder(tmp_path), code=71, rank=1, cause="loss is nan on rank 1")
    assert (record["module"], record["ranks"], record["step"]) == ("layers.1.mlp.w1", [1], 2)
    assert ended.out.count("NaN LOSS DETECTED [GPU 1]") == 1
    assert files(tmp_path / ".checkpoints") == ["debug/nan_loss_debug_step_2.pkl", "nan_loss_step_2.pt"]
    assert (tmp_path / record["bundle"] / "bundle.json").is_file()
