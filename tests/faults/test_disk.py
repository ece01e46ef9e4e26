"""The real trainer on disks that fill up: rows 21, 22 and 30 of the fault matrix, items 171 and 172.

A disk is full by a limit of the processes (RLIMIT_FSIZE), which needs no rights, or is a small one of its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.engine import checkpoint
from tests.faults import trainer
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("cache")]
PACE = "hang@seconds=0.05"
SAVES = ("training.save_interval=10", "training.eval_interval=0")
SHORT_BYTES = 100_000  # of a file: what is shown and told fits, tensors do not
FAMILIES = ("llama", "mlm", "llada", "ad")
MODES = {1: ("ddp",), 2: ("ddp", "fsdp")}
CASES = [
    pytest.param(workers, mode, trial, id=f"{mode}-{workers}-{trial}")
    for workers, modes in MODES.items()
    for mode in modes
    for trial in range(20)
]


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of so many MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("NOTHING CAN BE MOUNTED HERE: a disk that is really full is not shown")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Not a byte is left."""
    with (place / "filler").open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def started(cwd: Path, *words: str, family: str = "llama", workers: int = 2, out: str = "runs") -> harness.Job:
    usual = ("--device", "cpu", "--gpus", str(workers), "--max-steps", "60", "--name", "run", "--out", out)
    quiet = trainer.QUIET[1:] if family == "ad" else trainer.QUIET  # agents continue no text
    command = (sys.executable, "-m", "lockstep", "train", family, "tiny", *quiet, *SAVES, *usual, *words)
    job = harness.start(command, cwd=cwd, LOCKSTEP_FAULT=PACE)
    trainer.STARTED.append(job)
    return job


def wait_for_save(job: harness.Job, root: Path, step: int) -> None:
    trainer.wait_until(lambda: (root / f"checkpoints/step_{step:08d}").is_dir(), job)


def limit(job: harness.Job, size: int) -> None:
    for pid in job.members():
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def check_full(job: harness.Job, root: Path, cause: str) -> harness.Ended:
    """Exit 74 with path, need and free; what was saved is good, and nothing half-written is beside it."""
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 74, ended.out[-3000:]
    ended.check_clean()
    said = ended.out[-3000:]
    assert cause in said, said
    assert " MiB free, " in said, said
    assert " MiB needed" in said, said
    assert "Traceback" not in ended.out
    last = checkpoint.Checkpointer(root / "checkpoints").latest()
    assert last, "something was saved"
    assert f"the last good one is {last.name}" in said
    assert checkpoint.load(last).run["applied_steps"] == int(last.name[-8:])
    assert not list((root / "checkpoints").glob("*.tmp-*"))
    return ended


