"""Files that somebody made to do harm, wherever we read (row 36): nothing is run, and one error names the file."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import rundir
from tests.conftest import Outcome
from tests.gates.training import FEW_WORDS

Cli = Callable[..., Outcome]

pytestmark = [pytest.mark.usefixtures("shared_cache"), pytest.mark.timeout(120)]

QUICK = ("--device", "cpu", "report.sample_prompt=", "report.tensorboard=false", "training.eval_batches=1",
         "system.threads=1", "training.save_interval=1", f"data.data_path={FEW_WORDS}")  # fmt: skip
EXPECTED_CODES = {0, 2, 65, 66, 73}  # done without the file, or refused
MOST_BYTES = 1 << 30
SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "model_type": "llama"}  # fmt: skip
FAULTS = "workers/n0-CPU/faults/step_000001"
Payload = bytes | Callable[[Path], None]


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def saved(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zip_bomb() -> bytes:
    """A file of torch.save, packed: 4 GiB of zeros in some megabytes."""
    plain = saved(lambda file: torch.save({"a": torch.zeros(1 << 20)}, file))
    buffer, zeros = io.BytesIO(), bytes(1 << 26)
    with zipfile.ZipFile(io.BytesIO(plain)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            with new.open(entry.filename, "w", force_zip64=True) as file:
                for _ in range(64 if entry.filename.endswith("data/0") else 0):
                    file.write(zeros)
                if not entry.filename.endswith("data/0"):
                    file.write(old.read(entry))
    return buffer.getvalue()


def safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + b"0000"


@pytest.fixture
def harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What appears if anything is run: by a pickle, or by the import of a module."""
    touched = tmp_path / "touched"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "harmful.py").write_text(f"import os\nos.mkdir({str(touched)!r})\nthing = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return touched


def payloads(harm: Path) -> dict[str, Payload]:
    bomb = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}
    return {
        "pickle": pickle.dumps(Harm(harm)),
        "import": b"\x80\x02charmful\nthing\n.",
        "torch": saved(lambda file: torch.save({"a": Harm(harm)}, file)),
        "npy": saved(lambda file: np.save(file, np.array([Harm(harm)], object), allow_pickle=True)),
        "deep": b'{"a":' * 100_000,
        "list": b"[]",
        "number": b"1" * 10_000,
        "8 EB header": struct.pack("<Q", 8 << 60) + b"{}",
        "large tensor": safetensors(json.dumps(bomb).encode()),
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "link": lambda path: path.symlink_to("/etc/passwd"),
        "large": lambda path: path.touch() or os.truncate(path, 2 * rundir.JSON_BYTES),
    }


KINDS = tuple(payloads(Path()))


