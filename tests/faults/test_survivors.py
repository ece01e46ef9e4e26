"""SIGKILL to the launcher, a worker or all of them at any moment: of a run nobody is left (row 2, items 55 and 58)."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import trainer
from tests.launch import harness

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("cache")]
WHOM = ("launcher", "worker", "all")
WHEN = ("start", "train", "save", "compile")
SURVIVAL_SECONDS = 10.0  # contract 58


def workers(job: harness.Job) -> list[int]:
    return [pid for pid in job.members("WORLD_SIZE=2") if "lockstep" in harness.command_line(pid)]


def launchers(job: harness.Job) -> list[int]:
    """The launcher and, for moments, what it prepares the data with; not the shells before it, nor the workers."""
    pids = set(job.members()) - set(job.members("WORLD_SIZE=2"))
    return [pid for pid in sorted(pids) if "-m lockstep" in (line := harness.command_line(pid)) and "bash" not in line]


def compilers(job: harness.Job) -> list[int]:
    return [pid for pid in job.members("WORLD_SIZE=2") if "cc1plus" in harness.command_line(pid)]


def moment(job: harness.Job, cwd: Path, when: str, chance: random.Random) -> None:
    """Wait for it."""
    came: dict[str, Callable[[], object]] = {
        "start": lambda: launchers(job),
        "train": lambda: "Step [1/" in job.out,
        "save": lambda: list(cwd.glob("runs/run/checkpoints/step_*.tmp-*")),
        "compile": lambda: compilers(job),
    }
    trainer.wait_until(lambda: bool(came[when]()), job)
    time.sleep(chance.uniform(0, {"start": 6.0, "train": 1.0}.get(when, 0.0)))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [pytest.param(8, id="8"), pytest.param(200, id="200", marks=pytest.mark.slow)])
def test_nobody_survives_a_kill(tmp_path: Path, kills: int) -> None:
    """While they start, train, save, or have compilers as children."""
    cases = list(itertools.product(WHEN, WHOM))

    def one(number: int) -> None:
        chance, cwd = random.Random(number), tmp_path / str(number)
        when, whom = cases[7 * number % len(cases)]
        words = ["--max-steps", "5000", "training.save_interval=1"] + ["model.compile=on"] * (when == "compile")
        own_cache = {"TORCHINDUCTOR_CACHE_DIR": str(cwd / "compiled")}  # empty: compilers run for seconds
        job = trainer.start(cwd, *words, way=chance.choice(list(trainer.WAYS)), **own_cache)  # pyright: ignore[reportArgumentType]
        moment(job, cwd, when, chance)
        victims = {"launcher": launchers(job)[:1], "worker": workers(job), "all": job.members()}[whom]
        for victim in chance.sample(victims or launchers(job)[:1], len(victims) if whom == "all" else 1):
            with contextlib.suppress(ProcessLookupError):
                job.send(signal.SIGKILL, victim)
        ended = job.finish(60)
        assert ended.code != 0
        ended.check_clean(SURVIVAL_SECONDS)

    harness.many(kills, one, at_once=2)
