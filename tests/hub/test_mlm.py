"""The masked-LM scripts and the hub: the documented commands as the guide has them (contract items 82-84, 87-90)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.runtime import env
from tests.conftest import Outcome
from tests.hub import corpora
from tests.hub.server import LoopbackHub
from tests.hub.test_doors import ROOT, child_environment, door

__all__ = ["door"]
SCRIPT = "mlm_pretrain_v3.py"
TRAINER = str(ROOT / "doors" / "mlm" / SCRIPT)
QUICK = ("--max-steps", "2", "--vocab-size", "600", "training.eval_batches=1", "report.tensorboard=false")
RESULTS = {"mlm_model.pth", "tokenizer.json", "mlm_training_history.json", "training_history.png"}
Run = Callable[..., Outcome]


def results(folder: Path) -> set[str]:
    return {path.name for path in (folder / ".mlm_pretrained_v3").glob("*")}


@pytest.mark.slow
def test_no_argument_at_all(in_dir: Path, loopback: LoopbackHub, door: Run) -> None:
    """Item 84: every default can be run, five epochs of the mixture as a stream."""
    corpora.add_mixture(loopback)
    ended = door(SCRIPT)
    assert ended.code == 0, ended.text
    for line in ("  - Dataset: hf\n", "  - Streaming: True\n", "  - Epochs: 5\n", "  - Max Samples: 500,000\n"):
        assert line in ended.out
    assert ended.out.count("Train Loss: ") == 5
    assert results(in_dir) == RESULTS
    assert len(json.loads((in_dir / ".mlm_pretrained_v3/mlm_training_history.json").read_text())["val_losses"]) == 5


@pytest.mark.parametrize("kind", [pytest.param("array", marks=pytest.mark.slow), "lines", "hub"])
def test_imdb_from_its_files_or_from_the_hub(in_dir: Path, loopback: LoopbackHub, door: Run, kind: str) -> None:
    """Item 89: items with `text` as a list of words, and `label`."""
    if kind == "hub":
        corpora.add_imdb(loopback, documents=60)
    else:
        items = [json.dumps({"text": corpora.text(number).split(), "label": number % 2}) for number in range(60)]
        text = f"[{','.join(items)}]" if kind == "array" else "\n".join(items)
        (in_dir / "imdb_train.json").write_text(text, encoding="utf-8")
    ended = door(SCRIPT, "--dataset", "imdb", *QUICK)
    assert ended.code == 0, ended.text
    assert "4 layers, width 8" in ended.out
    assert bool(loopback.asked) == (kind == "hub")
    vocabulary = json.loads((in_dir / ".mlm_pretrained_v3/tokenizer.json").read_text(encoding="utf-8"))
    assert {"[MASK]", "town"} <= set(vocabulary)


def test_a_dataset_that_cannot_be_had_is_named_and_not_replaced(in_dir: Path, loopback: LoopbackHub, door: Run) -> None:
    """Item 90: of a mixture too; a list of fallbacks is followed and said."""
    corpora.add_mixture(loopback)
    del loopback.repos["datasets", "rajpurkar/squad"]
    refused = door(SCRIPT, *QUICK)
    assert refused.code == 66
    assert "rajpurkar/squad" in refused.text
    assert "Traceback" not in refused.text
    assert not (in_dir / "runs").exists()
    ended = door(SCRIPT, "--dataset", "hf|imdb", *QUICK)
    assert ended.code == 0, ended.text
    assert "training on imdb" in ended.text


@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stream_never_asks_for_the_whole(in_dir: Path, loopback: LoopbackHub, door: Run, streaming: bool) -> None:
    """Item 87: bytes that were sent, of one large file, and parts alone were asked for; the download is the control."""
    lines = "\n".join(json.dumps({"text": corpora.text(number, sentences=60)}) for number in range(3000))
    loopback.add("someone/stories", {"train.jsonl": lines})
    words = ("--dataset", "someone/stories", "--streaming", str(streaming), "--max-samples", "200", *QUICK)
    ended = door(SCRIPT, *words)
    assert ended.code == 0, ended.text
    assert (loopback.sent_bytes < len(lines) / 2) == streaming
    asked = [each for each in loopback.asked if each.method == "GET" and each.path.endswith("/train.jsonl")]
    assert asked
    assert all(each.range for each in asked) == streaming


def torchrun(loopback: LoopbackHub, folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(
        command, cwd=folder, env=child_environment(loopback, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
def test_the_documented_torchrun_line(in_dir: Path, loopback: LoopbackHub) -> None:
    """Item 82, with two processes and a port that is free."""
    corpora.add_mixture(loopback)
    port = f"--master_port={env.free_port('127.0.0.1')}"
    job = torchrun(
        loopback, in_dir, "--nproc_per_node=2", "--nnodes=1", "--node_rank=0", "--master_addr=localhost", port, TRAINER,
        "--dataset", "hf", "--batch-size", "32", "--epochs", "5", "--lr", "3e-5", "--streaming", "true",
        "--max-samples", "500k",
    )  # fmt: skip
    said = job.communicate(timeout=280)[0]
    assert job.returncode == 0, said
    assert said.count("Multi-GPU MLM Training Setup:") == 1
    assert "  - Batch Size per GPU: 32\n  - Total Batch Size: 64\n" in said
    assert said.count("Train Loss: ") == 5
    assert results(in_dir) == RESULTS


@pytest.mark.slow
@pytest.mark.ranks
def test_the_documented_multi_node_lines(in_dir: Path, loopback: LoopbackHub) -> None:
    """Item 83: no argument, two launchers, nothing shared; only the first machine writes results. Again: no hang."""
    corpora.add_mixture(loopback)
    folders = [in_dir / f"node{node}" for node in range(2)]
    for folder in folders:
        folder.mkdir()

    def run() -> list[str]:
        port = f"--master_port={env.free_port('127.0.0.1')}"
        jobs = [
            torchrun(loopback, folder, "--nproc_per_node=1", "--nnodes=2", f"--node_rank={node}",
                     "--master_addr=127.0.0.1", port, TRAINER)
            for node, folder in enumerate(folders)
        ]  # fmt: skip
        said = [job.communicate(timeout=280)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)
        return said

    first, second = run()
    assert first.count("Train Loss: ") == 5
    assert "Train Loss: " not in second
    assert results(folders[0]) == RESULTS
    assert results(folders[1]) == set()
    again = run()
    assert "Nothing left to do" in again[0]
