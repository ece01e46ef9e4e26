"""The scripts of Algorithm Distillation: precision, banner and flags (contract items 129, 137, 141, 152, 157)."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import compat_ad
from lockstep.compat import DOORS, PROGRAMS, init, parse, resolve
from lockstep.contracts import StepRecord
from lockstep.engine.present import workers_banner
from lockstep.report.console import ConsoleSink
from lockstep.runtime import env
from tests.conftest import Outcome
from tests.doors.agents import AD, make

Run = Callable[..., Outcome]
TRAIN = DOORS["train.py"]


@pytest.fixture(autouse=True)
def here(in_dir: Path, gpus: Callable[[int], None]) -> Path:
    gpus(1)
    return in_dir


def loaded(*words: str) -> Any:
    return resolve(TRAIN, *parse(TRAIN, TRAIN.complete(words)))


# ------------------------------------------------------------------------------------------------------- the precision

CASES = [  # words, ACCELERATE_MIXED_PRECISION, on a GPU, on the CPU, who decided (on the GPU)
    ([], "", "fp16", "auto", r"ad_base\.yaml:\d+:\d+"),
    ([], "no", "fp16", "auto", r"ad_base\.yaml:\d+:\d+"),
    ([], "bf16", "bf16", "bf16", "the launcher"),
    ([], "fp16", "fp16", "fp16", "the launcher"),
    (["--set", "mixed_precision=bf16"], "", "bf16", "bf16", "--mixed_precision"),
    (["--precision", "fp32"], "bf16", "fp32", "fp32", "--precision"),
    (["--set", "mixed_precision=no"], "", "fp32", "fp32", "--mixed_precision"),
    (["--config", "none.yaml"], "", "auto", "auto", "the machine"),
    (["--config", "no.yaml"], "", "fp32", "fp32", r"no\.yaml:1:18"),
]


@pytest.mark.parametrize(("words", "launcher", "on_gpu", "on_cpu", "source"), CASES)
def test_who_decides_the_precision(
    words: list[str], launcher: str, on_gpu: str, on_cpu: str, source: str, here: Path,
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Item 137, E5: launcher > file > auto, a flag of our own > all; 16 bits of a file alone are left to the CPU."""
    (here / "none.yaml").write_text("tf_n_embd: 64\n", encoding="utf-8")
    (here / "no.yaml").write_text("mixed_precision: 'no'\n", encoding="utf-8")
    if launcher:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    found = loaded(*words)
    assert found.config.training.precision == on_gpu
    assert re.search(source, compat_ad.precision_source(found))
    gpus(0)
    found = loaded(*words)
    assert found.config.training.precision == on_cpu
    assert any("fp16 needs a GPU" in line for line in TRAIN.opening(found)) == (on_cpu != on_gpu)


# ---------------------------------------------------------------------------------------------------------- the banner

BANNER = """\
============================================================
Multi-GPU Training Configuration
============================================================
Number of processes: 4
Distributed type: DistributedType.MULTI_GPU
Mixed precision: fp16
Gradient accumulation steps: 1
Main process device: cuda:0
============================================================"""


def test_the_banner_is_that_of_the_guide() -> None:
    """Contract 4.4: 60 signs of equality."""
    lines = workers_banner("fp16", 1, device=torch.device("cuda:0"), world=4)
    assert lines == BANNER.splitlines()
    assert lines[0] == "=" * 60
    assert "Mixed precision: no" in workers_banner("fp32", 1, device=torch.device("cpu"), world=2)


