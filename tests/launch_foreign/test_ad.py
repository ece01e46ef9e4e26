"""train.py of Algorithm Distillation under python, torchrun, accelerate and SLURM.

Contract items 128, 130-133, 137, 145, 152-154, 161, 162.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launch import processes
from tests.doors.agents import AD, QUICK, ROWS, RUN, STEPS, collected, make
from tests.launch_foreign.cluster import Cluster
from tests.launch_foreign.foreign import (
    LAUNCHERS,
    QUIET,
    Foreign,
    bits_of,
    check_one_bar,
    failure_of,
    last_block,
    losses_of,
    start,
    start_on_terminal,
    steps_of,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

TRAINER = str(AD / "train.py")
PLAIN = ("--set", "tf_dropout=0", "--set", "tf_attn_dropout=0")  # dropout is drawn for each micro-batch
WORDS = (*QUICK, *PLAIN, "system.hang_seconds=20")
HALF = ("--set", f"train_batch_size={ROWS // 2}")  # of two processes
TAGS = {"train/loss", "train/loss_action", "train/lr", "train/acc_action", "test/loss_action", "test/acc_action"}
FAULTS = {"kill": 137, "hang": 124, "nan_loss": 71}
SECONDS = 300.0
DEFAULT_CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
main_process_port: 0
"""


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collected(tmp_path_factory.mktemp("histories"))


def begin(launcher: str, folder: Path, histories: Path, *words: str, **variables: str) -> Foreign:
    """Two processes of half the rows each."""
    if not (folder / "small.yaml").exists():
        make(folder, histories)
    return start(launcher, TRAINER, *WORDS, *HALF, *words, cwd=folder, variables=variables)


def begin_alone(folder: Path, histories: Path, *words: str) -> Foreign:
    make(folder, histories)
    run_id = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, TRAINER, *WORDS, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=folder, env=os.environ | QUIET | {processes.RUN_ID: run_id}, start_new_session=True,
    )  # fmt: skip
    return Foreign(process, run_id)


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    return steps_of(folder / RUN)


def bits(folder: Path) -> dict[int, tuple[str, str, str]]:
    return bits_of(folder / RUN)


def losses(folder: Path) -> list[float]:
    return losses_of(folder / RUN, STEPS)


def check_file(folder: Path) -> int:
    """There is one file, and it is whole; how many steps it has."""
    (path,) = (folder / RUN).glob("ckpt-*.pt")
    step = torch.load(path, weights_only=True)["step"]
    assert path.name == f"ckpt-{step}.pt"
    return step


def tags(folder: Path) -> set[str]:
    """Of the one event file, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (folder / RUN).rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(file))
    accumulator.Reload()
    return set(accumulator.Tags()["scalars"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, histories: Path) -> Path:
    """torchrun, and nobody disturbs it."""
    folder = tmp_path_factory.mktemp("whole") / "work"
    code, output = begin("torchrun", folder, histories).finish(SECONDS)
    assert code == 0, output
    (folder / "said.txt").write_text(output)
    return folder


def test_the_main_process_alone_speaks(whole: Path) -> None:
    """Items 131, 132, 133: one banner, one event file with the documented tags, one line for each step."""
    output = (whole / "said.txt").read_text()
    rule = "=" * 60
    assert output.count(rule) == 3
    banner = [rule, "Multi-GPU Training Configuration", rule, "Number of processes: 2",
              "Distributed type: DistributedType.MULTI_CPU", "Mixed precision: no", "Gradient accumulation steps: 1",
              "Main process device: cpu", rule]  # fmt: skip
    assert "\n".join(banner) in output
    assert f"Batch size per GPU: {ROWS // 2}\n" in output
    assert f"Global batch size: {ROWS} ({ROWS // 2} per GPU x 2 processes x 1 accumulated)\n" in output
    for line in ("Data loading started at", "Training started at", "Training ended at", "fp16 needs a GPU"):
        assert output.count(line) == 1
    assert len(re.findall(r"^Step \[\d+/20\]", output, re.MULTILINE)) == STEPS
    assert tags(whole) >= TAGS
    assert check_file(whole) == STEPS


def test_one_progress_bar_on_a_terminal(histories: Path, tmp_path: Path) -> None:
    """Items 132, 133: with the documented word in it; one event file, with the tags of a compressed context."""
    folder = make(tmp_path / "work", histories, more="use_compressed_context: true\ncompress_interval: 40\n")
    few = ("--set", "train_timesteps=12", "--set", "ckpt_interval=100", "--set", "eval_interval=100")
    slow = {"LOCKSTEP_FAULT": "hang@seconds=0.1"}
    code, screen = start_on_terminal("torchrun", TRAINER, *WORDS, *HALF, *few, cwd=folder, variables=slow)
    assert code == 0, screen
    check_one_bar(screen, 12)
    assert "loss=" in screen
    assert screen.count("Number of processes: 2") == 1
    kinds = {f"{part}/{name}" for part in ("train", "test") for name in ("loss_token_type", "acc_token_type")}
    assert tags(folder) >= TAGS | kinds


@pytest.mark.parametrize("launcher", ["python", "accelerate"])
def test_the_same_losses_however_it_is_started(launcher: str, whole: Path, histories: Path, tmp_path: Path) -> None:
    """Items 128, 130: no default_config.yaml is needed; HOME is an empty folder."""
    folder, home = tmp_path / "work", tmp_path / "home"
    home.mkdir()
    if launcher == "python":
        foreign = begin_alone(folder, histories)
    else:
        foreign = begin(launcher, folder, histories, HOME=str(home), HF_HOME=str(home / ".cache/huggingface"))
    code, output = foreign.finish(SECONDS)
    assert code == 0, output
    assert output.count(f"Number of processes: {1 if launcher == 'python' else 2}\n") == 1
    assert losses(folder) == pytest.approx(losses(whole), abs=1e-5)
    if launcher == "accelerate":
        assert bits(folder) == bits(whole)


def test_accelerates_own_configuration_is_honoured(histories: Path, tmp_path: Path) -> None:
    """Items 130, 137: plain `accelerate launch train.py`; its precision is stronger than the YAML file's."""
    folder, home = make(tmp_path / "work", histories), tmp_path / "home"
    path = home / ".cache/huggingface/accelerate/default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(DEFAULT_CONFIG)
    command = [sys.executable, "-m", "accelerate.commands.launch", TRAINER, *WORDS, *HALF]
    environ = os.environ | QUIET | {"HOME": str(home), "HF_HOME": str(home / ".cache/huggingface")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ, timeout=SECONDS)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert output.count("Number of processes: 2\n") == 1
    assert "Mixed precision: bf16\n" in output
    assert "Mixed precision is decided by the launcher" in output


