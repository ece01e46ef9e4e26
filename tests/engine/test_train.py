"""Whole runs through the command line: what is printed, written, kept, and how runs end."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.engine.snapshot import Snapshot
from lockstep.errors import ExitCode
from lockstep.report.jsonl import read_events
from tests.conftest import Outcome
from tests.gates.training import FEW_WORDS

Cli = Callable[..., Outcome]
TAIL = (
    r"Step \[(\d+)/(\d+)\] \| Loss: (-?\d+\.\d{4}|nan|inf) \| LR: (\d\.\d{2}e[+-]\d{2})"
    r" \| Grad Norm: (\d+\.\d{4}|nan|inf) \| ETA: (\d+):(\d{2})"
)
QUICK = (
    "--device",
    "cpu",
    "report.sample_prompt=",
    "report.tensorboard=false",
    "training.eval_batches=1",
    "system.threads=1",
)

pytestmark = pytest.mark.usefixtures("shared_cache")


def latest(folder: Path) -> Path:
    return (folder / "runs" / "latest").resolve()


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]


def bits_of(run: Path) -> list[tuple[Any, ...]]:
    return [(step["step"], step["loss_hex"], step["grad_norm_hex"], step["lr"]) for step in steps_of(run)]


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_prints_writes_and_ends_as_documented(in_dir: Path, lockstep: Cli) -> None:
    done = lockstep("train", "llama", "tiny", "--max-steps", "4", "--device", "cpu", "system.output_dir=.outputs")
    assert done.code == 0, done.text
    lines = re.findall(TAIL, done.out)
    assert [int(line[0]) for line in lines] == [0, 1, 2, 3], "steps in order from 0 (item 6)"
    assert {line[1] for line in lines} == {"4"}
    assert "158,016 parameters" in done.out
    assert "sample" in done.out
    run = latest(in_dir)
    assert done.out.count(str(run.relative_to(in_dir))) >= 2, "where the results are"
    shown = steps_of(run)
    assert [f"{step['loss']:.4f}" for step in shown] == [line[2] for line in lines]
    assert [f"{step['lr']:.2e}" for step in shown] == [line[3] for line in lines]
    kinds = [event["kind"] for event in read_events(run / "events.jsonl")]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert {"eval", "save"} <= set(kinds)
    saved = json.loads((in_dir / ".outputs" / "llama_training_config.json").read_text())
    assert saved["training"]["max_steps"] == 4, "item 61"
    assert not (in_dir / ".logs").exists(), "item 61: only when configured"
    assert list((run / "tb").iterdir())


def test_first_loss_is_the_formula_and_a_wrong_one_is_said(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Science C2 at start-up; negative control: a head drawn twelve times too wide."""
    good = lockstep("train", "llama", "tiny", "--max-steps", "1", *QUICK)
    first = next(event for event in read_events(latest(in_dir) / "events.jsonl") if event["kind"] == "first_loss")
    assert first["expected"] == pytest.approx(math.log(512) + 64 * 0.02**2 / 2)
    assert first["loss"] == pytest.approx(first["expected"], abs=0.1)
    assert "First loss" not in good.out
    from lockstep.engine import build

    make_model = build.make_model

    def with_a_wide_head(plan: build.Plan, **named: Any) -> build.Built:
        built = make_model(plan, **named)
        with torch.no_grad():
            built.model.get_parameter("output.weight").mul_(12)
        return built

    monkeypatch.setattr(build, "make_model", with_a_wide_head)
    wrong = lockstep("train", "llama", "tiny", "--max-steps", "1", *QUICK, "training.batch_size=64")
    assert re.search(r"First loss \d+\.\d{4}, expected 6\.25", wrong.out)


@pytest.mark.parametrize("spelling", ["--max-steps", "--max_steps"])
def test_max_steps_is_exact(spelling: str, in_dir: Path, lockstep: Cli) -> None:
    assert lockstep("train", "llama", "tiny", spelling, "3", *QUICK).code == 0
    assert len(steps_of(latest(in_dir))) == 3


