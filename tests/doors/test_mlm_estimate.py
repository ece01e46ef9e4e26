"""Item 101: the estimate beside the run it is of, and the memory of the GPUs as their driver says it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.bench import estimate
from lockstep.compat import DOORS, parse, resolve
from lockstep.contracts import Batch
from lockstep.named_configs import CONFIGS, TrainingConfig
from lockstep.objectives.mlm import Mlm
from lockstep.objectives.options import MlmOptions
from lockstep.runtime import env
from tests import fake_smi
from tests.bench.test_short_run import made
from tests.conftest import Outcome
from tests.doors.test_mlm import bash, generate

Run = Callable[..., Outcome]
ROOT = Path(__file__).parents[2]
PACE = 0.05  # seconds of a micro-batch
DOCUMENTS, WORDS, ROW_WORDS = 90, 33, 14  # three rows each
UNITS = {"s": 1.0, "min": 60.0, "MiB": 2.0**20, "GiB": 2.0**30}


pause: Callable[[float], object] = time.sleep


class Paced(Mlm):
    """Takes its time for every micro-batch that is learnt from: what else this machine does hardly counts."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        pause(PACE)
        return super().loss(model, batch)


def build(options: MlmOptions, *, documents: str) -> Paced:
    """An objective of a user's own, for the probe's process and for the trainer's."""
    return Paced(options, documents=documents)


def config(**settings: object) -> TrainingConfig:
    """A tiny configuration of a user's own."""
    return TrainingConfig(
        name="Tiny",
        description="Of a test",
        num_gpus=2,
        batch_size_per_gpu=4,
        epochs=2,
        learning_rate=1e-3,
        model_config={"n_layers": 1, "n_heads": 2, "n_embed": 8, "max_seq_len": ROW_WORDS + 2, "vocab_size": 400},
        dataset_config={"data_path": "text.jsonl", "max_samples": 5000, "streaming": False, "min_words": 5},
        optimization_config={"eval_batches": 1, **settings},
    )