@pytest.mark.parametrize(("world", "accumulated", "total"), [(4, 1, 2048), (8, 2, 8192), (1, 1, 512)])
def test_batch_sizes_are_per_gpu_and_the_whole_is_told(
    world: int,
    accumulated: int,
    total: int,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Item 141, E3, E4."""
    found = loaded("--config", "config/model/ad_dr.yaml", "--device", "cpu")
    monkeypatch.setattr(env, "detect", lambda *_: env.Env(world=world, local_world=world))
    fields = {"run": str(here), "precision": "fp32", "batch_size": 512, "accumulated": accumulated}
    with caplog.at_level(logging.INFO):
        compat_ad.Lines(found).event("start", fields)
    assert "Batch size per GPU: 512" in caplog.messages
    (line,) = [line for line in caplog.messages if line.startswith("Global batch size: ")]
    assert line == f"Global batch size: {total} (512 per GPU x {world} processes x {accumulated} accumulated)"
    assert ("Number of processes: 1" in caplog.messages) == (world == 1), "of several the engine has told"


def test_a_length_that_is_no_whole_number_of_regions_is_told() -> None:
    assert "n_transit 328: 4 regions of 80 steps, and 8 of another" in TRAIN.opening(loaded())
    assert not any("regions" in line for line in TRAIN.opening(loaded("--set", "n_transit=320")))
    assert not any("regions" in line for line in TRAIN.opening(loaded("--config", "config/model/ad_dr.yaml")))


def test_without_a_gpu_it_says_so(gpus: Callable[[int], None]) -> None:
    """E15."""
    gpus(0)
    assert "No GPU found: training on the CPU" in TRAIN.opening(loaded())
    assert not any("No GPU found" in line for line in TRAIN.opening(loaded("--device", "cpu")))


# -------------------------------------------------------------------------------------------------- the other commands


def test_without_histories_the_next_command_is_named(door: Run, here: Path) -> None:
    """Item 13 of 4.7: before anything else is done."""
    make(here)
    result = door("train.py", "--config", "small.yaml", "--device", "cpu", "--set", "alg_seed=7")
    assert result.code == 66
    assert "datasets/history_darkroom_PSRL_alg-seed7.hdf5: there are no histories to learn from" in result.err
    assert "try: python collect.py --config small.yaml --set alg_seed=7" in result.err
    assert not (here / "runs").exists()
    assert "try: python collect.py\n" in door("train.py", "--device", "cpu").err


def test_what_evaluate_cannot_find(door: Run, here: Path) -> None:
    for words in ([], ["--ckpt_dir", "nope"]):
        result = door("evaluate.py", *words)
        assert result.code == 66
        assert "there is no trained agent" in result.err
    (here / "empty").mkdir()
    assert "no ckpt-<step>.pt here" in door("evaluate.py", "--ckpt-dir=empty").err
    (here / "empty" / "ckpt-9.pt").write_bytes(b"junk\n")
    for named in ("empty", "empty/ckpt-9.pt"):
        damaged = door("evaluate.py", f"--ckpt-dir={named}")
        assert damaged.code == 65
        assert "empty/ckpt-9.pt: foreign or damaged file, refused: not a file of" in damaged.text
    assert door("evaluate.py", "--goal_idx", "x").code == 2
    assert door("evaluate.py", "--goals", "1").code == 2


@pytest.mark.parametrize("script", ["train.py", "collect.py", "evaluate.py"])
def test_help(script: str, door: Run) -> None:
    """Item 157."""
    assert script in DOORS or script in PROGRAMS
    result = door(script, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: python3 {script}")


def test_the_shell_scripts(here: Path) -> None:
    """Items 129, 152: nothing for shellcheck to say, and the words that reach train.py."""
    scripts = [AD / name for name in ("train_multi_gpu.sh", "launch_multi_gpu.sh", "multi_gpu_train.slurm")]
    if tool := shutil.which("shellcheck"):
        checked = subprocess.run([tool, "-x", "-e", "SC1091", *map(str, scripts)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout
    tell = here / "bin"
    tell.mkdir()
    (tell / "python3").write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$CUDA_VISIBLE_DEVICES|$*"\n', encoding="utf-8")
    (tell / "python3").chmod(0o755)
    (tell / "srun").write_text('#!/bin/sh\nexec echo "$@"\n', encoding="utf-8")
    (tell / "srun").chmod(0o755)

    def said(script: Path, *words: str, **variables: str) -> str:
        environ = {"PATH": f"{tell}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(AD)} | variables
        return subprocess.run(["bash", str(script), *words], capture_output=True, text=True, env=environ).stdout.strip()

    several, launch, slurm = scripts
    trainer = AD / "train.py"
    start = "-m accelerate.commands.launch --num_processes"
    four = f"{start} 4 --multi_gpu --main_process_port 0 {trainer} --set lr=1e-4"
    assert said(several, "--set", "lr=1e-4") == f"0,1,2,3|{four}"
    assert said(several, CUDA_VISIBLE_DEVICES="5") == f"5|{start} 1 {trainer}"
    assert re.fullmatch(
        rf"\|{trainer} --launch accelerate --gpus 2 --config config/model/ad_dr_compressed\.yaml "
        r"--log-file logs/multi_gpu_\d{8}_\d{6}/training\.log", said(launch),
    )  # fmt: skip
    assert " --gpus all --config mine.yaml " in said(launch, "all", "mine.yaml", "--name", "x")
    assert said(launch, "mine.yaml") == ""
    assert said(slurm, "--name", "x").endswith(f"python3 {trainer} --launch workers --gpus all --name x")
    directives = re.findall(r"^#SBATCH (.*)$", slurm.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"--ntasks-per-node=1", "--gpus-per-node=4", "--nodes=1", "--requeue", "--signal=USR1@120",
            "--job-name=ad_train", "--time=24:00:00"} <= set(directives)  # fmt: skip


def test_init_puts_all_of_it_into_a_folder(here: Path) -> None:
    """Item 157: scripts, files of settings, and scripts of the shell that can be called."""
    written = {path.relative_to(here / "new").as_posix() for path in init("ad", here / "new")}
    assert written == {
        path.relative_to(AD).as_posix() for path in AD.rglob("*") if path.suffix != ".pyc" and path.is_file()
    }
    assert {"train.py", "collect.py", "evaluate.py", "multi_gpu_train.slurm", "config/model/ad_dr.yaml"} <= written
    assert all(os.access(path, os.X_OK) for path in (here / "new").glob("*.sh"))
    scripts = sorted({path for path in (here / "new").iterdir() if path.suffix in (".sh", ".slurm", ".py")})
    started = [path for path in scripts if path.name not in ("python.sh", "install_hint.py")]
    assert len(started) == 6
    for path in started:  # with a python3 on PATH that has no lockstep
        program = [sys.executable] if path.suffix == ".py" else ["bash"]
        environ = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(here / "new")}
        answer = subprocess.run([*program, str(path), "--help"], capture_output=True, text=True, env=environ, cwd=here)
        assert answer.returncode == 0, answer.stderr
        name = path.name if path.suffix == ".py" else "train.py"
        assert answer.stdout.startswith(f"usage: python3 {name}"), path


def test_the_bar_says_loss_as_documented() -> None:
    """Contract 4.4."""
    screen = io.StringIO()
    sink = ConsoleSink(10, clip=True, log_interval=100, progress="on", stream=screen, family="ad")
    sink.write(StepRecord(step=0, loss=1.25, grad_norm=1.0, lr=0.1, seconds=1.0, tokens=10))
    sink.close()
    assert "loss=1.2500" in screen.getvalue()
