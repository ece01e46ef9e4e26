"""train_llada_pretrained.py under torchrun and accelerate (contract items 104, 114, 119, 120, 122, 126, 161, 162)."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launch import processes
from lockstep.runtime import env
from tests.doors.windows import LLADA, QUICK, TRAIN, make
from tests.launch_foreign.foreign import (
    LAUNCHERS,
    QUIET,
    Foreign,
    bits_of,
    events_of,
    failure_of,
    last_block,
    losses_of,
    start,
    steps_of,
)  # fmt: skip

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER = str(LLADA / "train_llada_pretrained.py")
EPOCHS, ROWS = 5, 2  # rows of the global batch
STEPS = EPOCHS * TRAIN // ROWS
WORDS = (*QUICK, "--data_dir", "shakespeare_processed", "--learning_rate", "1e-3", "--name", "run",
         "report.log_interval=1", "system.hang_seconds=10", "debug.digest_interval=1")  # fmt: skip
FAULTS = {  # kind -> (exit code in failure.json, words of the cause)
    "kill": (137, "killed by SIGKILL (out of memory?)"),
    "hang": (124, "hangs: no sign of life"),
    "nan_loss": (71, "is nan"),
}
SECONDS = 200.0


def begin(launcher: str, folder: Path, fault: str = "", *words: str) -> Foreign:
    """Two processes of one row each."""
    make(folder / "shakespeare_processed")
    variables = {"LOCKSTEP_FAULT": fault} if fault else {}
    return start(launcher, TRAINER, *WORDS, "--batch_size", "1", *words, cwd=folder, variables=variables)


def begin_alone(folder: Path, fault: str = "", *words: str) -> Foreign:
    """One process; by default of two rows."""
    make(folder / "shakespeare_processed")
    run_id = secrets.token_hex(8)
    environ = os.environ | QUIET | {processes.RUN_ID: run_id, "LOCKSTEP_FAULT": fault}
    process = subprocess.Popen(
        [sys.executable, TRAINER, *WORDS, *(words or ("--batch_size", str(ROWS)))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environ, start_new_session=True,
    )  # fmt: skip
    return Foreign(process, run_id)


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    return steps_of(folder / "runs/run")


def bits(folder: Path) -> dict[int, tuple[str, str, str]]:
    return bits_of(folder / "runs/run")


def losses(folder: Path) -> list[float]:
    return losses_of(folder / "runs/run", STEPS)


def check_files(folder: Path) -> set[int]:
    """Whatever lies under a documented name is whole; which epochs have one."""
    numbers: set[int] = set()
    for path in (folder / "checkpoints_pretrained").glob("checkpoint_epoch_*.pt"):
        content = torch.load(path)
        numbers.add(content["epoch"])
        assert len(content["train_losses"]) == content["epoch"]
        assert path.name == f"checkpoint_epoch_{content['epoch']}.pt"
    return numbers


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """Two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        code, output = begin("torchrun", folder, "", "--epochs", str(EPOCHS), "--fp16").finish(SECONDS)
    assert code == 0, output
    assert output.count("fp16 needs a GPU: on the CPU this run uses fp32") == 1
    assert re.search(r"^Training on 2 (GPUs|CPU workers)$", output, re.MULTILINE)
    assert output.count("✓ Model created successfully") == 1, "the main process alone speaks"
    return folder


def test_two_processes_of_one_row_are_one_of_two(whole: Path, tmp_path: Path, shared_cache: Path) -> None:
    """Items 104, 114: over all steps, not only ten."""
    code, output = begin_alone(tmp_path).finish(SECONDS)
    assert code == 0, output
    assert "Single GPU training mode\n" in output
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-5)
    assert {1, EPOCHS} <= check_files(whole)
    values = [json.loads((folder / f"checkpoints_pretrained/stats_epoch_{EPOCHS}.json").read_text())["val_losses"]
              for folder in (whole, tmp_path)]  # fmt: skip
    assert values[0] == pytest.approx(values[1], abs=1e-5)


