"""Whole runs in epochs through the command line: the four result files, the lines, going on, and what can go wrong."""

from __future__ import annotations

import errno
import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.engine import results, train, usage
from lockstep.engine.estimate import estimate
from lockstep.errors import ExitCode
from lockstep.objectives.mlm import Mlm
from lockstep.objectives.options import MlmOptions
from lockstep.report.jsonl import read_events
from lockstep.runtime import gpu_facts
from lockstep.runtime.env import Env
from lockstep.runtime.gpu_facts import Facts, Sampler
from lockstep.runtime.group import Group
from tests import fake_smi
from tests.conftest import Outcome
from tests.gates import training
from tests.gates.training import FEW_DOCUMENTS, run

Cli = Callable[..., Outcome]
FOLDER = ".mlm_pretrained_v3"
QUICK = (
    "--device", "cpu", "report.tensorboard=false", "system.threads=1", "training.eval_interval=0",
    "training.save_interval=0", "training.eval_batches=1", "training.context_length=32", "data.num_workers=0",
    f"data.data_path={FEW_DOCUMENTS}", f"report.results_dir={FOLDER}", "report.log_interval=1000",
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "data.data_path": FEW_DOCUMENTS, "training.context_length": 32, "training.eval_interval": 0,
    "training.eval_batches": 1, "training.save_interval": 0, "data.num_workers": 0, "system.threads": 1,
    "training.epochs": 1,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("shared_cache")


def history(folder: Path) -> dict[str, list[float]]:
    return json.loads((folder / "mlm_training_history.json").read_text(encoding="utf-8"))


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    (run_folder,) = (path for path in (folder / "runs").iterdir() if not path.is_symlink())
    return [event for event in read_events(run_folder / "events.jsonl") if event["kind"] == kind]


def png_size(content: bytes) -> tuple[int, int]:
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_the_four_files_the_lines_and_a_second_start(in_dir: Path, lockstep: Cli) -> None:
    """Items 93 and 94, and the lines of contract 2.4 in their order."""
    command = ("train", "mlm", "tiny", *QUICK, "training.epochs=2", "--resume", "auto")
    done = lockstep(*command)
    assert done.code == 0, done.text
    made = in_dir / FOLDER
    assert sorted(path.name for path in made.iterdir()) == sorted(results.files("mlm"))
    weights = torch.load(made / "mlm_model.pth", weights_only=True)
    assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())
    assert not any(name.startswith("module.") for name in weights)
    assert {name.partition(".")[0] for name in weights} == {"embedding", "encoder", "mlm_head"}
    vocabulary = json.loads((made / "tokenizer.json").read_text(encoding="utf-8"))
    assert [vocabulary[token] for token in ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")] == [0, 1, 2, 3, 4]
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    losses = history(made)
    assert [len(losses[name]) for name in ("train_losses", "val_losses")] == [2, 2]
    width, height = png_size((made / "training_history.png").read_bytes())
    assert width >= 800
    assert height >= 400
    lines = done.out.splitlines()
    shown = [line for line in lines if re.match(r"Estimated|Epoch|Train Loss|MLM|\[MASK\]", line.lstrip(" │"))]
    pattern = [
        r"Estimated time: about \d+ s \(2 epochs of 5 steps\)",
        *(rf"Epoch {n}/2 \| .*GPU n/a\nTrain Loss: \d\.\d{{4}} \| Val Loss: \d\.\d{{4}}\nMLM model saved to {FOLDER}"
          for n in (1, 2)),
        r"MLM pre-training completed!",
        r"( *│ \[MASK\] at position \d+:\n?)+",
    ]  # fmt: skip
    assert re.fullmatch("\n".join(pattern), "\n".join(shown)), shown
    assert re.search(
        r"worker +time +samples/s +peak memory +GPU use\n +CPU +[\d.]+ s +[\d.,]+ +[\d.]+ \w+ +n/a", done.out
    )
    (made / "training_history.png").unlink()
    again = lockstep(*command)
    assert again.code == 0, again.text
    assert re.search(r"Nothing left to do: all 10 steps are done, 2 epochs", again.out)
    assert "Train Loss" not in again.out
    assert history(made) == losses
    assert (made / "training_history.png").is_file()


def test_what_was_written_can_be_trained_on(in_dir: Path, lockstep: Cli) -> None:
    """Item 163: the result folder as model.model_path, vocabulary and weights; the control begins anew."""
    words = ("train", "mlm", "tiny", *QUICK, "report.sample_prompt=", "training.max_steps=40", "model.dropout=0")
    first = lockstep(*words, "data.tokenizer_name=word", "--name", "first")
    assert first.code == 0, first.text
    kept = (in_dir / FOLDER / "tokenizer.json").read_bytes()

    def first_loss(name: str, *more: str) -> float:
        ended = lockstep(*words, *more, "data.tokenizer_name=auto", "--name", name, "training.max_steps=1",
                         "report.results_dir=other", "training.batch_size=32")  # fmt: skip
        assert ended.code == 0, ended.text
        events = read_events(in_dir / "runs" / name / "events.jsonl")
        return next(event["loss"] for event in events if event["kind"] == "step")

    again = first_loss("again", "model.init=pretrained", f"model.model_path={FOLDER}")
    assert (in_dir / "other" / "tokenizer.json").read_bytes() == kept
    assert first_loss("anew", f"model.model_path={FOLDER}") > again + 1
    told = lockstep(*words, "model.init=pretrained", f"model.model_path={FOLDER}", "data.tokenizer_name=word",
                    "--name", "told", "training.max_steps=1")  # fmt: skip
    assert "has a tokenizer of its own" in told.text


def test_history_goes_on_after_a_stop(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("train", "mlm", "tiny", *QUICK, "training.epochs=3", "report.sample_prompt=")
    assert lockstep(*command, "--name", "whole").code == 0
    whole_run = history(in_dir / FOLDER)
    monkeypatch.setenv("LOCKSTEP_FAULT", "raise@step=6")
    assert lockstep(*command, "--name", "cut").code != 0
    assert history(in_dir / FOLDER) == {name: losses[:1] for name, losses in whole_run.items()}
    monkeypatch.delenv("LOCKSTEP_FAULT")
    resumed = lockstep("resume", "runs/cut")
    assert resumed.code == 0, resumed.text
    assert history(in_dir / FOLDER) == whole_run


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_dir / "file").write_text("")
    monkeypatch.setattr("lockstep.engine.build.prepare", lambda *_, **__: pytest.fail("data was prepared first"))
    refused = lockstep("train", "mlm", "tiny", *QUICK, "training.epochs=1", "report.results_dir=file/results")
    assert refused.code == ExitCode.CANNOT_CREATE
    assert "report.results_dir" in refused.err
    assert not (in_dir / "runs").exists()


def test_a_full_disk_is_one_clear_error_and_leaves_the_old_files(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_dir / FOLDER).mkdir()
    (in_dir / FOLDER / "mlm_model.pth").write_text("old")
    (in_dir / FOLDER / "mlm_model.pth.tmp-0123").write_text("left by a kill")
    save = torch.save

    def full(content: Any, file: Any) -> None:
        if "mlm_model" not in str(file.name):
            return save(content, file)
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    failed = lockstep("train", "mlm", "tiny", *QUICK, "training.epochs=1")
    assert failed.code == ExitCode.IO, failed.text
    assert "writing the results failed: No space left on device" in failed.err
    assert FOLDER in failed.err
    assert "Traceback" not in failed.text
    assert {path.name: path.read_text() for path in (in_dir / FOLDER).iterdir()} == {"mlm_model.pth": "old"}
    assert list((in_dir / "runs").glob("*/checkpoints/step_*")), "what was trained is saved"


def test_a_picture_that_cannot_be_drawn_and_a_loss_of_nothing_end_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise ValueError("no such font")

    monkeypatch.setattr("lockstep.report.history.picture", fail)
    unmeasured = {**SETTINGS, "report.results_dir": tmp_path / "results", "training.epochs": 0, "training.max_steps": 1}
    parts, _ = run(tmp_path, unmeasured, family="mlm")
    parts.val_loss = float("nan")
    results.write(parts)
    assert history(tmp_path / "results")["val_losses"] == [None]
    assert not (tmp_path / "results" / results.PICTURE).exists()


def test_other_families_have_results_too(in_dir: Path, lockstep: Cli) -> None:
    done = lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "3", "data.tokenizer_name=bytes")
    assert done.code == 0, done.text
    assert f"LLAMA model saved to {FOLDER}" in done.out
    assert "Epoch" not in done.out
    assert {path.name for path in (in_dir / FOLDER).iterdir()} == set(results.files("llama"))
    losses = json.loads((in_dir / FOLDER / "llama_training_history.json").read_text())
    steps = [event["loss"] for event in events_of(in_dir, "step")]
    assert losses["train_losses"] == [pytest.approx(sum(steps) / 3)]
    assert len(losses["val_losses"]) == 1