def test_warm_up_rises(in_dir: Path, lockstep: Cli) -> None:
    lockstep("train", "llama", "tiny", "--max-steps", "6", "training.warmup_steps=4", *QUICK)
    rates = [step["lr"] for step in steps_of(latest(in_dir))]
    assert rates[0] < rates[1] < rates[2] < rates[3] < rates[4]
    assert rates[4] > rates[5]


def stop_at(step: int, number: signal.Signals, run_of: Callable[[], Path]) -> threading.Thread:
    """Send this process a signal once the run's log shows the step."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            events = run_of() / "events.jsonl"
            if events.exists() and f'"step":{step},' in events.read_text():
                os.kill(os.getpid(), number)
                return
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "code", "family"),
    [
        pytest.param(signal.SIGTERM, 143, "llama", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "llama", marks=pytest.mark.slow),
        (signal.SIGUSR1, 75, "llama"),
        (signal.SIGTERM, 143, "mlm"),
    ],
    ids=["SIGTERM", "SIGINT", "SIGUSR1", "SIGTERM-mlm"],
)
def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(
    number: signal.Signals, code: int, family: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 68, from a checkpoint made by a signal, with workers in the loader and dropout on."""
    flags = (*QUICK, "--max-steps", "40", "training.eval_interval=0", "data.num_workers=2", "model.dropout=0.1")
    if family == "mlm":  # which also goes through some epochs
        flags = (*flags, "training.epochs=50", "training.context_length=32", f"data.data_path={FEW_WORDS}")
    assert lockstep("train", family, "tiny", *flags, "--name", "whole").code == 0
    watcher = stop_at(5, number, lambda: in_dir / "runs" / "cut")
    monkeypatch.setenv("LOCKSTEP_FAULT", "hang@seconds=0.1")  # a pace at which the watcher comes before the end
    stopped = lockstep("train", family, "tiny", *flags, "--name", "cut", "training.checkpoint_dir=.checkpoints")
    watcher.join()
    monkeypatch.delenv("LOCKSTEP_FAULT")
    assert stopped.code == code, stopped.text
    assert number.name in stopped.text
    done_before = len(steps_of(in_dir / "runs" / "cut"))
    assert 5 < done_before < 40
    assert (in_dir / ".checkpoints" / "interrupted.pt").is_file()
    resumed = lockstep("resume", "runs/cut")
    assert resumed.code == 0, resumed.text
    assert f"Resuming from step {done_before}" in resumed.out
    whole, cut = in_dir / "runs" / "whole", in_dir / "runs" / "cut"
    assert bits_of(cut) == bits_of(whole)
    assert same_weights(weights_of(cut, 40), weights_of(whole, 40))


def test_resume_from_a_documented_file_and_auto(in_dir: Path, lockstep: Cli) -> None:
    flags = (*QUICK, "--max-steps", "10", "training.save_interval=5", "training.checkpoint_dir=.checkpoints")
    assert lockstep("train", "llama", "tiny", *flags, "--name", "whole").code == 0
    content = torch.load(in_dir / ".checkpoints" / "step_5.pt", weights_only=True)
    documented = {
        "global_step",
        "epoch",
        "model_state_dict",
        "optimizer_state_dict",
        "scheduler_state_dict",
        "best_loss",
    }
    assert documented | {"config"} <= content.keys(), "contract 1.3"
    assert content["global_step"] == 5
    assert "layers.0.attention.wq.weight" in content["model_state_dict"]
    again = lockstep("train", "llama", "tiny", *flags, "--name", "again", "--checkpoint", ".checkpoints/step_5.pt")
    assert again.code == 0, again.text
    whole, other = in_dir / "runs" / "whole", in_dir / "runs" / "again"
    assert bits_of(other) == bits_of(whole)[5:]
    assert same_weights(weights_of(other, 10), weights_of(whole, 10))
    older = lockstep(
        "train", "llama", "tiny", *flags, "--name", "older", "--resume", "runs/whole/checkpoints/step_00000005"
    )
    assert older.code == 0, older.text
    assert bits_of(in_dir / "runs" / "older") == bits_of(whole)[5:], "an older checkpoint starts a run of its own"
    auto = lockstep("train", "llama", "tiny", *flags, "--resume", "auto")
    assert auto.code == 0
    assert "Nothing left to do" in auto.out
    named = lockstep("train", "llama", "tiny", *flags, "--resume", "auto", "--name", "again")
    assert "run folder   runs/again" in named.out, "a name that was given is the name of the run"
    assert "Nothing to resume" in lockstep(
        "train", "llama", "tiny", *flags, "--resume", "auto", "--name", "unheard"
    ).out  # fmt: skip
    fresh = lockstep("train", "llama", "tiny", *flags, "--resume", "auto", "system.seed=7")
    said = (
        "Nothing to resume in runs: starting anew. unheard has other settings:\n    system.seed: 42 in unheard, 7 now\n"
    )
    assert said in fresh.out