SEVERAL = ("--multi_gpu", "--main_process_port", "0")  # what accelerate itself finds out where there are GPUs


@pytest.mark.parametrize(
    ("words", "processes", "precision"),
    [
        (("accelerate.commands.launch",), 1, "no"),
        (("accelerate.commands.launch", "--num_processes", "1", "--gpu_ids", "0"), 1, "no"),
        (("accelerate.commands.launch", *SEVERAL, "--num_processes", "2", "--gpu_ids", "0,1"), 2, "no"),
        (("accelerate.commands.launch", *SEVERAL, "--num_processes", "4", "--mixed_precision", "fp16"), 4, "fp16"),
        (("torch.distributed.run", "--nproc_per_node=4"), 4, "no"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else str(value),
)
def test_the_documented_commands(
    words: tuple[str, ...], processes: int, precision: str, histories: Path, tmp_path: Path
) -> None:
    """Items 129, 137: also with CUDA_VISIBLE_DEVICES; 16 bits of the command line are used on the CPU too."""
    folder = make(tmp_path / "work", histories)
    command = [sys.executable, "-m", *words, TRAINER, *WORDS, "--set", "train_timesteps=3"]
    environ = os.environ | QUIET | {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(processes)))
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"Number of processes: {processes}\n") == 1
    assert f"Mixed precision: {precision}\n" in done.stdout
    total = ROWS * processes
    assert f"Global batch size: {total} ({ROWS} per GPU x {processes} processes x 1 accumulated)\n" in done.stdout
    assert check_file(folder) == 3


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize("kind", list(FAULTS))
def test_a_fault_ends_all_and_the_same_command_goes_on(
    launcher: str, kind: str, whole: Path, histories: Path, tmp_path: Path
) -> None:
    """Items 145, 161: named, nobody left behind, what was written stays whole; then to the same bits without a flag."""
    folder = tmp_path / "work"
    foreign = begin(launcher, folder, histories, LOCKSTEP_FAULT=f"{kind}@rank=1,step=12")
    code, output = foreign.finish(SECONDS)
    assert code == 1, output
    record = failure_of(folder / RUN)
    assert record["exit_code"] == FAULTS[kind], output
    if kind == "nan_loss":
        assert "loss is nan on rank 1" in record["cause"]
    else:
        assert last_block(output)[0] == "[FAILURE] Training failed on GPU 1"
    assert foreign.survivors() == []
    assert check_file(folder) == 10
    kept = 12 if kind == "nan_loss" else 10  # what strikes all at once is saved by all, in a file of its own name
    assert (folder / RUN / "nan_loss_step_12.pt").is_file() == (kind == "nan_loss")
    code, output = begin(launcher, folder, histories).finish(SECONDS)
    assert code == 0, output
    assert f"Resuming from step {kept}\n" in output
    assert bits(folder) == bits(whole)
    assert check_file(folder) == STEPS


def test_sigterm_saves_and_the_same_command_goes_on_to_the_same_bits(
    whole: Path, histories: Path, tmp_path: Path
) -> None:
    """Item 162."""
    folder = tmp_path / "work"
    foreign = begin("torchrun", folder, histories, LOCKSTEP_FAULT="hang@seconds=0.2")
    foreign.reaches(folder / RUN, 6, SECONDS)
    foreign.process.send_signal(signal.SIGTERM)
    code, output = foreign.finish(SECONDS)
    assert code != 0, output
    last = max(steps(folder))
    assert 6 <= last < STEPS - 1, "it stopped"
    assert check_file(folder) == last + 1
    code, output = begin("torchrun", folder, histories).finish(SECONDS)
    assert code == 0, output
    assert bits(folder) == bits(whole)


