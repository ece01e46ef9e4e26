"""What more workers bring: real, short runs by our own launcher, each worker with the same batch. Torch-free."""

from __future__ import annotations

import contextlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.arguments import Setting
from lockstep.bench import rows
from lockstep.data.options import HistoryOptions
from lockstep.errors import ConfigError, ExitCode, LockstepError
from lockstep.report.jsonl import read_events
from lockstep.rundir import RunDir
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

WARM_UP = 5  # steps of a run that are nobody's figure
MOST_WORKERS = 1024
TAIL_LINES = 12  # of a run that failed
LISTEN_SECONDS = 1.0
GRACE_SECONDS = 20.0  # for a run that is not wanted any more: it saves


class Words(NamedTuple):
    """Of the command line of a run, but for what differs between several of a bench."""

    given: list[str]  # family, preset, file
    quiet: list[str]  # data that is made, and nothing beside the steps
    settings: list[str]  # the last words

    @property
    def all(self) -> list[str]:
        return [*self.given, *self.quiet, *self.settings]


@dataclass(frozen=True)
class Point:
    """One number of workers."""

    workers: int
    seconds: float  # of a step
    samples: int  # of a step, of all workers
    tokens: float

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def efficiency(self, first: Point) -> float:
        """How much of its share of the work each worker does, beside one that is alone."""
        return self.samples_per_second / (self.workers * first.samples_per_second)

    def as_json(self, first: Point) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "step_ms": 1e3 * self.seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "efficiency": self.efficiency(first),
        }


def counts(text: str) -> list[int]:
    """The numbers of workers in "1,2,4", in order; one alone is always among them, to compare with."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    for part in found or [text]:
        if not (part.isdecimal() and 1 <= int(part) <= MOST_WORKERS):
            what = f"expected numbers of workers, got {part[:40]!r}"
            raise ConfigError(what, where="--workers", hint="--workers 1,2,4")
    return sorted({1, *map(int, found)})


def run(words: Words, config: RunConfig, *, workers: int, steps: int, folder: Path) -> Point:
    """Train for some steps with so many workers and read what the run has told of them."""
    name = f"workers-{workers}"
    command = [sys.executable, "-m", "lockstep", "train", *words.all, f"--gpus={workers}", f"--out={folder}"]
    command += [f"--name={name}", f"--max-steps={WARM_UP + steps}"]
    code, said = _ended(command)
    if code:
        tail = "\n".join(f"    {line}" for line in lasting(said, folder)[-TAIL_LINES:])
        again = shlex.join([*words.given, f"--gpus={workers}", *words.settings])
        raise LockstepError(
            f"training with {workers} worker{'s' * (workers > 1)} ended with code {code}:\n{tail}",
            where="lockstep bench",
            hint=f"lockstep train {again}",
            exit_code=next((known for known in ExitCode if known == code), ExitCode.FAILED),
        )
    told = [event for event in read_events(RunDir(folder / name).events) if event["kind"] == "step"]
    training = config.training
    return point(told, workers=workers, samples=workers * training.batch_size * training.grad_accum_nums)


def _ended(command: Sequence[str]) -> tuple[int, str]:
    """The exit code of a run and what it said. Who leaves early asks it to end first: only it can end its workers."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env.child())
    with process:
        try:
            said = _said(process)
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            process.kill()
            raise
    return process.returncode, said


def _said(process: subprocess.Popen[str]) -> str:
    """All that it says until it ends. Read in one go, a signal that comes between two pieces would not be heard."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=LISTEN_SECONDS)[0]


def lasting(said: str, folder: Path) -> list[str]:
    """Lines without those that point into a folder that goes with the bench; others keep the disk that it was on."""
    lines = [line for line in said.splitlines() if not line[line.rfind(" ") + 1 :].startswith(str(folder))]
    return [line.replace(str(folder), f"{folder.parent}/...") for line in lines]


def point(told: Sequence[Mapping[str, Any]], *, workers: int, samples: int) -> Point:
    """The medians of a run's steps, without those that warm up."""
    counted = told[WARM_UP:]
    if not counted:
        raise LockstepError(f"the run with {workers} workers has told of {len(told)} steps", where="lockstep bench")
    seconds = statistics.median(float(step["seconds"]) for step in counted)
    return Point(workers, seconds, samples, statistics.fmean(int(step["tokens"]) for step in counted))


def command_words(
    given: Sequence[str], config: RunConfig, settings: Sequence[Setting], *, folder: Path, cpu: bool
) -> Words:
    """The words of such a run. On the CPU every worker has one thread, else one alone would have all cores."""
    quiet = {
        "system.mode": "ddp", "training.eval_interval": "0", "training.eval_batches": "1",
        "training.save_interval": "0", "report.tensorboard": "false", "report.log_interval": "1000000",
        "data.cache_dir": str(folder / "cache"), **({"system.threads": "1"} if cpu else {}),
        **_of_family(config, folder),
    }  # fmt: skip
    passed_on = [
        f"--{key}" if text is None else f"--{key}={text}"
        for key, text in settings
        if key.replace("-", "_").rpartition(".")[2] != "hf_token"
    ]  # a secret, and nothing is fetched
    return Words(list(given), [f"--{key}={value}" for key, value in quiet.items()], passed_on)


def _of_family(config: RunConfig, folder: Path) -> dict[str, str]:
    """Rows and weights that need no network, and no walks of agents at the end."""
    made = {key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in rows.settings(config, folder).items()}  # fmt: skip
    if isinstance(config.data, HistoryOptions):
        return {**made, "training.gen_episodes": "0"}
    epochs = {"training.epochs": "0"} if hasattr(config.training, "epochs") else {}
    return {**made, **epochs, "data.dataset_name": "synthetic", "data.tokenizer_name": "null",
            "report.sample_prompt": ""}  # fmt: skip
