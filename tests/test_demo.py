"""The first command of the README: `bash run.sh` alone, on a machine without a GPU, shows a model that learns."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome

MOST_CPU_SECONDS = 240  # two minutes on two cores
LEAST_LEARNT = 2.0  # nats between the first loss and the validation at the end


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_command_trains_a_model_that_visibly_learns(checkout: Path) -> None:
    """In a copy of the checkout, with the environment of these tests as the active one: nothing is installed."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "PYTHONPATH", "GPU_RANK", "DATASET_CACHE_DIR", "CONDA_PREFIX")
    }
    variables |= {"CUDA_VISIBLE_DEVICES": "", "VIRTUAL_ENV": sys.prefix}
    before = cpu_seconds_of_children()
    answer = subprocess.run(["bash", "run.sh"], cwd=checkout, env=variables, capture_output=True, text=True)
    used = cpu_seconds_of_children() - before
    text = answer.stdout
    assert answer.returncode == 0, text + answer.stderr
    assert used < MOST_CPU_SECONDS
    assert not (checkout / ".venv").exists()
    assert "Installing" not in answer.stderr

    first = float(re.findall(r"Step \[0/\d+\] \| Loss: ([\d.]+)", text)[0])
    validation = [float(loss) for loss in re.findall(r"Validation \| Step \d+ \| Loss: ([\d.]+)", text)]
    assert len(validation) >= 2
    assert validation[-1] <= first - LEAST_LEARNT
    assert validation[-1] < validation[0], "and it goes on learning"
    sample = re.findall(r"│ (.+)", text)
    assert len(" ".join(sample).split()) >= 5, "a sample of some words is shown"
    results = checkout / re.findall(r"results\s+(\S+)", text)[-1]
    assert (results / "events.jsonl").is_file()
    assert list((results / "checkpoints").glob("step_*/manifest.json"))


UNIGRAM = 3.295  # nats a byte of the validation text, by how often each byte stands in the training text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_of_masked_diffusion_looks_at_its_neighbours(
    lockstep: Callable[..., Outcome], in_dir: Path, shared_cache: Path
) -> None:
    """The bound ends well below what counting bytes gives (2.61 when it was written), and few blanks are easier."""
    ended = lockstep("train", "llada", "demo", "--device", "cpu", "--name", "run", "report.tensorboard=false")
    assert ended.code == 0, ended.text
    events = [json.loads(line) for line in Path("runs/run/events.jsonl").read_text().splitlines()]
    last = [event for event in events if event["kind"] == "eval"][-1]
    assert last["val_loss"] < UNIGRAM - 0.5
    assert last["val_loss_t_0"] < last["val_loss_t_9"] - 0.5
