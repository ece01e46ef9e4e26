"""A stream whose builder is killed at random moments: the next one goes on, and the bytes are those of one in peace."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from lockstep.data.stream import chunks_folder
from lockstep.engine import streaming
from lockstep.engine.supply import Job, serve
from tests.conftest import Outcome
from tests.engine.streams import content, job, streamed, write_text
from tests.faults import trainer
from tests.launch import harness

STORIES = 400


@pytest.fixture
def small(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of a head and some forty chunks."""
    for name, characters in (("HEAD", 16_000), ("FIRST", 1_000), ("LARGEST", 4_000)):
        monkeypatch.setattr(streaming, f"{name}_CHARACTERS", characters)
    return write_text(in_dir, STORIES)


def answer() -> None:
    """Child process: for each line, fork a builder for that job; what it takes to start is paid once."""
    import lockstep.engine.build  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.write(1, f"{os.getpid()}\n".encode())
            os._exit(serve(Job(**json.loads(line))))
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


def is_writing(asked: Job) -> bool:
    """Whether a chunk is being written at this moment."""
    return any(chunks_folder(Path(asked.base)).glob("*.tmp-*"))


def build(server: subprocess.Popen[str], asked: Job, kill_after: float | None, *, aimed: bool = False) -> None:
    """Let it build, to the end or until it is killed; aimed: in the middle of the first chunk that is seen."""
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(asdict(asked)) + "\n")
    server.stdin.flush()
    pid = int(server.stdout.readline())
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline and not (aimed and is_writing(asked)):
            time.sleep(0 if aimed else 0.001)
        with contextlib.suppress(ProcessLookupError):  # it was done before
            os.kill(pid, signal.SIGKILL)
    assert server.stdout.readline() == "gone\n"


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from tests.faults.test_stream_kills import *; answer()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("kills", [pytest.param(3, id="3"), pytest.param(50, id="50", marks=pytest.mark.slow)])
def test_a_builder_killed_at_random_leaves_the_same_bytes(
    small: Path, server: subprocess.Popen[str], kills: int
) -> None:
    chance = random.Random(kills)
    config, made = streamed(data_path=str(small / "stories.jsonl"), cache_dir=str(small / "cache"))
    asked = job(config, made.folder, small)
    build(server, asked, None)
    expected = content(made.folder)
    shutil.rmtree(chunks_folder(made.folder))
    began = time.monotonic()
    build(server, asked, None)
    took = time.monotonic() - began
    assert content(made.folder) == expected
    assert len(expected) > 4 * 30
    assert json.loads(Path(asked.status).read_text(encoding="utf-8"))["done"]
    unfinished, killed = 0, 0
    while killed < kills:
        shutil.rmtree(chunks_folder(made.folder), ignore_errors=True)
        for _ in range(3):
            build(server, asked, chance.uniform(0, took / 2))
            left = content(made.folder)
            killed += len([name for name in left if ".tmp-" not in name]) < len(expected)
            unfinished += any(".tmp-" in name for name in left)
        build(server, asked, None)
        assert content(made.folder) == expected
    for _ in range(20):  # chance may have missed the short time in which a chunk is being written
        if not unfinished:
            shutil.rmtree(chunks_folder(made.folder), ignore_errors=True)
            build(server, asked, 10.0, aimed=True)
            unfinished += any(".tmp-" in name for name in content(made.folder))
    build(server, asked, None)
    assert content(made.folder) == expected
    assert unfinished, "no kill ever hit a chunk that was being written"


# --------------------------------------------------------------------------------------------------- the real trainer


WORDS = (
    "data.dataset_name=text", "data.streaming=true", "data.tokenizer_name=bytes", "training.context_length=64",
    "training.batch_size=16", "training.save_interval=4", "--max-steps", "24",
)  # fmt: skip


@pytest.fixture
def stream(small: Path, lockstep: object, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The words of a command line that trains on it; its head is prepared with small chunks."""
    monkeypatch.setenv("DATASET_CACHE_DIR", str(small / "cache"))
    words = (*WORDS, f"data.data_path={small / 'stories.jsonl'}")
    assert callable(lockstep)
    outcome = lockstep("prepare", "llama", "tiny", *words)
    assert isinstance(outcome, Outcome)
    assert outcome.code == 0, outcome.text
    return words


def is_builder(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"engine.supply" in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for one that has ended
    return False


def builders(job: harness.Job, count: int = 2) -> list[int]:
    """The processes that add to the stream, as soon as one is there."""

    def found() -> list[int]:
        mothers = [psutil.Process(pid) for pid in trainer.workers(job, count)]
        return [child.pid for mother in mothers for child in mother.children() if is_builder(child.pid)]

    trainer.wait_until(lambda: bool(found()), job)
    return found()


@pytest.mark.slow
def test_builder_and_run_killed_change_no_bit(small: Path, stream: tuple[str, ...]) -> None:
    """The builder dies of SIGKILL: replaced. Then all of the run does: nobody is left, and a resumed one ends alike."""
    whole = trainer.run(small / "whole", *stream)
    assert whole.code == 0, whole.out
    expected = trainer.losses(trainer.run_folder(small / "whole"))
    assert len(expected) == 24
    (made,) = (small / "cache").glob("*.chunks")
    shutil.rmtree(made)
    hurt = trainer.start(small / "hurt", *stream)
    (builder,) = builders(hurt)
    os.kill(builder, signal.SIGKILL)
    trainer.wait_until(lambda: builders(hurt) != [builder], hurt)
    others = [*trainer.workers(hurt, 2), *builders(hurt)]
    trainer.wait_for_step(hurt, 9)
    os.kill(trainer.launcher(hurt), signal.SIGKILL)
    hurt.finish(60)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in others) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in others if psutil.pid_exists(pid)]
    ended = trainer.resume(small / "hurt")
    assert ended.code == 0, ended.out
    assert trainer.losses(trainer.run_folder(small / "hurt")) == expected
    assert not list((small / "cache").rglob("*.tmp-*"))


@pytest.mark.slow
def test_a_long_wait_is_no_hang_and_a_signal_ends_it(small: Path, stream: tuple[str, ...]) -> None:
    """Rows that do not come: the watchdog does not mind, SIGTERM saves and stops, and the run goes on later."""
    job = trainer.start(small, *stream, "system.hang_seconds=2")
    (builder,) = builders(job)
    os.kill(builder, signal.SIGSTOP)
    trainer.wait_until(lambda: "Waiting for chunk" in job.out, job)
    time.sleep(6)  # three times the limit
    assert job.process.poll() is None, job.out
    os.kill(trainer.launcher(job), signal.SIGTERM)
    ended = job.finish(30)
    assert ended.code == 143, ended.out
    assert not psutil.pid_exists(builder)
    steps = max(trainer.losses(trainer.run_folder(small)))
    saved = sorted(path.name for path in (trainer.run_folder(small) / "checkpoints").iterdir())
    assert saved[-1] == f"step_{steps + 1:08d}"
    resumed = trainer.resume(small)
    assert resumed.code == 0, resumed.out
    assert sorted(trainer.losses(trainer.run_folder(small))) == list(range(24))
