"""The hub as a user meets it: `auto`, the documented scripts, several workers, several machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import compat
from lockstep.data.cache import Table
from lockstep.data.tokenize import ByteTokenizer, load_tokenizer
from lockstep.runtime import env
from tests.conftest import Outcome
from tests.hub import corpora
from tests.hub.server import Fault, LoopbackHub

ROOT = Path(__file__).resolve().parents[2]
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SMALL = ("training.context_length=64", "model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64",
         "model.num_attention_heads=2", "model.num_key_value_heads=2", "model.vocab_size=4096")  # fmt: skip
QUICK = ("--device", "cpu", "--max-steps", "2", "training.eval_batches=1", "report.tensorboard=false")


def add_model(loopback: LoopbackHub, folder: Path) -> None:
    """A tokenizer where the default model has its own."""
    folder.mkdir()
    ByteTokenizer().save(folder)
    loopback.add(MODEL, {path.name: path.read_bytes() for path in folder.iterdir()}, kind="models")


@pytest.fixture
def door(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(script: str, *words: str) -> Outcome:
        code = compat.main(script, list(words))
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run


def test_the_documented_script_prepares_once(
    in_dir: Path, loopback: LoopbackHub, door: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Items 31, 33 and AB13: wikitext and the model's own tokenizer; the second time the hub is not asked."""
    corpora.add_wikitext(loopback)
    add_model(loopback, tmp_path / "model")
    words = ("--preset", "production", "--device", "cpu", "training.context_length=64")
    first = door("prepare_dataset.py", *words)
    assert first.code == 0, first.text
    assert "No dataset named: training on wikitext" in first.text
    assert "Dataset ready: " in first.text
    (made,) = (path for path in (in_dir / ".cache/datasets").glob("*/meta.json"))
    meta = json.loads(made.read_text())
    assert meta["source"] == "wikitext"
    assert load_tokenizer(made.parent).fingerprint() == ByteTokenizer().fingerprint()
    assert re.fullmatch("[0-9a-f]{40}", meta["key"]["content"]["members"][0]["commit"])
    loopback.forget()
    second = door("prepare_dataset.py", *words)
    assert second.code == 0, second.text
    assert "[Cache] Loaded train data from cache" in second.text
    assert loopback.asked == []
    shutil.rmtree(".cache")
    third = door("prepare_dataset.py", *words)
    assert third.code == 0, third.text
    assert "[Cache] Saved to" in third.text


def test_a_gated_model_falls_back_only_where_nothing_was_named(
    in_dir: Path, loopback: LoopbackHub, lockstep: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 42 and AB13: `auto` says it loudly and trains; a name that was given is refused with the variable."""
    corpora.add_wikitext(loopback)
    loopback.add(MODEL, {"tokenizer.json": b"{}"}, kind="models")
    loopback.fail(MODEL, Fault("status", 401))
    ended = lockstep("train", "llama", "production", *SMALL, *QUICK, "--name", "x")
    assert ended.code == 0, ended.text
    assert ended.text.count(f"none of {MODEL}") == 1
    saved = json.loads((in_dir / "runs/x/config.json").read_text())
    assert re.fullmatch("wikitext@[0-9a-f]{40}", saved["config"]["data"]["dataset_name"])
    assert saved["config"]["data"]["tokenizer_name"] == "builtin"
    refused = lockstep("train", "llama", "production", *SMALL, *QUICK, "--tokenizer-name", MODEL)
    assert refused.code == 66
    assert "HF_TOKEN" in refused.text
    assert MODEL in refused.text
    assert "Traceback" not in refused.text


def child_environment(loopback: LoopbackHub, folder: Path) -> dict[str, str]:
    """Of a process that is to find the loopback hub and nothing else."""
    unset = ("HF_HUB_OFFLINE", "DATASET_CACHE_DIR", "LOCKSTEP_SETTLED")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    path = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
    return kept | {"HF_ENDPOINT": loopback.url, "HF_HOME": str(folder / "hf_home"), "PYTHONPATH": path}


def test_a_launcher_prepares_what_its_workers_need_and_nothing_else(
    in_dir: Path, loopback: LoopbackHub, door: Callable[..., Outcome]
) -> None:
    """Items 32 and 36: the config's own dataset, built once, before any worker, and the same one for the script."""
    corpora.add_imdb(loopback, documents=60)
    settings = {"data": {"dataset_name": "imdb", "tokenizer_name": "bytes"}, "training": {"context_length": 64}}
    Path("own.json").write_text(json.dumps(settings), encoding="utf-8")
    script = [sys.executable, "-m", "lockstep.compat", "run.sh", "--config", "own.json", "--gpus", "2"]
    ended = subprocess.run(
        [*script, *SMALL, *QUICK], env=child_environment(loopback, in_dir), capture_output=True, text=True, timeout=120
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert said.count("[Cache] Saved to") == 1
    assert said.index("[Cache] Saved to") < said.index("Launching training on 2")
    assert len([*(in_dir / ".cache/datasets").glob("*/manifest.json")]) == 1
    loopback.forget()
    again = door("prepare_dataset.py", "--config", "own.json", *SMALL, "--device", "cpu")
    assert again.code == 0, again.text
    assert "Loaded train data from cache" in again.text
    assert loopback.asked == []


@pytest.mark.slow
@pytest.mark.ranks
def test_two_machines_without_a_shared_disk(in_dir: Path, loopback: LoopbackHub) -> None:
    """Items 82, 83 (through `lockstep train llama`): two torchrun launchers, each in a folder of its own, on a stream:
    each machine fetches its part and builds it for itself, the same.
    """
    lines = (json.dumps({"text": corpora.text(number, sentences=60)}) for number in range(1500))
    loopback.add("someone/stories", {"train.jsonl": "\n".join(lines)})  # some 7 million characters
    port = str(env.free_port("127.0.0.1"))
    flags = ("--dataset", "someone/stories", "--streaming", "true", "--max-samples", "300", "--tokenizer-name",
             "builtin", "data.tokenizer_vocab_size=512", "training.context_length=128", "training.batch_size=100",
             "model.num_layers=1", "model.hidden_size=8", "model.intermediate_size=8",
             "model.num_attention_heads=1", "model.num_key_value_heads=1", "model.vocab_size=512")  # fmt: skip
    processes = []
    for node in range(2):
        folder = in_dir / f"node{node}"
        folder.mkdir()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "--nnodes=2", f"--node_rank={node}",
            "--master_addr=127.0.0.1", f"--master_port={port}", "-m", "lockstep", "train", "llama", "tiny", *flags,
            *QUICK, "--name", "run", "--max-steps", "5",
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=child_environment(loopback, folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    one, other = (next((in_dir / f"node{node}/.cache/datasets").glob("*/train")) for node in range(2))
    assert one.parent.name == other.parent.name, "the same key on both"
    assert Table(one).rows == Table(other).rows
    events = (in_dir / "node0/runs/run/events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [event["step"] for event in map(json.loads, events) if event["kind"] == "step"] == list(range(5))