@pytest.mark.parametrize("before", ["two", "one"])
@pytest.mark.parametrize("after", ["two", "one"])
def test_killed_in_the_third_epoch_it_goes_on(
    before: str, after: str, whole: Path, tmp_path: Path, shared_cache: Path
) -> None:
    """Item 119: --resume auto, the same flags, another number of processes; the global batch stays what it was."""
    victim = int(2.5 * TRAIN / ROWS)
    rows = ("--batch_size", "1" if before == "two" else str(ROWS))
    fault = f"kill@rank=0,step={victim}"
    run = {
        "two": lambda *words: begin("torchrun", tmp_path, *words),
        "one": lambda *words: begin_alone(tmp_path, *words),
    }
    code, output = run[before](fault, *rows).finish(SECONDS)
    assert code != 0, output
    assert max(steps(tmp_path)) < victim
    kept = check_files(tmp_path)
    code, output = run[after]("", *rows, "--resume", "auto").finish(SECONDS)
    assert code == 0, output
    (resumed,) = [event for event in events_of(tmp_path / "runs/run") if event["kind"] == "resume"]
    assert resumed["step"] == 2 * TRAIN // ROWS
    assert ("The global batch stays 2 rows" in output) == (before != after)
    if before == after == "two":
        assert bits(tmp_path) == bits(whole)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-5)
    assert kept | {EPOCHS} <= check_files(tmp_path)


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("kind", list(FAULTS))
def test_a_fault_ends_all_and_has_the_last_word(launcher: str, kind: str, tmp_path: Path, shared_cache: Path) -> None:
    """Items 122, 161: within seconds, named, and what was written before stays whole."""
    foreign = begin(launcher, tmp_path, f"{kind}@rank=1,step=17")
    began = time.monotonic()
    code, output = foreign.finish(SECONDS)
    exit_code, cause = FAULTS[kind]
    assert code == 1, output
    assert time.monotonic() - began < 120
    record = failure_of(tmp_path / "runs/run")
    assert record["exit_code"] == exit_code, output
    block = last_block(output)
    if kind == "nan_loss":
        assert f"step 17: loss {cause} on rank 1" in output
        assert f"loss {cause} on rank 1" in record["cause"]
    else:
        assert block[0] == "[FAILURE] Training failed on GPU 1"
        assert cause in block[1]
    assert foreign.survivors() == []
    assert "Training completed!" not in output
    assert check_files(tmp_path) == {1}


def test_sigterm_saves_and_the_same_command_goes_on_to_the_same_bits(
    whole: Path, tmp_path: Path, shared_cache: Path
) -> None:
    """Item 162."""
    foreign = begin("torchrun", tmp_path, "hang@seconds=0.1")
    foreign.reaches(tmp_path / "runs/run", 13, SECONDS)
    foreign.process.send_signal(signal.SIGTERM)
    code, output = foreign.finish(SECONDS)
    assert code != 0, output
    assert foreign.survivors() == []
    last = max(steps(tmp_path))
    assert 13 <= last < STEPS - 1, "it stopped"
    code, output = begin("torchrun", tmp_path, "", "--resume").finish(SECONDS)
    assert code == 0, output
    (resumed,) = [event for event in events_of(tmp_path / "runs/run") if event["kind"] == "resume"]
    assert resumed["step"] == last + 1
    assert bits(tmp_path) == bits(whole)


def listeners(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    rows = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    return any(f":{port:04X} " in row.split(" 0A ")[0] for row in rows if " 0A " in row)


def test_two_nodes_meet_at_the_port_that_was_given(whole: Path, tmp_path: Path, shared_cache: Path) -> None:
    """Item 120: the documented multi-node lines on one machine; rank 1 is the only process of its node."""
    make(tmp_path / "shakespeare_processed")
    port = env.free_port()
    run_id = secrets.token_hex(8)
    environ = os.environ | QUIET | {processes.RUN_ID: run_id}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=2", f"--node_rank={node}",
             "--master_addr=localhost", f"--master_port={port}", TRAINER, *WORDS, "--batch_size", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environ,
        )
        for node in range(2)
    ]  # fmt: skip
    deadline = time.monotonic() + 60
    while not listeners(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert re.search(r"^Training on 2 (GPUs|CPU workers)$", outputs[0], re.MULTILINE)
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=1e-5)


@pytest.mark.parametrize("words", [("--mode", "fsdp"), ("model.lora_rank=4",)])
def test_shards_and_additions_leave_whole_weights(words: tuple[str, ...], tmp_path: Path, shared_cache: Path) -> None:
    """Items 117, 126: the file of an epoch has every tensor under LLaDA's names, whole, and no other."""
    code, output = begin("torchrun", tmp_path, "", *words, "--epochs", "1").finish(SECONDS)
    assert code == 0, output
    weights = torch.load(tmp_path / "checkpoints_pretrained" / "checkpoint_epoch_1.pt")["model_state_dict"]
    assert all(name.startswith("model.transformer.") for name in weights)
    assert len(weights) == 3 + 2 * 9
    assert weights["model.transformer.wte.weight"].shape == (512, 64)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
