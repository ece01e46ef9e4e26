"""`--restarts` with the real trainer: crashes and hangs at any moment, the bits of a run without them."""

from __future__ import annotations

import os
import random
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.report.jsonl import read_events
from lockstep.rundir import sha256
from tests.faults import trainer
from tests.launch import harness

pytestmark = pytest.mark.slow

STEPS = 120
WORDS = ("--max-steps", str(STEPS), "training.save_interval=20", "--system.hang_seconds", "5")
HURTS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Bits:
    """What a run came to: weights and optimizer of its last checkpoint, and every step as it was told."""

    weights: str
    moments: str
    losses: dict[int, str]


def bits(root: Path) -> Bits:
    last = root / f"checkpoints/step_{STEPS:08d}"
    steps = [event for event in read_events(root / "events.jsonl") if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(STEPS)), "each step once"
    return Bits(
        sha256(last / "model.safetensors"),
        sha256(last / "optimizer.safetensors"),
        {event["step"]: event["loss_hex"] for event in steps},
    )


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Bits]:
    """The bits of whole runs, without `--restarts`, by the number of workers."""
    found: dict[int, Bits] = {}
    for count in (1, 2):
        cwd = tmp_path_factory.mktemp("whole")
        ended = trainer.run(cwd, *WORDS, workers=count, DATASET_CACHE_DIR=str(prepared))
        assert ended.code == 0, ended.out
        found[count] = bits(trainer.run_folder(cwd))
    return found


def restarts_told(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("[RESTART]")]


def check_whole(ended: harness.Ended, root: Path, expected: Bits, *, restarts: int) -> None:
    """Done, as if nothing had been; and what has been is told."""
    assert ended.code == 0, ended.out[-3000:]
    ended.check_clean()
    assert len(restarts_told(ended.out)) == restarts, ended.out[-3000:]
    assert bits(root) == expected
    told = [event["number"] for event in trainer.events(root, "restart")]  # of the rounds that came to their first step
    assert told == sorted(set(told))
    assert told[-1:] == ([restarts] if restarts else [])
    assert not (root / "failure.json").exists()
    assert not list(root.rglob("*.tmp*"))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("trial", range(5))
def test_faults_at_random_moments(
    tmp_path: Path, cache: Path, undisturbed: dict[int, Bits], count: int, trial: int
) -> None:
    """Three signals to workers, from their start to their end: before the first checkpoint, in a save, anywhere."""
    chance = random.Random(10 * trial + count)
    job = trainer.start(tmp_path, *WORDS, "--restarts", "9", workers=count, LOCKSTEP_FAULT="hang@seconds=0.05")

    def is_over() -> bool:  # after the last restart there may be no step left to make
        return job.process.poll() is not None

    for number in range(3):
        trainer.wait_until(lambda number=number: len(restarts_told(job.out)) == number or is_over(), job)
        if is_over():
            break
        pids = trainer.workers(job, count)
        if chance.random() < 0.7:  # else while it starts
            lines = job.out.count("Step [")
            trainer.wait_until(lambda lines=lines: job.out.count("Step [") > lines or is_over(), job)
        time.sleep(chance.uniform(0, 1.0))
        name = chance.choice(sorted(HURTS))
        try:
            job.send(HURTS[name], chance.choice(pids))
        except ProcessLookupError:  # it was done sooner
            break
    ended = job.finish(trainer.END_SECONDS)
    root = trainer.run_folder(tmp_path)
    check_whole(ended, root, undisturbed[count], restarts=len(restarts_told(ended.out)))


@pytest.mark.parametrize("count", [1, 2])
def test_every_kind_in_one_run(tmp_path: Path, cache: Path, undisturbed: dict[int, Bits], count: int) -> None:
    last = count - 1
    kinds = ("kill", "segv", "abort", "exit", "raise", "hang", "stop", "gil")
    faults = ";".join(f"{kind}@rank={last},step={9 + 13 * at},round={at}" for at, kind in enumerate(kinds))
    ended = trainer.run(tmp_path, *WORDS, "--restarts", str(len(kinds)), workers=count, LOCKSTEP_FAULT=faults)
    check_whole(ended, trainer.run_folder(tmp_path), undisturbed[count], restarts=len(kinds))
    told = restarts_told(ended.out)
    for words, line in zip(("SIGKILL", "SIGSEGV", "SIGABRT", "code 1", "InjectedFault"), told, strict=False):
        assert words in line
    record = trainer.run_folder(tmp_path)
    assert [event["number"] for event in trainer.events(record, "restart")] == list(range(1, len(kinds) + 1))
    assert len(list((record / "failures").glob("*.json"))) == len(kinds)
    log = (trainer.run_folder(tmp_path) / "workers/n0-GPU0/log.txt").read_text(encoding="utf-8")
    assert log.count("Starting experiment") == len(kinds) + 1, "the log goes on"


