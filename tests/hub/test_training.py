"""Training from the hub, to the end: with a token that nobody may find again, and by the documented command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome
from tests.hub import corpora
from tests.hub.server import LoopbackHub
from tests.hub.test_doors import child_environment

CANARY = "hf_CanaryThatNobodyMayWriteDown"
QUICK = ("--device", "cpu", "--max-steps", "2", "training.eval_batches=1", "training.context_length=64")


@pytest.mark.parametrize("way", ["variable", "flag", "assignment"])
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_training_from_a_private_dataset_leaves_no_trace_of_the_token(
    in_dir: Path,
    loopback: LoopbackHub,
    lockstep: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    streaming: str,
) -> None:
    """Items 41, 82."""
    corpora.add_imdb(loopback, documents=80)
    loopback.private, loopback.allowed_token = {"stanfordnlp/imdb"}, CANARY
    words = ("train", "llama", "tiny", "--dataset", "imdb", "--streaming", streaming, "--name", "x", *QUICK)
    assert lockstep(*words).code == 66  # the control
    given: tuple[str, ...] = {"flag": ("--hf-token", CANARY), "assignment": (f"data.hf_token={CANARY}",)}.get(way, ())
    if way == "variable":
        monkeypatch.setenv("HF_TOKEN", CANARY)
    ended = lockstep(*words, *given, "--log-level", "DEBUG", "--log-file", "all.log")
    assert ended.code == 0, ended.text
    assert CANARY in {asked.token for asked in loopback.asked}
    assert CANARY not in ended.text
    files = [path for path in in_dir.rglob("*") if path.is_file()]
    assert {"config.json", "env.json", "events.jsonl", "all.log", "model.safetensors"} <= {path.name for path in files}
    for path in files:
        assert CANARY.encode() not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.ranks
def test_the_documented_command_under_torchrun(in_dir: Path, loopback: LoopbackHub) -> None:
    """Item 82, with the token in the environment: two workers read the mixture as a stream."""
    corpora.add_mixture(loopback)
    loopback.private, loopback.allowed_token = {"stanfordnlp/imdb"}, CANARY
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lockstep", "train", "llama"),
        *("tiny", "--dataset", "hf", "--batch-size", "4", "--lr", "3e-5", "--streaming", "true"),
        *("--max-samples", "500k", "--max-steps", "3", "--device", "cpu", "--name", "x"),
    ]
    environment = child_environment(loopback, in_dir) | {"HF_TOKEN": CANARY}
    with (in_dir / "said").open("w") as out:
        code = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=240).returncode
    said = (in_dir / "said").read_text()
    assert code == 0, said
    assert "Dataset: hf\n" in said
    assert list(in_dir.glob("runs/x/checkpoints/step_*"))
    assert {name for _, name in loopback.repos} == {
        name for _, name in loopback.repos if any(f"/{name}/" in asked.path for asked in loopback.asked)
    }
    assert not [path for path in in_dir.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