def go_on(cwd: Path, root: Path, *words: str) -> None:
    """With room again: to the end, from what was kept, and nothing is left over."""
    command = (sys.executable, "-m", "lockstep", "resume", str(root), "--max-steps", "60", *words)
    ended = harness.run(command, cwd=cwd, seconds=trainer.END_SECONDS)
    assert ended.code == 0, ended.out[-3000:]
    assert checkpoint.Checkpointer(root / "checkpoints").latest() == root / "checkpoints/step_00000060"
    assert not list((root / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(("workers", "mode", "trial"), CASES)
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path, workers: int, mode: str, trial: int) -> None:
    """Row 21, 20 times each; the limit falls at another moment each time, also in the midst of a save."""
    job, root = started(tmp_path, "--mode", mode, workers=workers), tmp_path / "runs/run"
    wait_for_save(job, root, 10)
    time.sleep(0.05 * trial)
    limit(job, SHORT_BYTES + 5000 * trial)
    check_full(job, root, "File too large")
    if trial % 5 == 0:
        go_on(tmp_path, root)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_ends_so(tmp_path: Path, family: str) -> None:
    job, root = started(tmp_path, family=family), tmp_path / "runs/run"
    wait_for_save(job, root, 10)
    limit(job, SHORT_BYTES)
    check_full(job, root, "File too large")
    go_on(tmp_path, root)


@pytest.mark.parametrize("workers", [1, 2])
def test_by_choice_it_trains_on_and_tries_again(tmp_path: Path, workers: int) -> None:
    words = ("checkpoint.on_full=retry",)
    job, root = started(tmp_path, *words, workers=workers), tmp_path / "runs/run"
    wait_for_save(job, root, 10)
    limit(job, SHORT_BYTES)
    job.wait_for("Training goes on without this checkpoint", trainer.START_SECONDS)
    limit(job, resource.RLIM_INFINITY)
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 0, ended.out[-3000:]
    failed = ended.out.count("Training goes on without this checkpoint")
    saved = [event["step"] for event in trainer.events(root, "save")]
    assert len(saved) + failed == 6
    assert saved[-1] == 60
    assert checkpoint.Checkpointer(root / "checkpoints").latest() == root / "checkpoints/step_00000060"


@pytest.mark.parametrize("small_disk", [24], indirect=True)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_small_disk_that_somebody_fills(tmp_path: Path, small_disk: Path, workers: int) -> None:
    """Item 171."""
    job, root = started(tmp_path, workers=workers, out=str(small_disk)), small_disk / "run"
    wait_for_save(job, root, 10)
    fill(small_disk)
    check_full(job, root, "No space left on device")
    (small_disk / "filler").unlink()
    go_on(tmp_path, root)


@pytest.mark.parametrize("small_disk", [1], indirect=True)
def test_a_disk_too_small_for_one_checkpoint_is_refused_before_training(tmp_path: Path, small_disk: Path) -> None:
    job = started(tmp_path, workers=2, out=str(small_disk))
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 74, ended.out[-3000:]
    ended.check_clean()
    assert "Step [" not in ended.out
    assert " MiB needed" in ended.out
    assert str(small_disk / "run/checkpoints") in ended.out


@pytest.mark.parametrize("small_disk", [3], indirect=True)
def test_a_disk_that_documented_files_fill(tmp_path: Path, small_disk: Path) -> None:
    """They say the same as a checkpoint that does not fit, and the checkpoint of that step is there."""
    job = started(tmp_path, "training.save_interval=1", f"training.checkpoint_dir={small_disk}/pt", workers=1)
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 74, ended.out[-3000:]
    ended.check_clean()
    said = next(line for line in ended.out.splitlines() if "error:" in line)
    assert f"{small_disk}/pt/step_2.pt: saving a checkpoint failed: No space left on device (" in said
    assert " MiB free, " in said
    assert " MiB needed)" in said
    assert [path.name for path in (small_disk / "pt").glob("step_*")] == ["step_1.pt"]
    go_on(tmp_path, tmp_path / "runs/run", "training.checkpoint_dir=pt")


LOGS = ("events.jsonl", "tb", "log.txt", "own.log", "logs")


@pytest.mark.parametrize("small_disk", [4], indirect=True)
@pytest.mark.parametrize(("workers", "trial"), [(workers, trial) for workers in (1, 2) for trial in range(10)])
def test_a_full_disk_for_everything_that_is_told_stops_nothing(
    tmp_path: Path, small_disk: Path, workers: int, trial: int
) -> None:
    """Row 22, 20 times: steps, curves and logs of every process lie on a full disk, checkpoints on another one."""
    root = small_disk / "run"
    (tmp_path / "checkpoints").mkdir()
    root.mkdir()
    (root / "checkpoints").symlink_to(tmp_path / "checkpoints")
    (root / "config.json").write_text("{}")  # of an attempt that has saved nothing
    words = (
        "--resume", "auto", "report.tensorboard=true", "report.log_all_ranks=true",
        f"report.log_file={small_disk}/own.log", f"system.log_dir={small_disk}/logs",
    )  # fmt: skip
    job = started(tmp_path, *words, workers=workers, out=str(small_disk))
    trainer.wait_for_step(job, 2 + trial)
    fill(small_disk)
    ended = job.finish(trainer.END_SECONDS)
    assert ended.code == 0, ended.out[-3000:]
    ended.check_clean()
    assert "Traceback" not in ended.out
    assert checkpoint.Checkpointer(tmp_path / "checkpoints").latest() == tmp_path / "checkpoints/step_00000060"
    complaints = [line for line in ended.out.splitlines() if "cannot write" in line]
    files = [line.split(": ")[0] for line in complaints]  # with the worker that says so
    assert len(files) == len(set(files)), f"one warning for each file: {complaints}"
    for part in LOGS:
        assert any(part in file for file in files), (part, complaints)