def test_other_bits_would_be_seen(tmp_path: Path, cache: Path, undisturbed: dict[int, Bits]) -> None:
    """The control: a weight that was wrong in the checkpoint gone on from."""
    faults = "flip_weight@step=12,bit=20,round=0;kill@step=45,round=0"  # the save after 20 steps is there by then
    ended = trainer.run(tmp_path, *WORDS, "--restarts", "1", workers=1, LOCKSTEP_FAULT=faults)
    assert ended.code == 0, ended.out
    assert bits(trainer.run_folder(tmp_path)).weights != undisturbed[1].weights  # the losses need not show one weight


def test_a_run_without_a_name_stays_one(tmp_path: Path, cache: Path, undisturbed: dict[int, Bits]) -> None:
    """Its folder is called by the time: a restart goes on in it, also from step 0."""
    words = ("--device", "cpu", "--gpus", "1", *WORDS, *trainer.QUIET, "--restarts", "2")
    fault = "kill@step=5,round=0;kill@step=30,round=1"
    ended = harness.run([*shlex.split(trainer.NATIVE), *words], cwd=tmp_path, seconds=180, LOCKSTEP_FAULT=fault)
    (root,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    check_whole(ended, root, undisturbed[1], restarts=2)


def test_a_resume_is_restarted_too(tmp_path: Path, cache: Path, undisturbed: dict[int, Bits]) -> None:
    first = trainer.run(tmp_path, *WORDS, workers=2, LOCKSTEP_FAULT="kill@rank=1,step=50")
    assert first.code == 137
    command = (sys.executable, "-m", "lockstep", "resume", "runs/run", "--restarts", "1")
    ended = harness.run(command, cwd=tmp_path, seconds=180, LOCKSTEP_FAULT="kill@rank=0,step=70,round=0,signal=11")
    assert ended.code == 0, ended.out
    ended.check_clean()
    assert bits(trainer.run_folder(tmp_path)) == undisturbed[2]
    assert len(list((trainer.run_folder(tmp_path) / "failures").glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("nan_loss@step=25", 71, "the same step would be NaN or Inf again"),
        ("oom@step=25", 1, "the same step would need as much memory again"),
    ],
)
def test_what_would_come_again_is_not_tried_again(
    tmp_path: Path, cache: Path, fault: str, code: int, words: str
) -> None:
    ended = trainer.run(tmp_path, *WORDS, "--restarts", "3", LOCKSTEP_FAULT=fault)
    assert ended.code == code, ended.out
    assert not restarts_told(ended.out)
    assert f"  restarts: 0 of 3 made; not restarted, {words}" in ended.out
    ended.check_clean()


def test_a_configuration_error_is_not_tried_again(tmp_path: Path, cache: Path) -> None:
    """Met by a worker: the run exists already. One error, no second attempt."""
    (tmp_path / "runs/run").mkdir(parents=True)
    ended = trainer.run(tmp_path, *WORDS, "--restarts", "3")
    assert ended.code == 2, ended.out
    assert not restarts_told(ended.out)
    assert ended.out.count("exists already") == 1


def test_all_restarts_used_up(tmp_path: Path, cache: Path) -> None:
    ended = trainer.run(tmp_path, *WORDS, "--restarts", "2", LOCKSTEP_FAULT="exit@rank=1,step=45,code=7")
    harness.check_failure(ended, trainer.run_folder(tmp_path), code=7, rank=1, cause="exited with code 7")
    assert len(restarts_told(ended.out)) == 2
    assert ended.out.rstrip().endswith("  restarts: 2 of 2 made; exit code 7 is the last")


def test_a_stop_is_no_crash(tmp_path: Path, cache: Path) -> None:
    job = trainer.start(tmp_path, *WORDS, "--max-steps", "5000", "--restarts", "3", workers=1)
    trainer.wait_for_step(job, 30)
    job.send(signal.SIGTERM)
    ended = job.finish(60)
    assert (ended.code, restarts_told(ended.out)) == (143, []), ended.out
    ended.check_clean()


@pytest.mark.parametrize("left", ["nothing", "folder", "configuration"])
def test_no_end_is_too_early(tmp_path: Path, cache: Path, undisturbed: dict[int, Bits], left: str) -> None:
    """What a first round can have left behind when it was killed while it made the run folder."""
    root = trainer.run_folder(tmp_path)
    if left != "nothing":
        root.mkdir(parents=True)
    if left == "configuration":
        (root / "config.json").write_text("{}")
    rounds = tmp_path / "rounds"
    rounds.mkdir()
    (rounds / "run").write_text("runs/run")
    told = {"LOCKSTEP_ROUNDS": str(rounds), "LOCKSTEP_ROUND": "1/1", "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
    ended = trainer.run(tmp_path, *WORDS, workers=1, **told)
    assert ended.code == 0, ended.out
    assert bits(root) == undisturbed[1]
