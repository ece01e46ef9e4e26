"""Algorithm Distillation through the whole house: stopped, resumed, in the same bits, profiled, by several workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lockstep.contracts import StepRecord
from lockstep.engine.timing import profiling
from lockstep.errors import ExitCode, Stopped
from lockstep.health.fingerprint import digest_model
from lockstep.runtime.signals import StopRequest
from tests.conftest import Outcome
from tests.gates.training import Recorder, run

Cli = Callable[..., Outcome]
SHORT = ("--device", "cpu", "data.num_workers=0", "training.gen_episodes=0", "training.eval_interval=0")


def weights(run_folder: Path, step: int) -> dict[str, Any]:
    return load_file(run_folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def digest(run_folder: Path, step: int) -> str:
    return digest_model(weights(run_folder, step).items())


def test_the_same_command_gives_the_same_weights(in_dir: Path, lockstep: Cli) -> None:
    """Item 155; control: another seed does not."""
    words = ("train", "ad", "tiny", *SHORT, "--deterministic", "--max-steps", "6", "training.save_interval=6")
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        assert lockstep(*words, "--name", name, "--seed", str(seed)).code == 0
    found = [digest(in_dir / "runs" / name, 6) for name in ("one", "two", "other")]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_profile_is_written(in_dir: Path, lockstep: Cli) -> None:
    """Item 156: of the chosen steps, a file and the table of what took longest."""
    words = ("--profile", "--profile-steps", "4-5")
    ended = lockstep("train", "ad", "tiny", *SHORT, "--max-steps", "6", *words, "--name", "run")
    assert ended.code == 0, ended.text
    trace = json.loads((in_dir / "runs" / "run" / "profile.json").read_text())
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#4", "ProfilerStep#5"}
    assert any("linear" in name for name in names)
    assert "Profile of steps 4 to 5:" in ended.text
    (header,) = [line for line in ended.text.splitlines() if "Self CPU %" in line]
    assert "CPU total" in header
    (row,) = [line for line in ended.text.splitlines() if "ProfilerStep*" in line]
    assert row.split()[-1] == "2", "the steps that were traced"


@pytest.mark.parametrize(("begin", "left", "told"), [(0, 4, "step 4"), (10, 2, "step 12")])
def test_a_profile_of_steps_that_never_come(
    begin: int, left: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Item 156; the first two steps of a start are never traced."""
    with profiling(tmp_path / "trace.json", (4, 2), begin=begin, steps_left=left, tell=pytest.fail) as profiler:
        profiler.step()
    assert f"Too few steps to profile: the first would be {told}" in caplog.text
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("slow", [True, False])
def test_waiting_for_rows_is_told(slow: bool, in_dir: Path, lockstep: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 4.8: whether data or computing holds the training up."""
    if slow:
        monkeypatch.setenv("LOCKSTEP_FAULT", "hang@seconds=0.5,where=loader")
    ended = lockstep("train", "ad", "tiny", *SHORT, "--max-steps", "6", "--name", "run")
    assert ended.code == 0, ended.text
    assert ("of the time went into waiting for rows" in ended.text) == slow
    events = [json.loads(line) for line in (in_dir / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["data_share"] > 0.3) == slow


def test_exporting_an_agent_is_refused_and_loading_it_is_not(in_dir: Path, lockstep: Cli) -> None:
    import lockstep as package

    assert lockstep("train", "ad", "tiny", *SHORT, "--max-steps", "2", "--name", "run").code == 0
    refused = lockstep("export", "run", "--to", "hf")
    assert refused.code == ExitCode.USAGE
    assert "transformers has no such model" in refused.text
    assert "step_00000002/model.safetensors" in refused.text
    assert not (in_dir / "runs" / "run" / "hf").exists()
    model, tokenizer = package.load("run")
    assert tokenizer is None
    saved = weights(in_dir / "runs" / "run", 2)
    assert digest_model(model.named_parameters()) == digest_model(saved.items())


def test_actions_are_counted_and_judged_by_their_accuracy(in_dir: Path, lockstep: Cli) -> None:
    """An action has no perplexity worth telling."""
    ended = lockstep("train", "ad", "tiny", "--device", "cpu", "--max-steps", "10", "--name", "run")
    events = [json.loads(line) for line in (in_dir / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    accuracy = [event["val_acc_action"] for event in events if event["kind"] == "eval"][-1]
    assert f"| Accuracy: {accuracy:.4f} | " in ended.text
    assert f"(accuracy {accuracy:.4f})" in ended.text
    assert "10 steps of 640 actions" in ended.text
    assert "actions/s" in ended.text
    assert "erplexity" not in ended.text
    assert "tokens" not in ended.text


class Stopping(Recorder):
    """A sink that has the process asked to stop after a few steps."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def write(self, record: StepRecord) -> None:
        super().write(record)
        if record.step == 3:
            self.stop.receive(signal.SIGTERM, None)


def test_stopped_in_the_middle_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Item 162: SIGTERM during training saves; the run that goes on ends as one that was never stopped."""
    settings = {"training.max_steps": 8, "training.eval_interval": 0, "training.save_interval": 0,
                "training.gen_episodes": 0, "data.data_path": tmp_path / "histories", "debug.digest_interval": 1,
                "model.dropout": 0.1}  # fmt: skip
    whole = run(tmp_path / "whole", settings, family="ad")[1].trace
    stop = StopRequest()
    stop.patient = True
    recorder = Stopping(stop)
    with pytest.raises(Stopped) as error:
        run(tmp_path / "part", settings, family="ad", stop=stop, recorder=recorder)
    assert error.value.exit_code == ExitCode.TERMINATED
    [point] = (tmp_path / "part" / "checkpoints").glob("step_*")
    done = int(point.name.removeprefix("step_"))
    assert 0 < done < 8
    assert run(tmp_path / "rest", settings, family="ad", point=point)[1].trace == whole[done:]


@pytest.mark.slow
def test_workers_of_our_own_collect_before_they_start(in_dir: Path) -> None:
    """`--gpus 2` on the CPU in an empty folder: one process prepares, the workers open what it made."""
    words = [sys.executable, "-m", "lockstep", "train", "ad", "tiny", *SHORT, "--gpus", "2", "--max-steps", "4"]
    ended = subprocess.run([*words, "--name", "two"], capture_output=True, text=True, cwd=in_dir)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("Collecting histories") == 1
    assert ended.stdout.index("Collecting histories") < ended.stdout.index("Number of processes: 2")
    again = subprocess.run([*words, "--name", "again"], capture_output=True, text=True, cwd=in_dir)
    assert again.returncode == 0, again.stdout
    assert "Preparing dataset" not in again.stdout


@pytest.mark.slow
def test_ranks_of_torchrun_wait_for_the_one_who_collects(in_dir: Path) -> None:
    """Each prepares for itself, with a limit on silence far below the time that takes."""
    words = ["-m", "lockstep", "train", "ad", "tiny", *SHORT, "--max-steps", "2", "data.alg=PPO", "data.n_epochs=20",
             "system.hang_seconds=2", "report.log_all_ranks=true", "data.total_source_timesteps=2560",
             "data.n_process=1"]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=in_dir)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "waiting for process" in ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_collection_that_is_stopped_goes_on(number: signal.Signals, in_dir: Path) -> None:
    """As a process: it leaves at once, keeps what is done, and ends with the bytes of one that was never stopped."""
    settings = ["data.alg=PPO", "data.n_epochs=20", "data.total_source_timesteps=1280", "data.n_process=1"]
    words = [sys.executable, "-m", "lockstep", "collect", "ad", "tiny", "--device", "cpu", *settings]
    parts = in_dir / "datasets/tiny/history_darkroom_PPO_alg-seed42.parts"
    process = subprocess.Popen(words, cwd=in_dir, stderr=subprocess.PIPE, text=True)
    while len(list(parts.glob("*.npy"))) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    asked = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], said
    assert time.monotonic() - asked < 5
    assert "the same command goes on" in said
    kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.npy")}
    assert len(kept) >= 2
    assert subprocess.run(words, cwd=in_dir).returncode == 0
    whole = [*words, "data.data_path=whole"]
    assert subprocess.run(whole, cwd=in_dir).returncode == 0
    name = "history_darkroom_PPO_alg-seed42"
    files = [in_dir / folder / f"{name}.hdf5" for folder in ("datasets/tiny", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