def test_a_foreign_configuration_is_refused_with_the_difference(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "2", "--name", "a").code == 0
    refused = lockstep(
        "train", "llama", "tiny", *QUICK, "--max-steps", "4", "--resume", "runs/a", "training.learning_rate=1e-4"
    )
    assert refused.code == 2
    assert "training.learning_rate" in refused.err
    assert "training.max_steps" in refused.err
    assert "allow-mismatch" in refused.err
    told = lockstep(
        "train",
        "llama",
        "tiny",
        *QUICK,
        "--max-steps",
        "4",
        "--resume",
        "runs/a",
        "--checkpoint.allow-mismatch",
        "true",
    )
    assert told.code == 0, told.text
    assert [step["step"] for step in steps_of(in_dir / "runs" / "a")] == [0, 1, 2, 3]


KINDS = ("nan_loss", "inf_loss", "nan_grad", "inf_grad", "nan_weight", "nan_act")
ONCE = ("inf_loss", "inf_grad", "nan_weight")  # by default without clipping, the others with it


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        pytest.param(kind, clip, marks=() if (kind in ONCE) == (clip == "0") else pytest.mark.slow)
        for kind in KINDS
        for clip in ("1.0", "0")
    ],
)
def test_non_finite_numbers_stop_the_run(
    kind: str, clip: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 65, its stop and exit code."""
    flags = (*QUICK, "--max-steps", "8", f"training.max_grad_norm={clip}", "training.eval_interval=0")
    monkeypatch.setenv("LOCKSTEP_FAULT", f"{kind}@rank=0,step=3")
    bad = lockstep("train", "llama", "tiny", *flags, "--name", "bad")
    assert bad.code == ExitCode.NON_FINITE
    assert re.search(r"step [34]: (loss|gradient norm) is -?(nan|inf)", bad.err), bad.err
    assert "Traceback" not in bad.text
    failure = json.loads((in_dir / "runs" / "bad" / "failure.json").read_text())
    assert failure["exit_code"] == 71
    if kind == "nan_weight":
        return  # the state itself is spoilt: there is nothing good to go on from
    monkeypatch.delenv("LOCKSTEP_FAULT")
    assert lockstep("resume", "runs/bad").code == 0, "the weights before the bad step were kept"
    assert lockstep("train", "llama", "tiny", *flags, "--name", "good").code == 0
    assert same_weights(weights_of(in_dir / "runs" / "bad", 8), weights_of(in_dir / "runs" / "good", 8))


@pytest.mark.parametrize("where", ["loader", "forward", "backward"])
def test_an_exception_saves_counts_the_flying_step_and_resumes_exactly(
    where: str, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*QUICK, "--max-steps", "8", "training.eval_interval=0", "training.save_interval=0")
    assert lockstep("train", "llama", "tiny", *flags, "--name", "whole").code == 0
    freed: list[Snapshot] = []
    monkeypatch.setattr(Snapshot, "free", lambda self: freed.append(self))
    monkeypatch.setenv("LOCKSTEP_FAULT", f"raise@step=4,where={where}")
    failed = lockstep("train", "llama", "tiny", *flags, "--name", "cut", "training.checkpoint_dir=.checkpoints")
    assert failed.code == 1
    assert "InjectedFault" in failed.err
    assert (in_dir / ".checkpoints" / "error.pt").is_file()
    monkeypatch.delenv("LOCKSTEP_FAULT")
    assert lockstep("resume", "runs/cut").code == 0
    assert len(freed) == 2, "pinned memory is given back, however a run ends"
    assert bits_of(in_dir / "runs" / "cut") == bits_of(in_dir / "runs" / "whole")


def test_out_of_memory_comes_with_numbers_and_knobs(
    in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "oom@step=0")
    failed = lockstep("train", "llama", "tiny", *QUICK)
    assert failed.code == 1
    assert re.search(r"out of memory: peak \d+\.\d+ GiB.*batch_size 4 x context_length 64", failed.err), failed.err
    assert "--gradient-checkpointing (" in failed.err


def test_fp16_that_overflows_for_ever_stops(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULT", "inf_grad@rank=0")
    failed = lockstep(
        "train", "llama", "tiny", *QUICK, "--max-steps", "40", "--precision", "fp16", "training.context_length=8"
    )
    assert failed.code == ExitCode.NON_FINITE
    skipped = [step["skipped"] for step in steps_of(latest(in_dir))]
    assert all(skipped)
    assert 10 <= len(skipped) <= 20


def test_precision_acts(in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 25: a probe inside the model sees the dtype."""
    from lockstep.models.layers import SwiGLU

    seen: list[torch.dtype] = []
    forward = SwiGLU.forward

    def probe(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        seen.append(out.dtype)
        return out

    monkeypatch.setattr(SwiGLU, "forward", probe)
    for words, dtype in (
        (("training.use_amp=false",), torch.float32),
        (("training.amp_dtype=torch.bfloat16",), torch.bfloat16),
        (("training.amp_dtype=half",), torch.float16),
    ):
        seen.clear()
        assert (
            lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "1", "training.context_length=8", *words).code
            == 0
        )
        assert set(seen) == {dtype}


def test_two_processes_do_not_share_a_run(in_dir: Path, lockstep: Cli) -> None:
    from filelock import FileLock

    assert lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "2", "--name", "mine").code == 0
    taken = lockstep("train", "llama", "tiny", *QUICK, "--name", "mine")
    assert taken.code == 2
    assert "lockstep resume" in taken.err
    with FileLock(in_dir / "runs" / "mine" / "lock"):
        held = lockstep("resume", "runs/mine")
    assert held.code == 2
    assert "another process" in held.err


