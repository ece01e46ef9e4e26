"""To measure is to train: a short run by our own launcher, with nothing saved, and what its events tell. Torch-free.

Text is made here, so that nothing is fetched: words as often as in a language (the k-th as often as 1/k), in documents
of log-normal lengths, a quarter of a row on average. Agents learn from real histories of a quick source learner.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.load import replaced, to_dict
from lockstep.data.options import HistoryOptions
from lockstep.errors import ExitCode, LockstepError
from lockstep.proving import SILENT
from lockstep.report.jsonl import read_events
from lockstep.rundir import RunDir
from lockstep.runtime import env

if TYPE_CHECKING:
    from lockstep.config.load import Loaded
    from lockstep.config.schema import RunConfig

WARM_UP = 5  # steps of a run that are nobody's figure
TRACED = 3  # steps that the profiler sees, at the end; it warms up in one before, and one after is not over for it
TAIL_LINES = 12  # of a run that failed
LISTEN_SECONDS = 1.0
GRACE_SECONDS = 20.0  # for a run that is not wanted any more

VOCABULARY = 1 << 17  # words, as many of them as the model has ids for
FILL, SPREAD = 0.25, 0.8  # length of a document: mean as a share of a row, standard deviation of its logarithm
STEPS, FEWEST_ROWS, MOST_WORDS = 4, 100, 4_000_000  # steps whose rows differ; a tenth of the rows is for validation
PROMPT_SHARE = 0.25  # of a conversation


@dataclass(frozen=True)
class Measured:
    """What the events of a run have told."""

    workers: int
    start: Mapping[str, Any]  # the event before the first step
    start_seconds: float  # from there to the end of the first step: blocks are compiled in it
    step_seconds: Sequence[float]
    rows_per_step: int  # of all workers
    tokens_per_step: float  # padding is none
    memory_bytes: int  # at the peak, of the first worker
    mfu: float | None  # over the data sheet's peak; None where that is not known
    traced_seconds: float  # of a step that the profiler watched
    parts_seconds: Mapping[str, float]  # of that step, without the gaps between them
    unnamed_seconds: Mapping[str, float]  # what no part claims, by name

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def rows_per_second(self) -> float:
        return self.rows_per_step / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    def efficiency(self, first: Measured) -> float:
        """How much of its share of the work each worker does, beside one that is alone."""
        return self.rows_per_second / (self.workers * first.rows_per_second)


def run(
    config: RunConfig, *, workers: str, steps: int, folder: Path, traced: int = 0, flags: Sequence[str] = ()
) -> Measured:
    """Train with workers as --gpus names them, and read the events of the steps after the first few."""
    out = RunDir(folder / f"run-{workers.strip(',').replace(',', '-')}")
    last = WARM_UP + steps - 1
    tracing = {"report.profile": bool(traced), "report.profile_steps": f"{last + 2}-{last + 1 + (traced or 1)}"}
    length = {"training.max_steps": WARM_UP + steps + (traced + 2 if traced else 0), "training.warmup_steps": 0}
    tree = to_dict(replaced(config, {**_quiet(config), **tracing, **length}).config)
    file = out.root.with_suffix(".json")
    file.write_text(json.dumps(tree), encoding="utf-8")
    command = [sys.executable, "-m", "lockstep", "train", config.family, f"--config={file}", f"--gpus={workers}"]
    code, said = _ended([*command, *flags, f"--out={folder}", f"--name={out.root.name}"], unsaved=out.root)
    if code:
        tail = "\n".join(f"    {line}" for line in lasting(said, folder)[-TAIL_LINES:])
        raise LockstepError(
            f"training with --gpus {workers} ended with code {code}:\n{tail}",
            where="lockstep bench",
            exit_code=next((known for known in ExitCode if known == code), ExitCode.FAILED),
        )
    return measured(read_events(out.events), steps=steps)


def open_flags(loaded: Loaded) -> list[str]:
    """What a configuration alone does not say: that the run is to find its micro-batch."""
    return ["--batch-size=auto"] if loaded.finds_batch else []


def measured(events: Sequence[Mapping[str, Any]], *, steps: int) -> Measured:
    """The figures of a run that warmed up, made so many steps and then perhaps some for the profiler."""
    told = {event["kind"]: event for event in events}
    made = [event for event in events if event["kind"] == "step"]
    counted = made[WARM_UP : WARM_UP + steps]
    if not counted or "start" not in told:
        raise LockstepError(f"the run has told of {len(made)} steps, more were to come", where="lockstep bench")
    start, profile = told["start"], told.get("profile", {})
    traced = [event["seconds"] for event in made if 0 < profile.get("step", 0) - event["step"] <= profile["steps"]]
    workers = len(told["end"]["workers"]) or 1
    return Measured(
        workers=workers,
        start=start,
        start_seconds=made[0]["time"] - start["time"],
        step_seconds=[event["seconds"] for event in counted],
        rows_per_step=workers * start["batch_size"] * start["accumulated"],
        tokens_per_step=statistics.fmean(event["tokens"] for event in counted),
        memory_bytes=counted[-1]["memory_bytes"],
        mfu=statistics.median(event["mfu"] for event in counted) if counted[0]["mfu"] else None,
        traced_seconds=statistics.fmean(traced) if traced else 0.0,
        parts_seconds=profile.get("parts_seconds", {}),
        unnamed_seconds=profile.get("unnamed_seconds", {}),
    )


def _quiet(config: RunConfig) -> dict[str, Any]:
    """Nothing beside the steps: no weights are fetched, nothing is saved, shown or spoken at the end."""
    tree = to_dict(config)
    silent = {key: value for key, value in SILENT.items() if key.partition(".")[2] in tree[key.partition(".")[0]]}
    mode = {"system.mode": "ddp"} if config.system.mode == "replicas" else {}
    speech = {} if isinstance(config.data, HistoryOptions) else {"report.sample_prompt": ""}
    return {
        **silent, **mode, **speech, "model.init": "random", "training.patience": 0, "checkpoint.resume": None,
        "report.log_interval": 1_000_000, "data.hf_token": None,
    }  # fmt: skip


def _ended(command: Sequence[str], *, unsaved: Path) -> tuple[int, str]:
    """The exit code of a run and what it said. Who leaves early asks it to end first: only it can end its workers."""
    environ = env.child(**{env.UNSAVED: str(unsaved)})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
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


# ------------------------------------------------------------------------------------------------ rows that are made


def with_made_rows(config: RunConfig, folder: Path, *, workers: int) -> RunConfig:
    """The same on text that is made in a folder, in passes over a few steps' rows."""
    training: Any = config.training
    if isinstance(config.data, HistoryOptions):
        learner = {"data.alg": "PSRL"} if config.data.alg == "PPO" else {}
        histories = {"data.dataset_name": "auto", "data.data_path": str(folder / "histories"), "data.collect": True}
        return replaced(config, {**learner, **histories}).config
    path, row = folder / "made.jsonl", training.context_length
    rows = max(STEPS * workers * training.batch_size * training.grad_accum_nums, FEWEST_ROWS)
    rows = max(min(rows, MOST_WORDS // row), 2 * FEWEST_ROWS // STEPS)
    alone = config.data.documents in ("padded", "answers")  # one document in a row
    with path.open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(_record(words, answers=config.data.documents == "answers")) + "\n"
            for words in made_documents(rows if alone else math.ceil(rows / FILL), row=row)
        )
    epochs = {"training.epochs": 0} if hasattr(training, "epochs") else {}
    return replaced(config, {
        **epochs, "data.dataset_name": "text", "data.data_path": str(path), "data.text_column": None,
        "data.streaming": False, "data.max_train_samples": 1 << 40, "data.min_words": 0,
        "data.validation_fraction": 0.1, "data.tokenizer_name": "word", "data.tokenizer_vocab_size": VOCABULARY,
        "data.cache_dir": str(folder / "cache"),
    }).config  # fmt: skip


def made_documents(count: int, *, row: int) -> Iterator[list[str]]:
    """Words of so many documents, none of them longer than a row."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(math.log(FILL * row) - SPREAD**2 / 2, SPREAD, count)
    for length in np.clip(lengths, 2, max(2, row - 2)).astype(int):
        yield [f"w{int(number)}" for number in VOCABULARY ** random.random(length)]


def _record(words: Sequence[str], *, answers: bool) -> dict[str, str]:
    if not answers:
        return {"text": " ".join(words)}
    cut = max(1, int(PROMPT_SHARE * len(words)))
    return {"prompt": " ".join(words[:cut]), "answer": " ".join(words[cut:])}
