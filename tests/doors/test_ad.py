"""The scripts of Algorithm Distillation, run: what they say, write and read again.

Contract items 127, 131, 132, 135, 143-145, 147, 150, 163.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.compat import main
from lockstep.engine import agent_files
from tests.conftest import Outcome
from tests.doors.agents import AD, QUICK, ROWS, RUN, SAVES, STEPS, WARM_UP, collected, make
from tests.faults import trainer
from tests.launch import harness

Run = Callable[..., Outcome]
KEYS = {"step", "config", "model", "optimizer", "lr_sched", "lockstep"}
WHEN = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collected(tmp_path_factory.mktemp("histories"))


@pytest.fixture
def here(in_dir: Path, histories: Path) -> Path:
    return make(in_dir, histories)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, histories: Path) -> Path:
    """A run that nobody disturbed, and all that it has said."""
    from lockstep.report.logs import close_logging

    folder = make(tmp_path_factory.mktemp("whole"), histories)
    close_logging()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.chdir(folder)
        code = main("train.py", QUICK)
        close_logging()
    assert code == 0, said.getvalue()
    (folder / "said.txt").write_text(said.getvalue(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, histories: Path) -> Path:
    """The same as a process of its own, as a user starts it: gone in its 13th step, with its 10th in the file."""
    folder = make(tmp_path_factory.mktemp("killed"), histories)
    job = harness.start(
        [sys.executable, str(AD / "train.py"), *QUICK], cwd=folder, LOCKSTEP_FAULT="hang@step=12,seconds=600"
    )
    trainer.wait_until(lambda: (folder / RUN).is_dir() and saved(folder) == ["ckpt-10.pt"], job, seconds=120)
    job.send(signal.SIGKILL)
    ended = job.finish()
    assert ended.code == 137, ended.out
    assert "Traceback" not in ended.out
    assert torch.load(folder / RUN / "ckpt-10.pt")["step"] == 10
    return folder


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RUN / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def digests(folder: Path) -> dict[int, str]:
    """Of the weights after each step; a step that was made again counts as it was last."""
    return {event["step"]: event["digest"] for event in events(folder) if event["kind"] == "step"}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / RUN).iterdir() if path.name.startswith("ckpt-"))


# --------------------------------------------------------------------------------------------- what it says and writes


def test_it_trains_to_the_end_and_says_so(whole: Path) -> None:
    """Items 127, 131, contract 4.4: each line in its order, the banner once although there is one process."""
    text = (whole / "said.txt").read_text(encoding="utf-8")
    rule = "=" * 60
    wanted = [
        f"Data loading started at {WHEN}",
        rule, "Multi-GPU Training Configuration", rule, "Number of processes: 1",
        r"Distributed type: DistributedType\.NO", "Mixed precision: no", "Gradient accumulation steps: 1",
        "Main process device: cpu", rule,
        "Mixed precision is decided by the CPU", f"Batch size per GPU: {ROWS}",
        rf"Global batch size: {ROWS} \({ROWS} per GPU x 1 processes x 1 accumulated\)",
        f"Data loading ended at {WHEN}", r"Elapsed time: \d+:\d\d:\d\d\.\d+", f"Training started at {WHEN}",
        f"Checkpoint saved to {RUN}/ckpt-5.pt", f"Evaluating started at {WHEN}", f"Evaluating ended at {WHEN}",
        f"Checkpoint saved to {RUN}/ckpt-10.pt", f"Checkpoint saved to {RUN}/ckpt-15.pt",
        f"Evaluating started at {WHEN}", f"Evaluating ended at {WHEN}", f"Checkpoint saved to {RUN}/ckpt-20.pt",
        f"Training ended at {WHEN}",
    ]  # fmt: skip
    lines = iter(text.splitlines())
    missing = [each for each in wanted if not any(re.fullmatch(each, line) for line in lines)]
    assert not missing, text
    assert text.count(rule) == 3
    assert text.count("Number of processes") == 1
    assert text.count("fp16 needs a GPU") == 1
    assert "is read as" not in text


def test_its_folder(whole: Path) -> None:
    """Items 132, 143 and contract 4.3: one event file, one checkpoint file, and the configuration."""
    names = {path.name for path in (whole / RUN).iterdir()}
    assert {"config.yaml", f"ckpt-{STEPS}.pt", "events.jsonl"} <= names
    assert saved(whole) == [f"ckpt-{STEPS}.pt"]
    assert len(list((whole / RUN).rglob("events.out.tfevents.*"))) == 1
    content = torch.load(whole / RUN / f"ckpt-{STEPS}.pt", weights_only=True, map_location="cpu")
    assert content.keys() == KEYS
    assert content["step"] == STEPS
    assert content["lr_sched"]["last_epoch"] == STEPS
    assert json.loads(json.dumps(content["config"])) == content["config"], "plain values"
    assert content["config"]["model"]["hidden_size"] == 32
    assert not any(name.startswith("module.") for name in content["model"])
    assert all(tensor.device.type == "cpu" for tensor in content["model"].values())
    optimizer = torch.optim.AdamW(torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in content["model"].values())
    count = sum(len(group["params"]) for group in content["optimizer"]["param_groups"])
    assert len(content["optimizer"]["state"]) == count == len(optimizer.param_groups[0]["params"])
    steps = [event for event in events(whole) if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(STEPS))
    assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    after = [math.cos(math.pi * step / (STEPS - WARM_UP)) for step in range(STEPS - WARM_UP)]
    rates = [
        *(3e-3 * (step + 1) / (WARM_UP + 1) for step in range(WARM_UP)),
        *(1.5e-3 * (1 + fallen) for fallen in after),
    ]
    assert [event["lr"] for event in steps] == pytest.approx(rates, rel=1e-5), "item 139: to nothing at the last step"


def test_the_configuration_in_its_folder_is_the_one_it_was_trained_with(whole: Path, door: Run, here: Path) -> None:
    shutil.copytree(whole / "runs", here / "runs")
    again = door("train.py", "--config", f"{RUN}/config.yaml", "debug.digest_interval=1")
    assert again.code == 0, again.text
    assert f"Checkpoint loaded from {RUN}/checkpoints/step_{STEPS:08d}" in again.out
    assert f"Nothing left to do: all {STEPS} steps are done" in again.out
    assert "Checkpoint saved to" not in again.out


def test_other_settings_are_refused_with_the_difference(whole: Path, door: Run, here: Path) -> None:
    shutil.copytree(whole / "runs", here / "runs")
    before = (here / RUN / "events.jsonl").read_bytes()
    result = door("train.py", *QUICK, "--set", "tf_n_layer=1", "--set", "lr=1e-3")
    assert result.code == 2
    assert "model.num_layers: 2 in the checkpoint, 1 now" in result.text
    assert "training.learning_rate: 0.003 in the checkpoint, 0.001 now" in result.text
    assert "--name NEW" in result.text
    assert (here / RUN / "events.jsonl").read_bytes() == before
    log = "logs/multi_gpu_20260101_000000/training.log"  # as launch_multi_gpu.sh has it
    few = ("--set", "train_timesteps=2", "--set", "num_warmup_steps=1", "--set", "log_dir=runs/other")
    fresh = door("train.py", *QUICK, *few, "--log-file", log)
    assert fresh.code == 0, fresh.text
    assert (here / "runs/other/ckpt-2.pt").is_file()
    assert "Training ended at" in (here / log).read_text(encoding="utf-8")


def test_a_finished_run_makes_good_a_file_that_is_missing(whole: Path, door: Run, here: Path) -> None:
    shutil.copytree(whole / "runs", here / "runs")
    path = here / RUN / f"ckpt-{STEPS}.pt"
    path.rename(path.with_name("ckpt-9.pt"))
    result = door("train.py", *QUICK)
    assert result.code == 0, result.text
    assert "Nothing left to do" in result.out
    assert saved(here) == [f"ckpt-{STEPS}.pt"]
    assert torch.load(path)["step"] == STEPS


# --------------------------------------------------------------------------------------------------------- going on


def test_killed_it_goes_on_by_itself_to_the_same_bits(whole: Path, killed: Path, door: Run, here: Path) -> None:
    """Items 144, 145: what SIGKILL has left is whole, and nobody has to say --resume."""
    shutil.copytree(killed / "runs", here / "runs", symlinks=True)
    result = door("train.py", *QUICK)
    assert result.code == 0, result.text
    assert "Resuming from step 10\n" in result.out
    assert digests(here) == digests(whole)
    assert saved(here) == [f"ckpt-{STEPS}.pt"]
    first, second = (torch.load(folder / RUN / f"ckpt-{STEPS}.pt") for folder in (whole, here))
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


def test_its_file_alone_is_a_place_to_go_on_from(whole: Path, killed: Path, door: Run, here: Path) -> None:
    """Items 143, 163: found by its number, to the same bits."""
    (here / RUN).mkdir(parents=True)
    for name in ("ckpt-10.pt", "ckpt-9.pt"):
        shutil.copy(killed / RUN / "ckpt-10.pt", here / RUN / name)
    result = door("train.py", *QUICK)
    assert result.code == 0, result.text
    assert f"Checkpoint loaded from {RUN}/ckpt-10.pt" in result.out
    assert digests(here) == {step: digest for step, digest in digests(whole).items() if step >= 10}
    assert saved(here) == [f"ckpt-{STEPS}.pt"]


def test_the_newest_file_is_the_one_of_the_most_steps(tmp_path: Path) -> None:
    """Item 143: not the last of an alphabet."""
    assert agent_files.newest(tmp_path) is None
    for name in ("ckpt-9000.pt", "ckpt-10000.pt", "ckpt-99999.pt.tmp-1", "ckpt-x.pt", "other-20000.pt"):
        (tmp_path / name).touch()
    assert agent_files.newest(tmp_path) == tmp_path / "ckpt-10000.pt"


def test_files_of_other_programs(whole: Path, door: Run, here: Path) -> None:
    """Item 163: the documented keys alone are enough to go on, tensors of another model are refused."""
    content = torch.load(whole / RUN / f"ckpt-{STEPS}.pt")
    del content["lockstep"]
    content |= {"step": 10, "lr_sched": {"last_epoch": 10}}
    names = list(content["model"])
    content["model"] = {f"module.{name}": tensor for name, tensor in content["model"].items()}
    torch.save(content, "foreign.pt")
    result = door("train.py", *QUICK, "--resume", "foreign.pt")
    assert result.code == 0, result.text
    assert "begin at zero" in result.text
    assert "Resuming from step 10\n" in result.out
    upstream = ("transformer.layers.0.linear1.weight", "embed_context.weight", "pred_action.weight")
    content["model"] = dict.fromkeys(upstream, torch.zeros(4, 4))
    torch.save(content, "upstream.pt")
    refused = door("train.py", *QUICK, "--name", "second", "--resume", "upstream.pt")
    assert refused.code == 65
    assert f"{len(names) + 3} tensors are in the model or in the file only" in refused.text
    content["model"] = {name: torch.zeros(1) for name in names}
    torch.save(content, "broken.pt")
    broken = door("train.py", *QUICK, "--name", "second", "--resume", "broken.pt")
    assert (broken.code, "the weights are of another model" in broken.text) == (65, True), broken.text


def test_a_run_that_never_saved_is_begun_anew(
    whole: Path, door: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to tidy up after a start that failed; the folder then tells of one run only."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "oom@step=3")
    assert door("train.py", *QUICK, "--set", "ckpt_interval=100").code != 0
    shutil.rmtree(here / RUN / "checkpoints")
    (here / RUN / agent_files.file_of(Path(), 3)).unlink()
    monkeypatch.delenv("LOCKSTEP_FAULT")
    result = door("train.py", *QUICK)
    assert result.code == 0, result.text
    assert digests(here) == digests(whole)
    assert [event["kind"] for event in events(here)].count("start") == 1
    assert len(list((here / RUN).rglob("events.out.tfevents.*"))) == 1


def test_what_lies_there_stays_until_the_next_is_whole(door: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item 144: the disk is full in the middle of the third file."""
    real, times = torch.save, [0]

    def full(content: Any, file: Any, *more: Any) -> None:
        times[0] += isinstance(content, dict) and "lr_sched" in content
        if times[0] >= 3:
            assert saved(here)[0] == "ckpt-10.pt", "it is there while the next one is written"
            file.write(b"half of it")
            raise OSError(28, "No space left on device")
        real(content, file, *more)

    monkeypatch.setattr(torch, "save", full)
    failed = door("train.py", *QUICK)
    assert failed.code == 74, failed.text
    assert "No space left on device" in failed.text
    assert times[0] >= 3
    assert saved(here) == ["ckpt-10.pt"]
    monkeypatch.setattr(torch, "save", real)
    (here / RUN / "ckpt-12.pt.tmp-0123").write_text("left by a kill")
    assert door("train.py", *QUICK).code == 0
    assert saved(here) == [f"ckpt-{STEPS}.pt"]