# -------------------------------------------------------------------------------------------------- usage and estimates


def test_an_agent_has_no_vocabulary_to_write(in_dir: Path, lockstep: Cli) -> None:
    few = ("--max-steps", "2", "training.gen_episodes=0", "training.eval_batches=1", "report.tensorboard=false")
    done = lockstep("train", "ad", "tiny", "--device", "cpu", "data.n_stream=2", *few, "report.results_dir=out")
    assert done.code == ExitCode.DONE, done.err
    written = {path.name for path in (in_dir / "out").iterdir()}
    assert written == {"ad_model.pth", "ad_training_history.json", "training_history.png"}


def test_the_summary_shows_what_the_driver_said_of_each_gpu(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 100: the values come from the fake tool, their mean from all of its answers."""
    row = fake_smi.gpu(0, utilization__gpu=37, memory__used=4321, temperature__gpu=50, power__draw=200.5)
    fake_smi.plant(in_dir / "bin", monkeypatch, [row])
    samplers: list[Sampler] = []

    def watch(_device: torch.device, folder: Path) -> Sampler:
        samplers.append(Sampler(0, folder / "gpu.jsonl", period=2.0))
        deadline = time.monotonic() + 30
        while samplers[0].latest() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return samplers[0]

    monkeypatch.setattr(train, "watch_gpu", watch)
    done = lockstep("train", "mlm", "tiny", *QUICK, "training.epochs=1", "report.sample_prompt=")
    assert done.code == 0, done.text
    assert re.search(r"\n +CPU +[\d.]+ s +[\d.,]+ +4\.22 GiB +37 %\n", done.out), done.out
    assert re.search(r"Epoch 1/1 \| .* \| GPU 37 %", done.out)
    (end,) = events_of(in_dir, "end")
    (worker,) = end["workers"]
    assert (worker["utilisation"], worker["peak_memory_bytes"]) == (37.0, 4321 << 20)
    assert 0 < worker["seconds"] == end["seconds"]
    assert samplers[0].mean_utilisation() == 37.0


def test_the_mean_and_the_peak_are_of_all_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Facts(10, 5, None), Facts(None, 9, None), Facts(30, 7, None)])
    monkeypatch.setattr(gpu_facts, "_by_smi", lambda _: next(answers, None))
    monkeypatch.setattr(gpu_facts, "_handle", lambda *_: None)
    sampler = Sampler(0, period=0.001)
    assert sampler._thread is not None
    sampler._thread.join(10)  # it gives up when there are no more answers
    assert (sampler.mean_utilisation(), sampler.peak_memory_bytes()) == (20.0, 9)
    assert (Sampler(None).mean_utilisation(), Sampler(None).peak_memory_bytes()) == (None, 0)


class Paced(Mlm):
    """Takes its time for every micro-batch, by a clock that nothing else moves."""

    SECONDS = 0.04
    now = 0.0

    def loss(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        Paced.now += self.SECONDS
        return super().loss(model, batch)


def test_the_estimate_is_within_a_factor_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 101. Beside a real clock: tests/doors/test_mlm_estimate.py."""
    began = 0.0
    monkeypatch.setattr("lockstep.engine.estimate.time", SimpleNamespace(perf_counter=lambda: Paced.now))

    def measured(parts: Any, planned: Any) -> None:
        nonlocal began
        rehearsed(parts, planned)
        before = parts.stepper.optimizer.applied.item(), parts.progress.step
        estimate(parts)
        assert (parts.stepper.optimizer.applied.item(), parts.progress.step) == before, "it changes nothing"
        began = Paced.now

    rehearsed = training.rehearse
    monkeypatch.setattr(training, "rehearse", measured)
    objective = Paced(MlmOptions(), documents="masked")
    settings = {**SETTINGS, "training.batch_size": 1, "training.epochs": 2}
    _, recorder = run(tmp_path, settings, family="mlm", objective=objective)
    real = Paced.now - began
    (told,) = (dict(fields) for kind, fields in recorder.events if kind == "estimate")
    assert told["steps"] == told["max_steps"] == len(recorder.records) >= 20
    assert told["step_seconds"] >= Paced.SECONDS
    assert real / 2 < told["seconds"] < real * 2, (told, real)


def test_a_rehearsed_run_that_was_estimated_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "debug.digest_interval": 1}
    plain = run(tmp_path / "plain", settings, family="mlm")[1].trace
    rehearsed = training.rehearse

    def with_estimate(parts: Any, planned: Any) -> None:
        rehearsed(parts, planned)
        estimate(parts)

    monkeypatch.setattr(training, "rehearse", with_estimate)
    assert run(tmp_path / "estimated", settings, family="mlm")[1].trace == plain


def test_the_rows_of_all_workers_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of replicas, which train alone: the group is everyone's."""
    told: list[Any] = []

    class Two(Group):
        def gather(self, value: Any) -> list[Any]:
            told.append(value)
            return [value, {**value, "name": "other"}]

    options = SimpleNamespace(batch_size=4, grad_accum_nums=2)
    pace = SimpleNamespace(steps=13, warm_up=3, seconds=2.0)
    parts: Any = SimpleNamespace(config=SimpleNamespace(training=options), pace=pace, device=torch.device("cpu"))
    both = usage.gather(parts, Two(1, 2), Sampler(None), seconds=9.0)
    assert [each["name"] for each in both] == ["CPU 1", "other"]
    assert told[0]["samples_per_second"] == 10 * 8 / 2.0
    assert told[0]["utilisation"] is None
    monkeypatch.setattr("lockstep.runtime.env.detect", lambda: Env(node=1, nodes=2, tag="GPU0"))
    (far, _) = usage.gather(parts, Two(1, 2), Sampler(None), seconds=9.0)
    assert far["name"] == "node 1 GPU 0", "each node has a GPU 0"