def put(path: Path, payload: Payload) -> None:
    """In the place of a file; a manifest beside it then fits, as far as it can."""
    path.unlink(missing_ok=True)
    if isinstance(payload, bytes):
        path.write_bytes(payload)
    else:
        payload(path)
    manifest = path.with_name(rundir.MANIFEST)
    if path == manifest or not manifest.is_file():
        return
    tree = json.loads(manifest.read_text())
    plain = isinstance(payload, bytes)
    tree["files"][path.name] = rundir.entry(path) if plain else {"bytes": path.stat().st_size, "sha256": "0" * 64}
    manifest.write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def run_of_others(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """A run with a checkpoint that ended at a NaN, of which a bundle was kept."""
    from lockstep.cli import main

    folder = tmp_path_factory.mktemp("others")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DATASET_CACHE_DIR", str(_prepared))
        patch.setenv("LOCKSTEP_FAULT", "nan_loss@step=1")
        assert main(["train", "llama", "tiny", *QUICK, "--max-steps", "2", "--name", "theirs"]) == 71
    assert (folder / "runs/theirs" / FAULTS / "bundle.json").is_file()
    return folder / "runs" / "theirs"


def complaints(told: Outcome, harm: Path, *, name: str = "theirs") -> list[str]:
    """What is wrong with an answer: it should be one that a person can read. `name`: what an error must name."""
    wrong = {
        "something was run": harm.exists(),
        f"exit code {told.code}": told.code not in EXPECTED_CODES,
        "a traceback": "Traceback" in told.text,
        "a fault of our own": "fault of lockstep" in told.text,
        "not one error": bool(told.code) and told.text.count("error: ") != 1,
        "the file is not named": bool(told.code) and name not in told.err,
    }
    return [text for text, is_so in wrong.items() if is_so]


def check_harmless(told: Outcome, harm: Path, *, case: str = "") -> None:
    assert not complaints(told, harm), f"{case}: {told.text}"


READERS: dict[str, tuple[str, ...]] = {
    "resume": ("resume", "runs/theirs"),
    "prove": ("resume", "runs/theirs", "--prove"),
    "diff": ("diff", "runs/theirs", "runs/ours"),
    "status": ("status", "runs/theirs"),
    "logs": ("logs", "runs/theirs"),
    "home": (),
    "sample": ("sample", "runs/theirs", "hello"),
    "replay": ("replay", f"runs/theirs/{FAULTS}"),
}
MAY_SAY = {"diff": (1,), "prove": (1,), "resume": (71,)}  # different; and what can be resumed may meet its NaN again
OF_A_RUN = ("config.json", "env.json", "events.jsonl", "failure.json", "owner.json", "workers/n0-CPU/log.txt",
            "workers/n0-CPU/heartbeat")  # fmt: skip
OF_A_CHECKPOINT = ("run.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json",
                   "tokenizer_config.json", "manifest.json", "model.safetensors.index.json")  # fmt: skip
OF_A_BUNDLE = ("bundle.json", "batch.safetensors", "manifest.json", "tokenizer.json")
FEW = [
    ("config.json", "deep", "home"),
    ("events.jsonl", "pipe", "resume"),
    ("run.json", "deep", "resume"),
    ("model.safetensors", "8 EB header", "resume"),
    ("manifest.json", "device", "diff"),
    ("bundle.json", "deep", "replay"),
    ("batch.safetensors", "pickle", "replay"),
    ("failure.json", "device", "status"),
    ("workers/n0-CPU/log.txt", "link", "resume"),
]


def all_cases() -> list[Any]:
    """Every file that a verb may meet, in every way."""
    return [
        pytest.param([(file, kind, verb) for kind in KINDS], id=f"{verb}-{file}", marks=pytest.mark.slow)
        for verb in READERS
        for file in (*OF_A_RUN, *(OF_A_BUNDLE if verb == "replay" else OF_A_CHECKPOINT))
    ]


def folders_of(file: str, verb: str, run: Path) -> list[Path]:
    """Where in a run such a file lies."""
    if verb == "replay" and file in OF_A_BUNDLE:
        return [run / FAULTS]
    return [*(run / "checkpoints").iterdir()] if file in OF_A_CHECKPOINT else [run]


@pytest.mark.parametrize("cases", [FEW, *all_cases()])
def test_a_run_folder_of_others(
    cases: list[tuple[str, str, str]], in_dir: Path, lockstep: Cli, harm: Path, run_of_others: Path
) -> None:
    bad: list[str] = []
    for file, kind, verb in cases:
        theirs = in_dir / "runs" / "theirs"
        for name in ("theirs", "ours"):
            shutil.rmtree(theirs.with_name(name), ignore_errors=True)
            shutil.copytree(run_of_others, theirs.with_name(name))
        for folder in folders_of(file, verb, theirs):
            put(folder / file, payloads(harm)[kind])
        said = lockstep(*READERS[verb])
        if verb in MAY_SAY and said.code in MAY_SAY[verb]:
            said = Outcome(0, said.out, said.err)
        bad += [f"{file}, {kind}, {verb}: {text}\n{said.text}" for text in complaints(said, harm)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("name", ["../../../outside", "/etc/passwd", "a/../../../outside"])
def test_a_manifest_that_leads_out(name: str, in_dir: Path, lockstep: Cli, harm: Path, run_of_others: Path) -> None:
    shutil.copytree(run_of_others, in_dir / "runs" / "theirs")
    for manifest in (in_dir / "runs/theirs/checkpoints").glob("*/manifest.json"):
        tree = json.loads(manifest.read_text())
        tree["files"][name] = {"bytes": 1, "sha256": "0" * 64}
        manifest.write_text(json.dumps(tree))
    said = lockstep("resume", "runs/theirs")
    assert said.code == 65
    assert "outside the folder" in said.text
    check_harmless(said, harm)


@pytest.mark.parametrize("kind", ["pickle", "import", "torch", "npy", "deep", "pipe", "device"])
def test_a_pt_file(kind: str, in_dir: Path, lockstep: Cli, harm: Path) -> None:
    put(in_dir / "theirs.pt", payloads(harm)[kind])
    said = lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "2", "--resume", "theirs.pt")
    assert said.code in (65, 66)
    check_harmless(said, harm)


@pytest.mark.slow
def test_a_pt_file_that_grows_in_memory(in_dir: Path, lockstep: Cli, harm: Path) -> None:
    (in_dir / "theirs.pt").write_bytes(zip_bomb())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "2", "--resume", "theirs.pt")
    assert said.code == 65
    assert "claim to hold" in said.err
    check_harmless(said, harm)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "pytorch_model.bin", "tokenizer.json"])
def test_a_model_folder(file: str, kind: str, in_dir: Path, lockstep: Cli, harm: Path) -> None:
    folder = in_dir / "theirs"
    folder.mkdir()
    where = ("data.tokenizer_name=theirs",) if file == "tokenizer.json" else ("model.init=pretrained",)
    (folder / "config.json").write_text(json.dumps(SIZES))
    put(folder / file, payloads(harm)[kind])
    said = lockstep("train", "llama", "tiny", *QUICK, "--max-steps", "1", "model.model_path=theirs", *where)
    assert said.code != 0
    check_harmless(said, harm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_golden_record(kind: str, in_dir: Path, lockstep: Cli, harm: Path) -> None:
    put(in_dir / "theirs.json", payloads(harm)[kind])
    said = lockstep("check", "--quick", "--device", "cpu", "--golden", "theirs.json")
    assert said.code != 0
    check_harmless(said, harm)


def test_the_payloads_do_harm_where_they_are_run(harm: Path) -> None:
    """Negative control: what we never do, done."""
    made = {kind: payload for kind, payload in payloads(harm).items() if isinstance(payload, bytes)}
    for run in (
        lambda: pickle.loads(made["pickle"]),  # noqa: S301 - to show what would happen
        lambda: pickle.loads(made["import"]),  # noqa: S301 - the same
        lambda: torch.load(io.BytesIO(made["torch"]), weights_only=False),
        lambda: np.load(io.BytesIO(made["npy"]), allow_pickle=True),
    ):
        run()
        harm.rmdir()