def test_logs_profile_and_settings_that_act(in_dir: Path, lockstep: Cli) -> None:
    done = lockstep(
        "train", "llama", "tiny", *QUICK, "--max-steps", "6", "--profile", "--log-dir", ".logs", "--log-file", "my.log",
        "--deterministic", "report.log_interval=3", "system.empty_cache_interval=2", "checkpoint.keep_last=2",
        "training.save_interval=1",
    )  # fmt: skip
    assert done.code == 0, done.text
    run = latest(in_dir)
    trace = json.loads((run / "profile.json").read_text())
    assert len(trace["traceEvents"]) > 100
    assert (in_dir / ".logs" / run.name / "cpu.log").read_text().count("Step [") == 3
    assert "| lockstep.report.console | INFO |" in (in_dir / "my.log").read_text()
    assert [int(line[0]) for line in re.findall(TAIL, done.out)] == [0, 3, 5]
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_sample_and_export(in_dir: Path, lockstep: Cli) -> None:
    assert lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "2", "--name", "a").code == 0
    one = lockstep("sample", "runs/a", "The ", "--tokens", "8", "--seed", "3")
    two = lockstep("sample", "runs/a", "The ", "--tokens", "8", "--seed", "3")
    assert one.code == 0, one.text
    assert one.out == two.out
    assert one.out.startswith("The ")
    assert lockstep("sample", "runs/a", "The ", "--tokens", "8", "--seed", "4").out != one.out
    exported = lockstep("export", "runs/a", "--to", "hf", "out")
    assert exported.code == 0, exported.text
    weights = load_file(in_dir / "out" / "model.safetensors")
    ours = weights_of(in_dir / "runs" / "a", 2)
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], ours["layers.0.attention.wq.weight"])
    assert json.loads((in_dir / "out" / "config.json").read_text())["num_hidden_layers"] == 2
    missing = lockstep("sample", "runs/nothing", "The")
    assert missing.code == ExitCode.NOT_FOUND