def test_shards_leave_whole_weights(whole: Path, histories: Path, tmp_path: Path) -> None:
    """Item 143: of a model that no process had all of."""
    folder = tmp_path / "work"
    code, output = begin("torchrun", folder, histories, "--mode", "fsdp").finish(SECONDS)
    assert code == 0, output
    first, second = (torch.load(place / RUN / f"ckpt-{STEPS}.pt")["model"] for place in (whole, folder))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)


# --------------------------------------------------------------------------------------------------------------- SLURM

SCRIPT = (AD / "multi_gpu_train.slurm").read_text(encoding="utf-8")
ON_CPU = ("--gpus-per-node=0", "--cpus-per-task=2", "--output=out.txt")


def submitted(slurm: Cluster, folder: Path, histories: Path, *words: str, nodes: int = 1) -> str:
    """The script as it is shipped, in a folder that `lockstep init ad` has filled; CPU workers instead of GPUs."""
    if not (folder / "small.yaml").exists():
        make(folder, histories)
        shutil.copytree(AD, folder, dirs_exist_ok=True)
        (folder / ".lockstep-python").write_text(sys.executable)
    each = str(2 // nodes)
    flags = (f"--nodes={nodes}", *ON_CPU)
    command = ("sbatch", "--parsable", *flags, "multi_gpu_train.slurm", *WORDS, *HALF, "--gpus", each, *words)
    answer = slurm.run(*command, cwd=folder)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


@pytest.mark.slurm
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_starts_one_launcher_per_node(
    nodes: int, slurm: Cluster, whole: Path, histories: Path, tmp_path: Path
) -> None:
    """Item 152."""
    folder = tmp_path / "work"
    job = submitted(slurm, folder, histories, nodes=nodes)
    state = slurm.wait(job, seconds=SECONDS)
    output = (folder / "out.txt").read_text()
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert output.count("Number of processes: 2\n") == 1
    assert bits(folder) == bits(whole)


@pytest.mark.slurm
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_asks_for_a_process_per_gpu(nodes: int, slurm: Cluster, histories: Path, tmp_path: Path) -> None:
    """Item 152: 1 x 4 and 2 x 4 GPUs as SLURM gives them, with a trainer that only tells how it was started."""
    folder = make(tmp_path / "work", histories)
    shutil.copytree(AD, folder, dirs_exist_ok=True)
    (folder / ".lockstep-python").write_text(sys.executable)
    (folder / "train.py").write_text(
        "import os, sys\nprint('TOLD', os.environ['SLURM_NODEID'], os.environ['CUDA_VISIBLE_DEVICES'], *sys.argv[1:])\n"
    )
    answer = slurm.run(
        "sbatch", "--parsable", f"--nodes={nodes}", "--output=out.txt", "multi_gpu_train.slurm", cwd=folder
    )
    slurm.wait(answer.stdout.strip(), seconds=SECONDS)
    told = sorted(line for line in (folder / "out.txt").read_text().splitlines() if line.startswith("TOLD"))
    assert told == [f"TOLD {node} 0,1,2,3 --launch workers --gpus all" for node in range(nodes)]


@pytest.mark.slurm
def test_srun_alone_is_enough(slurm: Cluster, whole: Path, histories: Path, tmp_path: Path) -> None:
    """Item 153."""
    folder = make(tmp_path / "work", histories)
    answer = slurm.run("srun", "--ntasks=2", sys.executable, TRAINER, *WORDS, *HALF, cwd=folder)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert (answer.stdout + answer.stderr).count("Number of processes: 2\n") == 1
    assert bits(folder) == bits(whole)


@pytest.mark.slurm
@pytest.mark.parametrize("word", ["--signal=USR1", "--signal=USR2", ""])
def test_a_warning_requeues_and_scancel_does_not(
    word: str, slurm: Cluster, whole: Path, histories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 154: the requeued job resumes to the same bits."""
    monkeypatch.setenv("LOCKSTEP_FAULT", "hang@seconds=0.3")
    folder = tmp_path / "work"
    job = submitted(slurm, folder, histories)
    deadline = time.monotonic() + SECONDS
    while max(steps(folder), default=-1) < 6:
        assert time.monotonic() < deadline, (folder / "out.txt").read_text()
        time.sleep(0.1)
    slurm.run("scancel", *([word] if word else []), job, cwd=folder)
    if not word:
        state = slurm.wait(job, seconds=SECONDS)
        assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), (folder / "out.txt").read_text()
        assert check_file(folder) >= 6
        return
    slurm.wait(job, ("PENDING", "COMPLETED"), seconds=SECONDS)
    kept = check_file(folder)
    assert kept == max(steps(folder)) + 1
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5", cwd=folder)
    state = slurm.wait(job, seconds=SECONDS)
    output = (folder / "out.txt").read_text()
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), output
    assert f"Resuming from step {kept}\n" in output
    assert bits(folder) == bits(whole)