# ------------------------------------------------------------------------------------------------------ the other files


@pytest.mark.parametrize("name", ["ad_dr", "ad_dr_compressed"])
@pytest.mark.parametrize("steps", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_the_shipped_files_train(name: str, steps: int, door: Run, here: Path) -> None:
    """Item 135: their own sizes, on fewer rows and histories."""
    file = f"include: {AD}/config/model/{name}.yaml\n"
    few = "grid_size: 3\nalg: PSRL\nn_stream: 2\ntotal_source_timesteps: 800\ntrain_n_stream: 2\ntraj_dir: few\n"
    (here / "few.yaml").write_text(f"{file}{few}train_source_timesteps: 400\n", encoding="utf-8")
    words = ("--config", "few.yaml", "--device", "cpu", "training.gen_episodes=0", "training.eval_batches=1",
             "report.tensorboard=false", "system.threads=1", "data.num_workers=0")  # fmt: skip
    assert door("collect.py", *words[:4]).code == 0
    result = door("train.py", *words, "--set", "train_batch_size=2", "--set", f"train_timesteps={steps}")
    assert result.code == 0, result.text
    assert (here / RUN / f"ckpt-{steps}.pt").is_file()
    tokens = events(here)[0]["tokens_per_step"]
    assert tokens == 2 * (240 if name == "ad_dr" else 328)


def test_collect_and_evaluate(whole: Path, door: Run, here: Path) -> None:
    """Items 147, 150: the documented file, the documented lines, and arrays of goals by episodes."""
    again = door("collect.py", "--config", "small.yaml", "--device", "cpu")
    assert again.code == 0, again.text
    assert "history_darkroom_PSRL_alg-seed42.hdf5" in again.out
    other = door("collect.py", "--config", "small.yaml", "--set", "alg_seed=1", "--set", "traj_dir=more")
    assert other.code == 0, other.text
    assert (here / "more/history_darkroom_PSRL_alg-seed1.hdf5").is_file()
    shutil.copytree(whole / "runs", here / "runs")
    (here / "files").mkdir()
    shutil.copy(here / RUN / f"ckpt-{STEPS}.pt", here / "files")
    found: list[np.ndarray[Any, Any]] = []
    for words, file in (
        ([], f"{RUN}/eval_result.npy"),
        (["--goal_idx", "1", "--ckpt_dir", RUN], f"{RUN}/eval_result_goal1.npy"),
        (["--ckpt-dir", "files"], "files/eval_result.npy"),
        (["--ckpt_dir", f"files/ckpt-{STEPS}.pt"], "files/eval_result.npy"),
    ):
        result = door("evaluate.py", "--episodes", "3", "--device", "cpu", *words)
        assert result.code == 0, result.text
        for line in ("Available test goals (3 total):", "Mean reward per environment:", "Overall mean reward: ",
                     "Std deviation: ", f"Saved to {file}"):  # fmt: skip
            assert line in result.out
        found.append(np.load(here / file))
    assert [each.shape for each in found] == [(3, 3), (1, 3), (3, 3), (3, 3)]
    assert np.array_equal(found[0], found[2]), "a file is as good as the run"
    assert np.array_equal(found[0], found[3]), "also by its own name"
    assert door("evaluate.py", "--goal_idx", "3", "--device", "cpu").code == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", range(12))
def test_sigkill_at_any_moment_leaves_a_whole_file(moment: int, whole: Path, door: Run, here: Path) -> None:
    """Items 144, 145: saved after every step, killed somewhere; then to the same bits without a flag."""
    words = [sys.executable, str(AD / "train.py"), *QUICK, "--set", "ckpt_interval=1"]
    process = subprocess.Popen(words, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    reached = here / RUN / "events.jsonl"
    while process.poll() is None and not (reached.exists() and '"export"' in reached.read_text(encoding="utf-8")):
        pass
    try:
        process.wait(0.007 * moment)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
    newest = agent_files.newest(here / RUN)
    assert newest is not None
    assert newest.name == f"ckpt-{torch.load(newest)['step']}.pt"
    result = door("train.py", *QUICK, "--set", f"ckpt_interval={SAVES}")
    assert result.code == 0, result.text
    assert digests(here) == digests(whole)
    assert saved(here) == [f"ckpt-{STEPS}.pt"]