def write(path: Path, documents: int) -> None:
    lines = (f"{number} " + " ".join(f"w{(7 * number + place) % 300}" for place in range(WORDS - 1))
             for number in range(documents))  # fmt: skip
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def text(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with documents of three rows each; a child finds the objective above."""
    write(in_dir / "text.jsonl", DOCUMENTS)
    before = env.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{before}" if before else str(ROOT))
    return in_dir


def said(text: str, what: str) -> float:
    """A figure of the estimate, as its reader has it."""
    found = re.search(rf"^Estimated {what}: ([\d.]+) (\w+)", text, re.MULTILINE)
    assert found, text
    return float(found[1]) * UNITS[found[2]]


def fits(estimated: float, real: float) -> bool:
    """What item 101 asks for."""
    return real / 2 < estimated < real * 2


def events(folder: Path) -> list[dict[str, Any]]:
    (run,) = (path for path in (folder / "runs").iterdir() if not path.is_symlink())
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def trained_seconds(folder: Path) -> float:
    """From the beginning of the training to its end, with all that is saved on the way."""
    times = {event["kind"]: event["time"] for event in events(folder)}
    return times["end"] - times["estimate"]


def test_the_estimate_is_the_time_of_a_real_run(door: Run, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run in processes of its own, then the run; then figures that are wrong in three ways."""
    monkeypatch.setitem(CONFIGS, "mine", config(device="cpu", **{"objective.name": f"{__name__}:build"}))
    words = ("--config-name", "mine", "report.tensorboard=false")
    trainer = DOORS["mlm_pretrain_v3.py"]
    loaded = resolve(trainer, *parse(trainer, words))
    found = estimate.measure(loaded, workers=1)
    assert {path.name for path in text.iterdir()} <= {"text.jsonl", ".cache"}, "nothing but the prepared rows"
    ended = door("mlm_pretrain_v3.py", *words)
    assert ended.code == 0, ended.text
    real = trained_seconds(text)
    steps = sum(event["kind"] == "step" for event in events(text))
    assert steps == pytest.approx(2 * 3 * 0.9 * DOCUMENTS / 4, rel=0.15)
    assert real > steps * PACE

    def total(**changes: Any) -> float:
        monkeypatch.setattr(estimate, "measure", lambda *_, **__: replace(found, **changes))
        return said("\n".join(estimate.lines(loaded, workers=1)), "total time")

    assert fits(total(), real), (total(), real)
    for factor in (4, 1 / 4):
        assert not fits(total(step_seconds=[factor * each for each in found.step_seconds]), real)
    monkeypatch.setattr(estimate, "lies_here", lambda _: False)
    assert not fits(total(), real), "5,000 samples of one row each were assumed, where 90 of three are"


@pytest.mark.slow
@pytest.mark.ranks
def test_a_generated_script_estimates_its_own_run(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and memory of two workers as computed, in the script's own lines and in its run's own records."""
    from lockstep import compat

    write(text / "text.jsonl", 1000)
    compat.init("mlm", text)
    path = text / "multi_gpu_configs.py"
    sizes = {"n_layers": 4, "n_heads": 4, "n_embed": 64, "max_seq_len": ROW_WORDS + 2, "vocab_size": 30522}
    mine = repr(config(device="cpu")).replace("batch_size_per_gpu=4", "batch_size_per_gpu=32")
    more = f"\nCONFIGS['mine'] = {mine}\nCONFIGS['mine'].model_config.update({sizes})\n"
    path.write_text(path.read_text(encoding="utf-8") + more, encoding="utf-8")
    script = generate(text, "mine", path)
    ratios: list[float] = []
    for attempt in range(3):  # the machine has other things to do: the middle one counts
        done = bash(script, "--gpus", "2", "--name", f"try{attempt}", "--overwrite", cwd=text)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (text / "runs" / f"try{attempt}" / "events.jsonl").read_text(encoding="utf-8").splitlines()
        told = {event["kind"]: event for event in map(json.loads, lines)}
        ratios.append(said(done.stdout, "total time") / (told["end"]["time"] - told["estimate"]["time"]))
        for worker in told["end"]["workers"]:
            estimated, real = said(done.stdout, "memory per worker"), worker["peak_memory_bytes"]
            assert fits(estimated, real), (estimated, real)
            assert not fits(4 * estimated, real)
    assert fits(sorted(ratios)[1], 1.0), ratios


@pytest.mark.parametrize(("totals", "quoted"), [((144384, 81559), "79.65 GiB"), ((144384,), "141.00 GiB"),
                                                (("[N/A]",), "n/a")])  # fmt: skip
def test_the_memory_of_a_gpu_is_what_its_driver_says(
    door: Run, text: Path, monkeypatch: pytest.MonkeyPatch, totals: tuple[object, ...], quoted: str
) -> None:
    """C2: read from nvidia-smi; the smallest of the GPUs that are used."""
    rows = [fake_smi.gpu(number, name=f"Card {number}", memory__total=total) for number, total in enumerate(totals)]
    unused = fake_smi.gpu(len(rows), name="Small", memory__total=8192)
    fake_smi.plant(text / "bin", monkeypatch, [*rows, unused] if len(rows) == 2 else rows)
    monkeypatch.setitem(CONFIGS, "mine", config())
    monkeypatch.setattr(estimate, "measure", lambda *_, **__: replace(made(), memory_bytes=5 << 28))
    monkeypatch.setattr("lockstep.start.start", lambda *_: 0)
    words = ("--title", "T", "--description", "D", "--num-gpus", "2", "--config-name", "mine")
    started = door("train_config.sh", *words)
    assert started.code == 0, started.text
    assert f"Estimated memory per GPU: 1.25 GiB of {quoted} (Card {len(rows) - 1})" in started.out.splitlines()
    on_cpu = door("train_config.sh", *words, "--device", "cpu").out
    assert "per GPU:" not in on_cpu.partition("Estimated")[2]
    assert "Estimated memory per worker: 1.25 GiB" in on_cpu.splitlines()


def test_text_that_lies_here_is_learnt_from_and_no_other(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real documents with the same workers; for any other text rows are made, and nothing is fetched."""
    asked: list[Any] = []
    monkeypatch.setattr(estimate, "run", lambda config, **more: asked.append((config, more)))
    trainer = DOORS["mlm_pretrain_v3.py"]
    for words, here in (
        (("--data-path", "text.jsonl"), True), (("data.dataset_name=builtin",), True), ((), False),
        (("--dataset", "imdb"), False),
    ):  # fmt: skip
        loaded = resolve(trainer, *parse(trainer, words))
        config = loaded.config
        estimate.measure(loaded, workers=3)
        measured, more = asked.pop()
        assert more["workers"] == "3"
        assert estimate.lies_here(config) == here
        assert (measured.data.data_path == config.data.data_path) == here
        assert here or measured.data.data_path.endswith("made.jsonl")


def test_a_short_run_that_fails_says_why(text: Path) -> None:
    trainer = DOORS["mlm_pretrain_v3.py"]
    loaded = resolve(trainer, *parse(trainer, ["--device", "cpu", "--objective.name", "tests.nowhere:build"]))
    told = estimate.lines(loaded, workers=1)
    assert told[0].startswith("Estimated time per epoch: n/a (lockstep: error: ")
    assert "tests.nowhere:build" in told[0]
